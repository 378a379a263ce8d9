"""Options that the bench verbs share."""

from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser, at_least


def add_benchmark_arguments(parser: Parser) -> None:
    """Add --config, --steps and --out."""
    parser.add_config()
    steps = "timed rounds (default: %(default)s)"
    parser.add_argument("--steps", type=at_least(1), default=100, metavar="N", help=steps)
    out = "also write hardware, versions and all measurements here"
    parser.add_argument("--out", type=Path, metavar="FILE.json", help=out)


def check_benchmark_arguments(args: Namespace) -> None:
    """Raise ConfigError for mistakes that need no torch to find; without a config, use the quickstart."""
    args.parser.check_output("--out", args.out, [".json"])
    args.config = args.config or ["quickstart"]
