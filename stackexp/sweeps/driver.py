"""Does what is missing of a sweep: starts trials, tries failed ones again, and stops when told to.

Any number of drivers may work on one sweep, and any of them may be killed. A driver holds a lock on each trial that it
has started, the trial's own process holds the run folder's; who finds one of them held waits for the trial instead of
starting it. All else is read from the run folders.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from stackexp.config.compose import to_yaml
from stackexp.errors import RunError, Stopped
from stackexp.files import write_atomically
from stackexp.sweeps.launchers import Launcher
from stackexp.sweeps.status import State, is_running, read_failure, state_of
from stackexp.sweeps.trials import Trial

POLL_SECONDS = 0.5
LOOK_AGAIN_SECONDS = 5
"""Until a trial that runs elsewhere is looked at again."""
BUSY, SAVED = 74, 75
"""Exit codes of fit: another process holds the folder; stopped with a checkpoint."""
START_MARK = "=== started "
"""Begins a line of log.txt before the output of each attempt."""


class Source(Protocol):
    """Which trials there are."""

    def trials(self) -> list[Trial]:
        """All that are known."""

    def add(self, count: int) -> None:
        """Choose so many further trials, if trials are chosen while others run."""

    def complete(self) -> bool:
        """Whether no trial will be added."""

    def hopeless(self, running: list[Trial]) -> list[Trial]:
        """Those of the running trials to give up; their pruned.json has been written."""


class Fixed:
    """The trials of a grid: all are known before."""

    def __init__(self, trials: list[Trial]) -> None:
        self._trials = trials

    def trials(self) -> list[Trial]:
        return self._trials

    def add(self, count: int) -> None:
        pass

    def complete(self) -> bool:
        return True

    def hopeless(self, running: list[Trial]) -> list[Trial]:
        return []


class Display(Protocol):
    def update(self, trials: list[Trial]) -> None:
        """Show how these stand now."""


class Driver:
    """Runs the trials of `source` that have no result; each may fail `retries` times more than once."""

    def __init__(self, folder: Path, source: Source, launcher: Launcher, retries: int, display: Display) -> None:
        self._folder, self._source, self._launcher = folder, source, launcher
        self._retries, self._display = retries, display
        self._claims: dict[Trial, IO[str]] = {}  # trials started here and not yet ended
        self._failed_before: dict[Trial, int] = {}
        self._look_again: dict[Trial, float] = {}
        self._told_to_stop = 0  # a signal's number
        self._stopping = False

    def run(self) -> None:
        """Until every trial is done, pruned or out of attempts.

        Raises RunError if trials failed, Stopped after SIGTERM or `sweep stop`, KeyboardInterrupt after SIGINT.
        """
        with _presence(self._folder), self._signals():
            seen = stop_order(self._folder)
            while True:
                self._collect()
                if self._told_to_stop or stop_order(self._folder) != seen:
                    self._stop()
                trials = self._source.trials()
                missing = [trial for trial in trials if not self._settled(trial)]
                if not missing and self._source.complete():
                    break
                self._prune()
                self._start(missing)
                self._source.add(self._launcher.free() - sum(trial not in self._claims for trial in missing))
                self._display.update(trials)
                time.sleep(POLL_SECONDS)
            self._display.update(trials)
        failed = [trial for trial in trials if state_of(trial) == State.FAILED]
        if failed:
            raise RunError(
                f"{self._folder}: {len(failed)} of {len(trials)} trials failed, the first: {failed[0].name}: "
                f"{read_failure(failed[0])['cause']}; `sweep status` shows all, the same command tries them again"
            )

    def _settled(self, trial: Trial) -> bool:
        """Whether nothing is left to do here. Attempts that another driver has made meanwhile count, too."""
        failures = read_failure(trial).get("attempts", 0)
        before = self._failed_before.setdefault(trial, failures)
        if trial in self._claims:
            return False
        return trial.folder.finished or trial.pruned.exists() or failures - before > self._retries

    def _start(self, missing: list[Trial]) -> None:
        batch: list[Trial] = []
        room = self._launcher.free()
        for trial in missing:
            if len(batch) >= room:
                break
            if trial not in self._claims and time.monotonic() >= self._look_again.get(trial, 0) and self._claim(trial):
                batch.append(trial)
        for trial in batch:
            write_atomically(trial.folder.config, to_yaml(trial.config))
            if failure := read_failure(trial):
                write_atomically(trial.failure, json.dumps(failure | {"tried_again": True}, indent=2))
            with open(trial.log, "a", encoding="utf-8") as log:
                log.write(f"{START_MARK}{time.strftime('%Y-%m-%d %H:%M:%S')} by {socket.gethostname()}\n")
        if batch:
            self._launcher.start(batch)

    def _claim(self, trial: Trial) -> bool:
        """Hold the trial, unless another driver does, it runs without one, or it has been settled meanwhile."""
        trial.folder.path.mkdir(parents=True, exist_ok=True)
        handle = _held(trial.folder.path / ".claim", fcntl.LOCK_EX)
        if handle is None or self._settled(trial) or is_running(trial):
            if handle:
                handle.close()
            self._look_again[trial] = time.monotonic() + LOOK_AGAIN_SECONDS * (handle is not None)
            return False
        self._claims[trial] = handle
        return True

    def _collect(self) -> None:
        """Judge the trials that have ended, and let go of them."""
        ended_well = (SAVED, -signal.SIGTERM) if self._stopping else (SAVED,)  # told before it listened to signals
        for trial, code in self._launcher.ended():
            if code == BUSY:
                self._look_again[trial] = time.monotonic() + LOOK_AGAIN_SECONDS
            elif not (code in ended_well or trial.folder.finished or trial.pruned.exists()):
                _record_failure(trial, code)
            self._claims.pop(trial).close()

    def _prune(self) -> None:
        for trial in self._source.hopeless([t for t in self._claims if is_running(t)]):
            self._launcher.cancel(trial)

    def _stop(self) -> None:
        print("stopping: running trials save and end", flush=True)
        self._stopping = True
        self._launcher.stop()
        self._collect()
        self._display.update(self._source.trials())
        message = f"{self._folder}: stopped; go on with: python -m stackexp sweep run {self._folder}"
        if self._told_to_stop == signal.SIGINT:
            raise KeyboardInterrupt(message)
        raise Stopped(message)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM are obeyed at the next turn; a second one ends the driver at once, its trials live on."""

        def note(number: int, _: Any) -> None:
            self._told_to_stop = number
            signal.signal(number, signal.SIG_DFL)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _record_failure(trial: Trial, code: int) -> None:
    failure = {
        "exit_code": code,
        "cause": cause(trial, code),
        "attempts": read_failure(trial).get("attempts", 0) + 1,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "tried_again": False,
    }
    write_atomically(trial.failure, json.dumps(failure, indent=2))


