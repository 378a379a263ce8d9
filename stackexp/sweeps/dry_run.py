"""Estimate the cost of a sweep before it runs."""

from stackexp.planning.cost import MIN_PARAMETERS, make_plan
from stackexp.sweeps.display import format_summary
from stackexp.sweeps.sweep import Sweep
from stackexp.sweeps.trials import State, read_status
from stackexp.tables import ABSENT, format_table


def format_dry_run(sweep: Sweep) -> str:
    """Return the trials of a sweep with their estimated cost, and what is left of it, in GPU-hours."""
    statuses = [read_status(trial, sweep.config.objective) for trial in sweep.trials]
    base = make_plan(sweep.base_trial.config)
    costs: list[tuple[float | None, float | None]] = []
    rows = []
    for status in statuses:
        config = status.trial.config
        hours = make_plan(config).gpu_hours
        is_settled = status.state in (State.DONE, State.PRUNED)
        share = 0.0 if is_settled else 1 - status.step / config.trainer.max_steps
        costs.append((hours, None if hours is None else hours * share))
        sizes = [f"{config.trainer.max_steps:,}", f"{config.total_tokens:,}"]
        rows.append([status.trial.name, status.state, *sizes, *map(_format_hours, costs[-1])])
    if sweep.config.search:
        count = max(0, sweep.config.search.trials - len(statuses))
        costs.append((None if base.gpu_hours is None else count * base.gpu_hours,) * 2)
        rows.append([f"{count} more", "not chosen", "", "", *map(_format_hours, costs[-1])])
    header = ["trial", "state", "steps", "tokens", "GPU-hours", "left"]
    summary = format_summary(statuses)
    if has_estimates := any(hours is not None for hours, _ in costs):
        summary += f"; {_format_total(costs)}, on {base.device} at {base.mfu:.0%} of its FLOP/s"
    if any(hours is None for hours, _ in costs):
        which = "time of the others" if has_estimates else "time"
        summary += f"; {which} is not estimated on CPUs or below {MIN_PARAMETERS // 10**6}M parameters"
    return f"{format_table(rows, header=header, align='<<>>>>')}\n\n{summary}"


def _format_total(costs: list[tuple[float | None, float | None]]) -> str:
    total, left = (sum(hours or 0.0 for hours in column) for column in zip(*costs, strict=True))
    return f"{_format_hours(total)} GPU-hours in total, {_format_hours(left)} left"


def _format_hours(hours: float | None) -> str:
    if hours is None:
        return ABSENT
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.3g}"
