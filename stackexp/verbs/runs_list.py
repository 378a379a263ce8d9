"""List the runs below a folder: state, step, training loss, best validation loss and size."""

import json
from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser

USAGE = "[FOLDER ...] [--state STATE] [--json]"
EXAMPLES = ("runs list", "runs list runs/quickstart --state unfinished")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("folders", nargs="*", default=["runs"], metavar="FOLDER", help="default: runs")
    states = ("finished", "running", "unfinished", "damaged")
    parser.add_argument("--state", choices=states, help="only the runs in this state")
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(args: Namespace) -> int:
    from stackexp.reports.summaries import find_runs, format_summaries, summarize

    for folder in args.folders:
        if not Path(folder).is_dir():
            args.parser.error(f"{folder}: no such folder; give a folder of runs, such as runs/")
    summaries = [summarize(run) for run in find_runs(args.folders)]
    summaries = [summary for summary in summaries if args.state in (None, summary.state.value)]
    if args.json:
        print(json.dumps([vars(summary) for summary in summaries], indent=2))
    elif summaries:
        print(format_summaries(summaries))
    else:
        state = f"{args.state} " if args.state else ""
        print(f"no {state}runs in {', '.join(args.folders)}")
    return 0
