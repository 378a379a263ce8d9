"""Show the state of a sweep: a table of its trials, live on a terminal, and its remaining cost."""

import dataclasses
import time
from collections import Counter
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from stackexp.errors import RunError
from stackexp.files import is_locked
from stackexp.sweeps import slurm
from stackexp.sweeps.sweep import Sweep
from stackexp.sweeps.trials import WORKERS, State, Status, Trial, read_claim, read_status
from stackexp.tables import ABSENT, format_table
from stackexp.terminal import format_duration

ORDER = [State.RUNNING, State.FAILED, State.STOPPED, State.WAITING, State.PRUNED, State.DONE]
COLUMNS = ("trial", "state", "step", "loss", "tokens/s", "left", "objective", "attempts", "cause")
ALIGN = "<<>>>>>><"
MIN_WIDTH = 8  # of a shortened name


class Display:
    """The progress of the trials on standard output, within a `with` block."""

    def __init__(self, objective: str, console: Console | None = None) -> None:
        self._objective = objective
        self._settled: dict[Trial, Status] = {}
        self._printed: dict[Trial, tuple[State, int]] = {}
        console = console or Console()
        is_live = console.is_terminal
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") if is_live else None

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: type | BaseException | TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def update(self, trials: list[Trial]) -> None:
        """Redraw the table, or print the trials whose state or number of attempts has changed."""
        statuses = [self._settled.get(trial) or read_status(trial, self._objective) for trial in trials]
        self._settled |= {s.trial: s for s in statuses if s.state in (State.DONE, State.PRUNED)}  # read once
        if self._live:
            text = _format_live_table(statuses, self._live.console.width)
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            self._print_changes(statuses)

    def _print_changes(self, statuses: list[Status]) -> None:
        for status in statuses:
            current = status.state, status.attempts
            if current != self._printed.get(status.trial, (State.WAITING, 0)):
                cells = dict(zip(COLUMNS, format_status(status), strict=True))
                details = [f"{key} {cells[key]}" for key in ("step", "loss", "objective") if cells[key]]
                text = ", ".join([*details, *filter(None, [status.cause])])
                print(f"{time.strftime('%H:%M:%S')}  {status.state:8}  {status.trial.name}  {text}", flush=True)
            self._printed[status.trial] = current


def _format_live_table(statuses: list[Status], width: int) -> str:
    """Return the table of a terminal, the running trials first. Names that do not fit are cut; causes are below."""
    statuses = sorted(statuses, key=lambda status: ORDER.index(status.state))
    header, align, rows = _format_statuses([dataclasses.replace(status, attempts=0, cause="") for status in statuses])
    rest = sum(2 + max(map(len, column)) for column in list(zip(header, *rows, strict=True))[1:])
    names = max(MIN_WIDTH, width - rest)
    rows = [[name if len(name) <= names else f"{name[: names - 1]}…", *cells] for name, *cells in rows]
    causes = [f"{s.trial.name}: {s.cause} (attempt {s.attempts})" for s in statuses if s.cause]
    return "\n".join([format_table(rows, header=header, align=align), "", format_summary(statuses), *causes])


def read_statuses(sweep: Sweep) -> list[Status]:
    """Return the status of each trial. For a running trial, `cause` says where it runs."""
    statuses = [read_status(trial, sweep.config.objective) for trial in sweep.trials]
    claims = {status.trial: read_claim(status.trial) for status in statuses if status.state == State.RUNNING}
    return [dataclasses.replace(s, cause=str(claims.get(s.trial) or s.cause)) for s in statuses]


def format_sweep_status(sweep: Sweep, statuses: list[Status]) -> str:
    """Return a table with a row for each trial (state, progress, where it runs or why it failed), and the workers."""
    header, align, rows = _format_statuses(statuses)
    summary = f"{sweep.folder}: {format_summary(statuses)}; {_describe_workers(sweep)}"
    return f"{format_table(rows, header=header, align=align)}\n\n{summary}"


def _describe_workers(sweep: Sweep) -> str:
    try:
        jobs = slurm.find_jobs(sweep)
    except RunError as error:
        return str(error)
    if not jobs:
        return "a worker is running" if is_locked(sweep.folder / WORKERS, count_shared=True) else "no worker is running"
    counts = Counter(job.state.lower() + f" {job.reason}" * (job.state == "PENDING") for job in jobs)
    return "Slurm jobs: " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))


def _format_statuses(statuses: list[Status]) -> tuple[list[str], str, list[list[str]]]:
    """Return header, alignment and rows, without empty columns, and without attempts if no trial was retried."""
    columns = dict(zip(COLUMNS, zip(*map(format_status, statuses), strict=True), strict=False))  # {} without rows
    omitted = {column for column, cells in columns.items() if not any(cells)}
    if all(status.attempts < 2 for status in statuses):
        omitted.add("attempts")
    shown = [column for column in columns if column not in omitted]
    align = "".join(side for column, side in zip(COLUMNS, ALIGN, strict=True) if column in shown)
    return shown, align, [list(row) for row in zip(*(columns[column] for column in shown), strict=True)]


def format_summary(statuses: list[Status]) -> str:
    """Return the number of trials in each state, such as `25 trials: 2 running, 23 done`."""
    counts = Counter(status.state for status in statuses)
    parts = [f"{counts[state]} {state}" for state in State if counts[state]]
    return f"{len(statuses)} trials: {', '.join(parts)}" if parts else "no trials yet"


def format_status(status: Status) -> list[str]:
    """Return the cells of COLUMNS."""
    speed = status.tokens_per_second if status.state == State.RUNNING else None
    return [
        status.trial.name,
        status.state,
        f"{status.step}/{status.trial.config.trainer.max_steps}",
        _format_number(status.loss, ".3f"),
        _format_number(speed, ",.0f"),
        "" if status.seconds_left is None else format_duration(status.seconds_left),
        _format_number(status.objective, ".4f"),
        str(status.attempts or ""),
        status.cause,
    ]


def _format_number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


# Cost


def format_dry_run(sweep: Sweep) -> str:
    """Return the trials of a sweep with their estimated cost, and what is left of it, in GPU-hours."""
    from stackexp.planning.cost import MIN_PARAMETERS, make_plan  # imports torch, which workers do not need

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
        total, left = (_format_hours(sum(hours or 0.0 for hours in column)) for column in zip(*costs, strict=True))
        summary += f"; {total} GPU-hours in total, {left} left, on {base.device} at {base.mfu:.0%} of its FLOP/s"
    if any(hours is None for hours, _ in costs):
        which = "time of the others" if has_estimates else "time"
        summary += f"; {which} is not estimated on CPUs or below {MIN_PARAMETERS // 10**6}M parameters"
    return f"{format_table(rows, header=header, align='<<>>>>')}\n\n{summary}"


def _format_hours(hours: float | None) -> str:
    if hours is None:
        return ABSENT
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.3g}"
