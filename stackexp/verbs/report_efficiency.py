"""Compare the cost of the memories with the paper's efficiency table, from a file of `bench efficiency --out`."""

from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser
from stackexp.verbs.report_output import OUTPUT_USAGE, add_output_arguments, print_report

USAGE = f"FILE {OUTPUT_USAGE}"
EXAMPLES = ("report efficiency efficiency.json --figure efficiency.pdf",)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the JSON file")
    add_output_arguments(parser)


def run(args: Namespace) -> int:
    from stackexp.reports.efficiency import build_efficiency

    return print_report(args, lambda: build_efficiency(args.file))
