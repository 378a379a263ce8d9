"""Compare runs on formal languages with Table 1 of the paper, from their run folders.

RUNS are run folders, folders of run folders such as runs/formal_table, or a sweep's folder.
"""

import re
from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import FIGURE_SUFFIXES, Parser
from stackexp.verbs.report_output import OUTPUT_USAGE, add_output_arguments, print_report

USAGE = f"RUNS ... [--score A_B] [--curves FILE] {OUTPUT_USAGE}"
EXAMPLES = (
    "report formal runs/formal_table",
    "report formal runs/formal_table runs/formal --score 41_100 --latex --csv runs.csv",
    "report formal runs/formal_table --figure bars.png --curves curves.pdf",
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of run folders")
    parser.add_argument("--score", default="41_500", metavar="A_B", help="range of lengths (default: %(default)s)")
    parser.add_argument("--curves", type=Path, metavar="FILE", help="plot the accuracy against length for each task")
    add_output_arguments(parser)


def run(args: Namespace) -> int:
    lengths = _parse_lengths(args)
    args.parser.check_output("--curves", args.curves, FIGURE_SUFFIXES)
    from stackexp.reports.figures import save_figure
    from stackexp.reports.formal.cells import collect_results
    from stackexp.reports.formal.figures import draw_curves
    from stackexp.reports.formal.tables import build_formal
    from stackexp.reports.report import Report

    def build() -> Report:
        results = collect_results(args.runs, lengths)
        if args.curves:
            save_figure(draw_curves(results), args.curves)
        return build_formal(results)

    return print_report(args, build)


def _parse_lengths(args: Namespace) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)_(\d+)", args.score)
    first, last = (int(match[1]), int(match[2])) if match else (1, 0)
    if not 1 <= first <= last:
        args.parser.error(f"--score: expected a range of lengths such as 41_500, found {args.score}")
    return first, last
