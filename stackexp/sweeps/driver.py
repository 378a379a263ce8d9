"""Start the missing trials of a sweep, retry failed ones, and stop on request.

Any number of drivers may work on one sweep, and any of them may be killed. A driver holds a lock on each trial that it
has started, and the trial's process holds the lock of the run folder. If one of these locks is taken, other drivers
wait for the trial instead of starting it. All other state is read from the run folders.
"""

import contextlib
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from stackexp.config.compose import to_yaml
from stackexp.errors import FolderBusyError, RunError, StoppedError
from stackexp.files import hold_lock, is_locked, try_lock, write_atomically, write_json
from stackexp.sweeps.launchers import Launcher
from stackexp.sweeps.trials import START_MARK, Trial, read_failure, record_failure

DRIVERS = ".drivers"
"""Each driver holds a shared lock on this file in the sweep's folder."""
POLL_SECONDS = 0.5
RECHECK_SECONDS = 5
"""Pause before a driver checks again a trial that runs elsewhere."""


class TrialSource:
    """The trials of a sweep. A grid has all trials from the start; a search adds more while others run."""

    def __init__(self, trials: list[Trial]) -> None:
        self._trials = trials

    def get_trials(self) -> list[Trial]:
        """Return all known trials."""
        return self._trials

    def add_trials(self, count: int) -> None:
        """Choose up to `count` more trials."""

    def is_complete(self) -> bool:
        """Return True if no trial will be added."""
        return True

    def find_pruned(self, running: list[Trial]) -> list[Trial]:
        """Return the running trials to end early, after writing their pruned.json."""
        return []


class Driver:
    """Runs the trials of `source` that have no result. A failed trial is retried up to `retries` times."""

    def __init__(
        self,
        folder: Path,
        source: TrialSource,
        launcher: Launcher,
        *,
        retries: int,
        show_progress: Callable[[list[Trial]], None],
    ) -> None:
        self._folder, self._source, self._launcher = folder, source, launcher
        self._retries, self._show_progress = retries, show_progress
        self._claims: dict[Trial, IO[str]] = {}  # trials started here and still running
        self._failures_before: dict[Trial, int] = {}
        self._recheck_at: dict[Trial, float] = {}
        self._signal = 0
        self._is_stopping = False

    def run(self) -> None:
        """Run until every trial is done, is pruned or has no retries left.

        Raises RunError if trials failed, StoppedError after SIGTERM or `sweep stop`, KeyboardInterrupt after SIGINT.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(self._folder / DRIVERS, "sweep stop", shared=True), self._catch_signals():
            old_request = read_stop_request(self._folder)
            while True:
                self._collect_ended()
                if self._signal or read_stop_request(self._folder) != old_request:
                    self._stop()
                trials = self._source.get_trials()
                missing = [trial for trial in trials if not self._is_settled(trial)]
                if not missing and self._source.is_complete():
                    break
                for trial in self._source.find_pruned([trial for trial in self._claims if trial.folder.is_running]):
                    self._launcher.cancel(trial)
                self._start(missing)
                unclaimed = sum(trial not in self._claims for trial in missing)
                self._source.add_trials(self._launcher.count_free() - unclaimed)
                self._show_progress(trials)
                time.sleep(POLL_SECONDS)
            self._show_progress(trials)
        # Not by get_state: another driver may be trying one of them again.
        failed = [trial for trial in trials if not (trial.folder.is_finished or trial.pruned.exists())]
        if failed:
            cause = read_failure(failed[0])["cause"]
            raise RunError(
                f"{self._folder}: {len(failed)} of {len(trials)} trials failed, the first {failed[0].name}: {cause}; "
                "`sweep status` shows all causes; the same command retries them"
            )

    def _is_settled(self, trial: Trial) -> bool:
        """Return True if this driver has nothing left to do for the trial. Failed attempts of other drivers count."""
        failures = read_failure(trial).get("attempts", 0)
        before = self._failures_before.setdefault(trial, failures)
        if trial in self._claims:
            return False
        return trial.folder.is_finished or trial.pruned.exists() or failures - before > self._retries

    def _start(self, missing: list[Trial]) -> None:
        """Start as many of the missing trials as the launcher can run now."""
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
        if self._is_settled(trial) or trial.folder.is_running:
            claim.close()
            self._recheck_at[trial] = time.monotonic() + RECHECK_SECONDS
            return False
        self._claims[trial] = claim
        return True

    def _collect_ended(self) -> None:
        """Record the failures among the trials that have ended, and release their locks."""
        # A trial that is stopped before it handles signals is killed by SIGTERM.
        stop_codes = (StoppedError.exit_code, -signal.SIGTERM) if self._is_stopping else (StoppedError.exit_code,)
        for trial, code in self._launcher.collect_ended():
            if code == FolderBusyError.exit_code:
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
        self._show_progress(self._source.get_trials())
        message = f"{self._folder}: stopped; resume with: python -m stackexp sweep run {self._folder}"
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt(message)
        raise StoppedError(message)

    @contextlib.contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """Record SIGINT and SIGTERM for the next round. A second one ends the driver, but not its trials."""

        def note(number: int, _: Any) -> None:
            self._signal = number
            signal.signal(number, signal.SIG_DFL)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


# Requests to running drivers


def has_driver(folder: Path) -> bool:
    """Return True if a driver works on the sweep."""
    return is_locked(folder / DRIVERS, count_shared=True)


def read_stop_request(folder: Path) -> str:
    """Return the last stop request, or an empty string. A driver stops if it is newer than the driver's start."""
    path = folder / "stop"
    return path.read_text() if path.exists() else ""


def request_stop(folder: Path) -> None:
    """Request that every driver of the sweep stops."""
    write_atomically(folder / "stop", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {secrets.token_hex(8)}\n")
