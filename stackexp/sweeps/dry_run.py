"""Estimate the cost of a sweep before it runs."""

from stackexp.planning.cost import make_plan
from stackexp.sweeps.display import format_summary
from stackexp.sweeps.status import State, read_status
from stackexp.sweeps.sweep import Sweep
from stackexp.tables import format_table


def format_dry_run(sweep: Sweep) -> str:
    """Return the trials of a sweep with their estimated cost, and what is left of it, in GPU-hours."""
    statuses = [read_status(trial, sweep.config.objective) for trial in sweep.trials]
    base = make_plan(sweep.base_trial.config)
    total = left = 0.0
    rows = []
    for status in statuses:
        config = status.trial.config
        hours = make_plan(config).gpu_hours
        is_settled = status.state in (State.DONE, State.PRUNED)
        remaining = 0.0 if is_settled else hours * (1 - status.step / config.trainer.max_steps)
        total, left = total + hours, left + remaining
        costs = [f"{config.trainer.max_steps:,}", f"{config.total_tokens:,}", *map(_format_hours, (hours, remaining))]
        rows.append([status.trial.name, status.state, *costs])
    if sweep.config.search:
        count = max(0, sweep.config.search.trials - len(statuses))
        hours = count * base.gpu_hours
        total, left = total + hours, left + hours
        rows.append([f"{count} more", "not chosen", "", "", *[_format_hours(hours)] * 2])
    header = ["trial", "state", "steps", "tokens", "GPU-hours", "left"]
    summary = (
        f"{format_summary(statuses)}; {_format_hours(total)} GPU-hours in total, {_format_hours(left)} left, "
        f"on {base.device} at {base.mfu:.0%} of its FLOP/s"
    )
    return f"{format_table(rows, header=header, align='<<>>>>')}\n\n{summary}"


def _format_hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.3g}"
