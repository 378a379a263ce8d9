"""Compare the finished trials of a sweep by its objective, the best first.

SWEEP is a shipped name, a YAML file, or a sweep's folder in runs/.
"""

import dataclasses
import json
import sys
from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser

USAGE = "SWEEP [--figures FOLDER] [--markdown | --json] [KEY=VALUE ...]"
EXAMPLES = ("sweep results stack_grid --figures figures/", "sweep results quick_grid --markdown")


def add_arguments(parser: Parser) -> None:
    parser.add_sweep()
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="plot the loss against each searched number")
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--markdown", action="store_true", help="print a Markdown table")
    style.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    from stackexp.sweeps.sweep import load_last_run

    sweep = load_last_run(args.sweep, args.overrides)
    sweep.check_trials()
    from stackexp.reports.sweeps import collect_results, describe_unscored, draw_results, format_results

    rows = collect_results(sweep)
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        print(format_results(sweep, rows, style="markdown" if args.markdown else "terminal"))
    for note in describe_unscored(sweep):
        print(note, file=sys.stderr)
    if args.figures:
        print("\n".join(map(str, draw_results(sweep, rows, args.figures))))
    return 0
