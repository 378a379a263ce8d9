"""How the trials of a running sweep stand: one live table on a terminal, else a line for every change of state."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.table import Table

from stackexp.sweeps.driver import Display
from stackexp.sweeps.status import State, Status, read
from stackexp.sweeps.trials import Trial

SETTLED = (State.DONE, State.PRUNED)
ORDER = [State.RUNNING, State.FAILED, State.STOPPED, State.WAITING, State.PRUNED, State.DONE]
COLUMNS = ("trial", "state", "step", "loss", "tokens/s", "left", "objective", "attempts", "cause")


class _Statuses:
    """Statuses of trials; what is settled is read once."""

    def __init__(self, objective: str) -> None:
        self._objective = objective
        self._settled: dict[Trial, Status] = {}

    def read(self, trials: list[Trial]) -> list[Status]:
        statuses = [self._settled.get(trial) or read(trial, self._objective) for trial in trials]
        self._settled |= {status.trial: status for status in statuses if status.state in SETTLED}
        return statuses


class Lines:
    """A line whenever the state of a trial changes."""

    def __init__(self, objective: str) -> None:
        self._statuses = _Statuses(objective)
        self._seen: dict[Trial, tuple[State, int]] = {}

    def update(self, trials: list[Trial]) -> None:
        for status in self._statuses.read(trials):
            now = status.state, status.attempts
            if now != self._seen.get(status.trial, (State.WAITING, 0)):
                cells = dict(zip(COLUMNS, cells_of(status), strict=True))
                told = [f"{key} {cells[key]}" for key in ("step", "loss", "objective") if cells[key]]
                text = ", ".join([*told, *filter(None, [status.cause])])
                print(f"{time.strftime('%H:%M:%S')}  {status.state:8}  {status.trial.name}  {text}", flush=True)
            self._seen[status.trial] = now


class LiveTable:
    """All trials in one table that is drawn anew, those that run first."""

    def __init__(self, objective: str, live: Live) -> None:
        self._statuses, self._live = _Statuses(objective), live

    def update(self, trials: list[Trial]) -> None:
        statuses = self._statuses.read(trials)
        self._live.update(table(sorted(statuses, key=lambda status: ORDER.index(status.state))), refresh=True)


@contextlib.contextmanager
def display(objective: str) -> Iterator[Display]:
    console = Console()
    if not console.is_terminal:
        yield Lines(objective)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        yield LiveTable(objective, live)


def table(statuses: list[Status]) -> Table:
    found = Table(caption=summary(statuses), box=None, header_style="bold", caption_justify="left")
    for column in COLUMNS:
        text = column in ("trial", "state", "cause")
        found.add_column(column, justify="left" if text else "right", no_wrap=column != "cause")
    for status in statuses:
        found.add_row(*cells_of(status))
    return found


def summary(statuses: list[Status]) -> str:
    """`25 trials: 2 running, 23 done`."""
    counts = Counter(status.state for status in statuses)
    parts = [f"{counts[state]} {state}" for state in State if counts[state]]
    return f"{len(statuses)} trials: {', '.join(parts)}"


def cells_of(status: Status) -> list[str]:
    """A row of COLUMNS."""
    running = status.state == State.RUNNING
    return [
        status.trial.name,
        status.state,
        f"{status.step}/{status.trial.config.trainer.max_steps}",
        _text(status.loss, ".3f"),
        _text(status.tokens_per_second if running else None, ",.0f"),
        duration(status.seconds_left),
        _text(status.objective, ".4f"),
        str(status.attempts or ""),
        status.cause,
    ]


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def duration(seconds: float | None) -> str:
    """`2h05m`, `4m10s`."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02}m" if minutes >= 60 else f"{minutes}m{rest:02}s"
