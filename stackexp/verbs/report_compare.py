"""Compare runs in one table, from their folders alone. Refused if they were trained on different data."""

import sys
from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser

USAGE = "RUN ... [--figure FILE] [--different-data]"
EXAMPLES = ("report compare runs/quickstart/* --figure loss.png",)


def add_arguments(parser: Parser) -> None:
    """Add the options of `report compare`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="plot the losses into this file")
    parser.add_argument("--different-data", action="store_true", help="compare runs that were trained on other data")


def run(args: Namespace) -> int:
    """Print a Markdown table, and draw the figure if requested."""
    from stackexp import runs
    from stackexp.reports.compare import check_same_data, draw_losses, format_runs

    folders = [runs.open_run(path) for path in args.runs]
    if not args.different_data:
        for warning in check_same_data(folders):
            print(warning, file=sys.stderr)
    print(format_runs(folders))
    if args.figure:
        draw_losses(folders, args.figure)
    return 0
