"""Compare the benchmarks of runs and baselines: a table of tasks, and the average over the training tokens.

RUNS are run folders, folders of run folders, and files that `evaluate --out` wrote.
"""

from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser
from stackexp.verbs.report_output import OUTPUT_USAGE, add_output_arguments, print_report

USAGE = f"RUNS ... {OUTPUT_USAGE}"
EXAMPLES = ("report benchmarks runs/pretrain baseline.json --figure benchmarks.pdf",)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or files of evaluate --out")
    add_output_arguments(parser)


def run(args: Namespace) -> int:
    from stackexp.reports.benchmarks import build_benchmarks

    return print_report(args, lambda: build_benchmarks(args.runs))
