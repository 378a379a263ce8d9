"""Compare runs in one table, from their run folders. Refuses runs that were trained on different data."""

import json
import sys
from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import FIGURE_SUFFIXES, Parser

USAGE = "RUN ... [--figure FILE] [--different-data] [--markdown | --json]"
EXAMPLES = ("report compare runs/quickstart/* --figure loss.png",)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders of run folders")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="plot the losses into this file")
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--markdown", action="store_true", help="print a Markdown table")
    style.add_argument("--json", action="store_true", help="print a list of objects: summary and result of each run")
    parser.add_argument("--different-data", action="store_true", help="compare runs even if their data differ")


def run(args: Namespace) -> int:
    args.parser.check_output("--figure", args.figure, FIGURE_SUFFIXES)
    from stackexp import runs
    from stackexp.reports.compare import check_same_data, draw_losses, format_runs
    from stackexp.reports.summaries import find_runs, summarize

    folders = []
    for path in args.runs:
        found = find_runs([path]) if Path(path).is_dir() else []
        folders += found or [runs.open_run(path)]
    if not args.different_data:
        for warning in check_same_data(folders):
            print(warning, file=sys.stderr)
    if args.json:
        results = [run.read_result().to_dict() if run.is_finished else None for run in folders]
        pairs = zip(folders, results, strict=True)
        print(json.dumps([vars(summarize(run)) | {"result": result} for run, result in pairs], indent=2))
    else:
        print(format_runs(folders, "markdown" if args.markdown else "terminal"))
    if args.figure:
        draw_losses(folders, args.figure)
    return 0
