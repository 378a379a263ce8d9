"""Options that the bench verbs share."""

from pathlib import Path

from stackexp.verbs.parser import Parser, at_least


def add_benchmark_arguments(parser: Parser) -> None:
    """Add --config, --steps and --out."""
    parser.add_config()
    steps = "timed rounds (default: %(default)s)"
    parser.add_argument("--steps", type=at_least(1), default=100, metavar="N", help=steps)
    out = "also write hardware, versions and all measurements here"
    parser.add_argument("--out", type=Path, metavar="FILE.json", help=out)
