"""Show the progress of a sweep: a live table on a terminal, otherwise one line for every change of state."""

import dataclasses
import time
from collections import Counter
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stackexp.sweeps.driver import has_driver
from stackexp.sweeps.launchers import LAUNCHERS, load_launcher
from stackexp.sweeps.sweep import Sweep
from stackexp.sweeps.trials import State, Status, Trial, read_status
from stackexp.tables import format_table
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
            self._live.update(_build_table(statuses, self._live.console.width), refresh=True)
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


def _build_table(statuses: list[Status], width: int) -> Table:
    """Return the table of a terminal, the running trials first. Names that do not fit are cut; causes are below."""
    statuses = sorted(statuses, key=lambda status: ORDER.index(status.state))
    header, align, rows = _format_statuses([dataclasses.replace(status, attempts=0, cause="") for status in statuses])
    causes = [f"{s.trial.name}: {s.cause} (attempt {s.attempts})" for s in statuses if s.cause]
    table = Table(box=None, header_style="bold", caption_justify="left")
    table.caption = Text("\n".join([format_summary(statuses), *causes]), style="none")
    rest = sum(2 + max(map(len, column)) for column in list(zip(header, *rows, strict=True))[1:])
    for title, side in zip(header, align, strict=True):
        max_width = max(MIN_WIDTH, width - rest - 2) if title == "trial" else None
        table.add_column(title, justify="left" if side == "<" else "right", no_wrap=True, max_width=max_width)
    for row in rows:
        table.add_row(*row)
    return table


def read_statuses(sweep: Sweep) -> list[Status]:
    """Return the status of each trial. For a queued trial, `cause` names the job."""
    jobs = {
        name: job for launcher in LAUNCHERS for name, job in load_launcher(launcher).find_jobs(sweep.folder).items()
    }
    statuses = [read_status(trial, sweep.config.objective) for trial in sweep.trials]
    return [dataclasses.replace(s, cause=jobs.get(s.trial.name, s.cause)) for s in statuses]


def format_sweep_status(sweep: Sweep, statuses: list[Status]) -> str:
    """Return a table with a row for each trial: state, progress, and queued job or cause of failure."""
    header, align, rows = _format_statuses(statuses)
    drivers = "a driver is running" if has_driver(sweep.folder) else "no driver is running"
    summary = f"{sweep.folder}: {format_summary(statuses)}; {drivers}"
    return f"{format_table(rows, header=header, align=align)}\n\n{summary}"


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
