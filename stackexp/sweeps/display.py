"""Show the progress of a sweep: a live table on a terminal, otherwise one line for every change of state."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.table import Table

from stackexp.sweeps.driver import Display
from stackexp.sweeps.status import State, Status, read_status
from stackexp.sweeps.trials import Trial

SETTLED = (State.DONE, State.PRUNED)
ORDER = [State.RUNNING, State.FAILED, State.STOPPED, State.WAITING, State.PRUNED, State.DONE]
COLUMNS = ("trial", "state", "step", "loss", "tokens/s", "left", "objective", "attempts", "cause")
ALIGN = "<<>>>>>><"


class _StatusReader:
    """Reads the statuses of trials; a settled one is read once."""

    def __init__(self, objective: str) -> None:
        self._objective = objective
        self._settled: dict[Trial, Status] = {}

    def read(self, trials: list[Trial]) -> list[Status]:
        statuses = [self._settled.get(trial) or read_status(trial, self._objective) for trial in trials]
        self._settled |= {status.trial: status for status in statuses if status.state in SETTLED}
        return statuses


class StateLog:
    """Prints a line whenever the state of a trial changes."""

    def __init__(self, objective: str) -> None:
        self._reader = _StatusReader(objective)
        self._printed: dict[Trial, tuple[State, int]] = {}

    def update(self, trials: list[Trial]) -> None:
        """Print the trials whose state or number of attempts has changed."""
        for status in self._reader.read(trials):
            current = status.state, status.attempts
            if current != self._printed.get(status.trial, (State.WAITING, 0)):
                cells = dict(zip(COLUMNS, format_status(status), strict=True))
                details = [f"{key} {cells[key]}" for key in ("step", "loss", "objective") if cells[key]]
                text = ", ".join([*details, *filter(None, [status.cause])])
                print(f"{time.strftime('%H:%M:%S')}  {status.state:8}  {status.trial.name}  {text}", flush=True)
            self._printed[status.trial] = current


class LiveTable:
    """Redraws one table of all trials, the running ones first."""

    def __init__(self, objective: str, live: Live) -> None:
        self._reader, self._live = _StatusReader(objective), live

    def update(self, trials: list[Trial]) -> None:
        """Redraw the table."""
        statuses = sorted(self._reader.read(trials), key=lambda status: ORDER.index(status.state))
        table = Table(caption=format_summary(statuses), box=None, header_style="bold", caption_justify="left")
        for column, side in zip(COLUMNS, ALIGN, strict=True):
            table.add_column(column, justify="left" if side == "<" else "right", no_wrap=column != "cause")
        for status in statuses:
            table.add_row(*format_status(status))
        self._live.update(table, refresh=True)


@contextlib.contextmanager
def open_display(objective: str) -> Iterator[Display]:
    """Yield the display that suits the standard output."""
    console = Console()
    if not console.is_terminal:
        yield StateLog(objective)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        yield LiveTable(objective, live)


def format_summary(statuses: list[Status]) -> str:
    """Return the number of trials in each state, such as `25 trials: 2 running, 23 done`."""
    counts = Counter(status.state for status in statuses)
    parts = [f"{counts[state]} {state}" for state in State if counts[state]]
    return f"{len(statuses)} trials: {', '.join(parts)}"


def format_status(status: Status) -> list[str]:
    """Return the cells of COLUMNS."""
    speed = status.tokens_per_second if status.state == State.RUNNING else None
    return [
        status.trial.name,
        status.state,
        f"{status.step}/{status.trial.config.trainer.max_steps}",
        _format_number(status.loss, ".3f"),
        _format_number(speed, ",.0f"),
        format_duration(status.seconds_left),
        _format_number(status.objective, ".4f"),
        str(status.attempts or ""),
        status.cause,
    ]


def _format_number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def format_duration(seconds: float | None) -> str:
    """Return a duration as `2h05m` or `4m10s`."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02}m" if minutes >= 60 else f"{minutes}m{rest:02}s"
