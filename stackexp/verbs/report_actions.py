"""Show when runs push and pop: the probability of each action over the layers, as in the paper's action study.

RUNS are run folders or folders of run folders. Runs without a stack are skipped. To run the paper's study:
`fit --config arithmetic/addition` and `fit --config arithmetic/multiplication`.
"""

from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser, at_least
from stackexp.verbs.report_output import OUTPUT_USAGE, add_output_arguments, print_report

USAGE = f"RUNS ... [--set NAME] [--chunks N] {OUTPUT_USAGE}"
EXAMPLES = ("report actions runs/arithmetic --figure actions.pdf",)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of run folders")
    parser.add_argument("--set", metavar="NAME", dest="set_name", help="a validation set (default: each run's first)")
    chunks = "chunks or problems of the set (default: %(default)s)"
    parser.add_argument("--chunks", type=at_least(1), default=256, metavar="N", help=chunks)
    add_output_arguments(parser)


def run(args: Namespace) -> int:
    from stackexp.inspection.actions import build_actions

    return print_report(args, lambda: build_actions(args.runs, args.set_name, args.chunks))
