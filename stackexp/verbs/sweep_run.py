"""Run the missing trials of a sweep: start new ones, resume stopped ones, retry failed ones.

SWEEP is a shipped name (the files in sweeps/), a YAML file, or a sweep's folder in runs/. The overrides apply to the
base config of every trial. The run folders are the only record: the same command runs the remaining trials, and any
number of drivers may run at once.
"""

from argparse import Namespace

from stackexp.sweeps.launchers import LAUNCHERS
from stackexp.verbs.parser import Parser, at_least

USAGE = "SWEEP [--launcher NAME] [--max-parallel N] [--retries N] [--dry-run] [KEY=VALUE ...]"
EXAMPLES = ("sweep run quick_grid", "sweep run stack_grid --dry-run", "sweep run mine.yaml --max-parallel 4 seed=1")


def add_arguments(parser: Parser) -> None:
    parser.add_sweep()
    parser.add_argument("--launcher", choices=list(LAUNCHERS), default="local", help="default: local")
    max_parallel = "trials at once (default: as many as fit)"
    parser.add_argument("--max-parallel", type=at_least(1), metavar="N", help=max_parallel)
    retries = "retries of a failed trial (default: as in the YAML)"
    parser.add_argument("--retries", type=at_least(0), metavar="N", help=retries)
    parser.add_argument("--dry-run", action="store_true", help="print the trials and the remaining cost")


def run(args: Namespace) -> int:
    from stackexp.sweeps.sweep import load_sweep

    sweep = load_sweep(args.sweep, args.overrides)
    sweep.check_trials()
    if args.dry_run:
        from stackexp.sweeps.dry_run import format_dry_run

        print(format_dry_run(sweep))
        return 0
    from stackexp.sweeps.runner import run_sweep

    run_sweep(sweep, launcher=args.launcher, max_parallel=args.max_parallel, retries=args.retries)
    print(f"\nresults:  python -m stackexp sweep results {sweep.folder}", flush=True)
    print(f"curves:   tensorboard --logdir {sweep.folder}", flush=True)
    return 0
