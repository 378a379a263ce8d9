"""Show the state of a sweep: lines of changes, a table of its trials, and its remaining cost."""

import dataclasses
import time
from collections import Counter

from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import RunError
from stackexp.planning.devices import DEFAULT_DEVICE, DEFAULT_MFU, NOT_ESTIMATED, can_estimate_speed
from stackexp.sweeps import slurm
from stackexp.sweeps.sweep import Sweep
from stackexp.sweeps.trials import Trial, TrialState, TrialStatus, has_worker, read_claim, read_status
from stackexp.tables import ABSENT, format_table
from stackexp.terminal import format_duration

TEXT_COLUMNS = ("trial", "state", "cause")


class ChangePrinter:
    """Prints a line for every change of a trial's state."""

    def __init__(self, objective: str) -> None:
        self._objective = objective
        self._printed: dict[Trial, tuple[TrialState, int]] = {}  # state and number of attempts

    def update(self, trials: list[Trial]) -> None:
        """Print the trials whose state or number of attempts has changed."""
        for trial in trials:
            before = self._printed.get(trial, (TrialState.WAITING, 0))
            if before[0] in (TrialState.DONE, TrialState.PRUNED):
                continue
            status = read_status(trial, self._objective)
            current = self._printed[trial] = status.state, status.attempts
            if current != before:
                cells = format_status(status)
                details = [f"{key} {cells[key]}" for key in ("step", "loss", "objective") if cells[key]]
                text = ", ".join([*details, *filter(None, [status.cause])])
                print(f"{time.strftime('%H:%M:%S')}  {status.state:8}  {trial.name}  {text}", flush=True)


def read_statuses(sweep: Sweep) -> list[TrialStatus]:
    """Return the status of each trial. For a running trial, `cause` is where it runs."""
    statuses = [read_status(trial, sweep.config.objective) for trial in sweep.trials]
    claims = {status.trial: read_claim(status.trial) for status in statuses if status.state == TrialState.RUNNING}
    return [dataclasses.replace(s, cause=str(claims.get(s.trial) or s.cause)) for s in statuses]


def format_sweep_status(sweep: Sweep, statuses: list[TrialStatus]) -> str:
    """Return a table with a row for each trial (state, progress, where it runs or why it failed), and the workers.

    Empty columns are omitted, and attempts if no trial was retried.
    """
    rows = list(map(format_status, statuses))
    omitted = [] if any(status.attempts > 1 for status in statuses) else ["attempts"]
    shown = [key for key in (rows[0] if rows else ()) if any(row[key] for row in rows) and key not in omitted]
    align = "".join("<" if key in TEXT_COLUMNS else ">" for key in shown)
    table = format_table([[row[key] for key in shown] for row in rows], header=shown, align=align)
    return f"{table}\n\n{sweep.folder}: {format_summary(statuses)}; {_describe_workers(sweep)}"


def _describe_workers(sweep: Sweep) -> str:
    try:
        jobs = slurm.find_jobs(sweep)
    except RunError as error:
        return str(error)
    if not jobs:
        return "a worker is running" if has_worker(sweep.folder) else "no worker is running"
    counts = Counter(job.state.lower() + f" {job.reason}" * (job.state == "PENDING") for job in jobs)
    return "Slurm jobs: " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))


def format_summary(statuses: list[TrialStatus]) -> str:
    """Return the number of trials in each state, such as `25 trials: 2 running, 23 done`."""
    counts = Counter(status.state for status in statuses)
    parts = [f"{counts[state]} {state}" for state in TrialState if counts[state]]
    return f"{len(statuses)} trials: {', '.join(parts)}" if parts else "no trials yet"


def format_status(status: TrialStatus) -> dict[str, str]:
    """Return the cells of a row by column."""
    speed = status.tokens_per_second if status.state == TrialState.RUNNING else None
    return {
        "trial": status.trial.name,
        "state": status.state,
        "step": f"{status.step}/{status.trial.config.trainer.max_steps}",
        "loss": _format_number(status.loss, ".3f"),
        "tokens/s": _format_number(speed, ",.0f"),
        "left": "" if status.seconds_left is None else format_duration(status.seconds_left),
        "objective": _format_number(status.objective, ".4f"),
        "attempts": str(status.attempts or ""),
        "cause": status.cause,
    }


def _format_number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


# Cost


def format_dry_run(sweep: Sweep) -> str:
    """Return the trials of a sweep with their estimated cost, and what is left of it, in GPU-hours."""
    statuses = read_statuses(sweep)
    costs, rows = [], []
    for status in statuses:
        config = status.trial.config
        share = 0.0 if status.trial.is_settled else 1 - status.step / config.trainer.max_steps
        costs.append(_estimate_cost(config, 1, share))
        sizes = [f"{config.trainer.max_steps:,}", f"{config.total_tokens:,}"]
        rows.append([status.trial.name, status.state, *sizes, *_format_cost(costs[-1])])
    if sweep.config.search:
        count = max(0, sweep.config.search.trials - len(statuses))
        costs.append(_estimate_cost(sweep.base_trial.config, count, count))
        rows.append([f"{count} more", "not chosen", "", "", *_format_cost(costs[-1])])
    header = ["trial", "state", "steps", "tokens", "GPU-hours", "left"]
    summary = format_summary(statuses)
    known = [cost for cost in costs if cost]
    if known:
        total, left = _format_cost((sum(hours for hours, _ in known), sum(left for _, left in known)))
        summary += f"; {total} GPU-hours in total, {left} left, on {DEFAULT_DEVICE} at {DEFAULT_MFU:.0%} of its FLOP/s"
    if len(known) < len(costs):
        summary += f"; {'time of the others' if known else 'time'} is {NOT_ESTIMATED}"
    return f"{format_table(rows, header=header, align='<<>>>>')}\n\n{summary}"


def _estimate_cost(config: ExperimentConfig, count: float, left: float) -> tuple[float, float] | None:
    """Return the GPU-hours of `count` runs of a config, and of the `left` runs to go; None if not estimated."""
    if not can_estimate_speed(config):
        return None
    from stackexp.planning.cost import make_plan  # imports torch, which takes seconds

    hours = make_plan(config).gpu_hours
    return None if hours is None else (count * hours, left * hours)


def _format_cost(cost: tuple[float, float] | None) -> list[str]:
    """Return the GPU-hours of a whole trial, and what is left of them."""
    return [f"{hours:,.1f}" if hours >= 10 else f"{hours:.3g}" for hours in cost] if cost else [ABSENT, ABSENT]
