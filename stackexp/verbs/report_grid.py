"""Show the loss over the stack's heads (H), slot size (d_s) and slots (S), from the trials of a sweep.

SWEEP is a sweep's folder in runs/, a shipped name or a YAML file.
"""

from argparse import Namespace

from stackexp.verbs.parser import Parser
from stackexp.verbs.report_output import OUTPUT_USAGE, add_output_arguments, print_report

USAGE = f"SWEEP {OUTPUT_USAGE}"
EXAMPLES = ("report grid stack_grid --figure grid.pdf", "report grid runs/stack_grid --latex")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("sweep", metavar="SWEEP", help="a sweep's folder, a shipped name or a YAML file")
    add_output_arguments(parser)


def run(args: Namespace) -> int:
    from stackexp.reports.grid import build_grid

    return print_report(args, lambda: build_grid(args.sweep))
