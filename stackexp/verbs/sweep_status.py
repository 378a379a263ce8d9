"""Show the state of each trial of a sweep, and why trials failed.

SWEEP is a shipped name, a YAML file, or a sweep's folder in runs/.
"""

import json
from argparse import Namespace

from stackexp.verbs.parser import Parser

USAGE = "SWEEP [--json] [KEY=VALUE ...]"
EXAMPLES = ("sweep status quick_grid", "sweep status runs/quick_grid")


def add_arguments(parser: Parser) -> None:
    parser.add_sweep()
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(args: Namespace) -> int:
    from stackexp.sweeps.sweep import load_last_run

    sweep = load_last_run(args.sweep, args.overrides)
    sweep.check_trials()
    from stackexp.sweeps.display import format_sweep_status, read_statuses

    statuses = read_statuses(sweep)
    if args.json:
        print(json.dumps([status.to_dict() for status in statuses], indent=2))
    else:
        print(format_sweep_status(sweep, statuses))
    return 0
