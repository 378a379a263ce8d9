"""Stop a sweep: its running trials save a checkpoint and exit.

SWEEP is a shipped name, a YAML file, or a sweep's folder in runs/. `sweep run` resumes the trials.
"""

from argparse import Namespace

from stackexp.verbs.parser import Parser

USAGE = "SWEEP [KEY=VALUE ...]"
EXAMPLES = ("sweep stop quick_grid",)


def add_arguments(parser: Parser) -> None:
    parser.add_sweep()


def run(args: Namespace) -> int:
    """Stop the drivers, then print the number of trials in each state."""
    from stackexp.sweeps.sweep import load_last_run

    sweep = load_last_run(args.sweep, args.overrides)
    from stackexp.sweeps.display import format_summary
    from stackexp.sweeps.runner import stop_sweep
    from stackexp.sweeps.trials import read_status

    stop_sweep(sweep)
    print(format_summary([read_status(trial, sweep.config.objective) for trial in sweep.trials]))
    return 0