def cause(trial: Trial, code: int) -> str:
    """Why the last attempt failed, in one line: the signal, the last `error:` line of its log, or its last line."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    log = trial.log.read_text(encoding="utf-8", errors="replace") if trial.log.exists() else ""
    lines = [line.strip() for line in log.rpartition(START_MARK)[2].splitlines()[1:] if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    last = re.sub(r"\s+", " ", (errors or lines or ["it printed nothing"])[-1])
    return last if errors else f"exit code {code} without a result: {last}"


@contextlib.contextmanager
def _presence(folder: Path) -> Iterator[None]:
    """Within the context, `has_driver` is true."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".drivers", "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield


def has_driver(folder: Path) -> bool:
    """Whether a driver works on the sweep."""
    if not (folder / ".drivers").exists():
        return False
    handle = _held(folder / ".drivers", fcntl.LOCK_EX)
    if handle:
        handle.close()
    return handle is None


def _held(path: Path, how: int) -> IO[str] | None:
    """The lock file, locked until it is closed; None if another process has it."""
    handle = open(path, "a")  # noqa: SIM115
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle


def stop_order(folder: Path) -> str:
    """The last order to stop; drivers obey one that was not there when they began."""
    path = folder / "stop"
    return path.read_text() if path.exists() else ""


def order_stop(folder: Path) -> None:
    """Tell every driver of the sweep to stop."""
    write_atomically(folder / "stop", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {os.getpid()} {secrets.token_hex(4)}\n")
