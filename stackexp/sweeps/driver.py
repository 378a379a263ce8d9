"""Start the missing trials of a sweep, retry failed ones, and stop on request.

Any number of drivers may work on one sweep, and any of them may be killed. A driver holds a lock on each trial that it
has started, and the trial's own process holds the lock of the run folder. A driver that finds one of them taken waits
for the trial instead of starting it. Everything else is read from the run folders.
"""

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from stackexp.config.compose import to_yaml
from stackexp.errors import RunError, StoppedError
from stackexp.files import try_lock, write_atomically, write_json
from stackexp.sweeps.control import hold_presence, read_stop_request
from stackexp.sweeps.launchers.base import Launcher
from stackexp.sweeps.status import START_MARK, State, get_state, is_running, read_failure, record_failure
from stackexp.sweeps.trials import Trial

POLL_SECONDS = 0.5
RECHECK_SECONDS = 5
"""Pause before a driver checks again a trial that runs elsewhere."""
EXIT_BUSY, EXIT_STOPPED = 74, 75
"""Exit codes of fit: another process holds the folder; stopped with a checkpoint."""


class Source(Protocol):
    """The trials of a sweep."""

    def get_trials(self) -> list[Trial]:
        """Return all known trials."""

    def add_trials(self, count: int) -> None:
        """Choose up to `count` more trials, if the source chooses trials while others run."""

    def is_complete(self) -> bool:
        """Return True if no trial will be added."""

    def find_pruned(self, running: list[Trial]) -> list[Trial]:
        """Return the running trials to end early, after writing their pruned.json."""


class FixedTrials:
    """The trials of a grid: all are known from the start."""

    def __init__(self, trials: list[Trial]) -> None:
        self._trials = trials

    def get_trials(self) -> list[Trial]:
        """Return all trials."""
        return self._trials

    def add_trials(self, count: int) -> None:
        """Add none."""

    def is_complete(self) -> bool:
        """Return True."""
        return True

    def find_pruned(self, running: list[Trial]) -> list[Trial]:
        """Return none."""
        return []


class Display(Protocol):
    """Shows the progress of the trials."""

    def update(self, trials: list[Trial]) -> None:
        """Show the current status of these trials."""


class Driver:
    """Runs the trials of `source` that have no result. A trial that fails is tried again up to `retries` times."""

    def __init__(self, folder: Path, source: Source, launcher: Launcher, *, retries: int, display: Display) -> None:
        self._folder, self._source, self._launcher = folder, source, launcher
        self._retries, self._display = retries, display
        self._claims: dict[Trial, IO[str]] = {}  # trials started here and still running
        self._failures_before: dict[Trial, int] = {}
        self._recheck_at: dict[Trial, float] = {}
        self._signal = 0
        self._is_stopping = False

    def run(self) -> None:
        """Run until every trial is done, pruned or out of attempts.

        Raises RunError if trials failed, StoppedError after SIGTERM or `sweep stop`, KeyboardInterrupt after SIGINT.
        """
        with hold_presence(self._folder), self._catch_signals():
            old_request = read_stop_request(self._folder)
            while True:
                self._collect_ended()
                if self._signal or read_stop_request(self._folder) != old_request:
                    self._stop()
                trials = self._source.get_trials()
                missing = [trial for trial in trials if not self._is_settled(trial)]
                if not missing and self._source.is_complete():
                    break
                for trial in self._source.find_pruned([trial for trial in self._claims if is_running(trial)]):
                    self._launcher.cancel(trial)
                self._start(missing)
                unclaimed = sum(trial not in self._claims for trial in missing)
                self._source.add_trials(self._launcher.count_free() - unclaimed)
                self._display.update(trials)
                time.sleep(POLL_SECONDS)
            self._display.update(trials)
        failed = [trial for trial in trials if get_state(trial) == State.FAILED]
        if failed:
            cause = read_failure(failed[0])["cause"]
            raise RunError(
                f"{self._folder}: {len(failed)} of {len(trials)} trials failed, the first {failed[0].name}: {cause}; "
                "`sweep status` shows all, the same command tries them again"
            )

    def _is_settled(self, trial: Trial) -> bool:
        """Return True if nothing is left to do here. Failed attempts of other drivers count, too."""
        failures = read_failure(trial).get("attempts", 0)
        before = self._failures_before.setdefault(trial, failures)
        if trial in self._claims:
            return False
        return trial.folder.is_finished or trial.pruned.exists() or failures - before > self._retries

    def _start(self, missing: list[Trial]) -> None:
        """Start as many of the missing trials as the launcher has room for."""
        batch: list[Trial] = []
        room = self._launcher.count_free()
        for trial in missing:
            if len(batch) >= room:
                break
            is_due = trial not in self._claims and time.monotonic() >= self._recheck_at.get(trial, 0)
            if is_due and self._claim(trial):
                batch.append(trial)
        for trial in batch:
            write_atomically(trial.folder.config, to_yaml(trial.config))
            if failure := read_failure(trial):
                write_json(trial.failure, failure | {"tried_again": True})
            with open(trial.log, "a", encoding="utf-8") as log:
                log.write(f"{START_MARK}{time.strftime('%Y-%m-%d %H:%M:%S')} by {socket.gethostname()}\n")
        if batch:
            self._launcher.start(batch)

    def _claim(self, trial: Trial) -> bool:
        """Lock the trial. Return False if another driver has it, if it runs without one, or if it was settled."""
        trial.folder.mark()
        claim = try_lock(trial.folder.path / ".claim")
        if claim is None:
            self._recheck_at[trial] = time.monotonic()
            return False
        if self._is_settled(trial) or is_running(trial):
            claim.close()
            self._recheck_at[trial] = time.monotonic() + RECHECK_SECONDS
            return False
        self._claims[trial] = claim
        return True

    def _collect_ended(self) -> None:
        """Record the failures among the trials that have ended, and release their locks."""
        # A trial that is stopped before it handles signals is killed by SIGTERM.
        stop_codes = (EXIT_STOPPED, -signal.SIGTERM) if self._is_stopping else (EXIT_STOPPED,)
        for trial, code in self._launcher.collect_ended():
            if code == EXIT_BUSY:
                self._recheck_at[trial] = time.monotonic() + RECHECK_SECONDS
            elif not (code in stop_codes or trial.folder.is_finished or trial.pruned.exists()):
                record_failure(trial, code)
            self._claims.pop(trial).close()

    def _stop(self) -> None:
        """Stop the running trials, then raise StoppedError or KeyboardInterrupt."""
        print("stopping: running trials save a checkpoint and end", flush=True)
        self._is_stopping = True
        self._launcher.stop()
        self._collect_ended()
        self._display.update(self._source.get_trials())
        message = f"{self._folder}: stopped; resume with: python -m stackexp sweep run {self._folder}"
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt(message)
        raise StoppedError(message)

    @contextlib.contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """Note SIGINT and SIGTERM for the next round. A second one ends the driver at once; its trials keep running."""

        def note(number: int, _: Any) -> None:
            self._signal = number
            signal.signal(number, signal.SIG_DFL)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
