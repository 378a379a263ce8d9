"""A watchdog that detects a missing or hanging process of a run, names it, and ends the other processes."""

# mypy: disable-error-code="assignment"
# One method serves several hooks of Lightning, which all have different arguments.

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from stackexp.errors import first_line
from stackexp.files import read_start_time
from stackexp.terminal import write_to_stderr
from stackexp.training.signals import StopRequest

INTERVAL = 1.0  # seconds between two heartbeats
SILENCE = 30.0  # seconds without a heartbeat until a frozen or remote process counts as gone
GRACE = 3.0  # seconds for a process to report the cause itself
FAULT = "fault"
FIRST_CAUSE = "cause of rank 0"
FIRST_RANK_GONE = "rank 0 is gone: it does not answer"


def restart_timeouts(trainer: pl.Trainer, stop: StopRequest) -> None:
    """Restart the timeouts of a run without progress."""
    stop.note_progress()
    for callback in trainer.callbacks:
        if isinstance(callback, Watchdog):
            callback.note_progress()


class Watchdog(pl.Callback):
    """A thread in every process that shares heartbeats and progress through a store of its own.

    If a process is gone, or no process makes progress for `timeout` seconds, each process prints one line that names
    the process and exits with code 1, because a collective that waits for that process would never return. `startup`
    more seconds are allowed until the first batch ends, and any time within `pause`. `clean_up` is called before the
    exit. The line ends with `advice`.
    """

    advice = "rerun the command"

    def __init__(self, rank: int, size: int, timeout: float, startup: float, clean_up: Callable[[], None]):
        self._rank, self._size, self._timeout, self._clean_up = rank, size, timeout, clean_up
        self._store = _connect_store(rank, size)
        self._startup, self._is_paused = startup, False
        self._events, self._last_progress = 0, time.monotonic() + startup
        self._is_stopping = threading.Event()
        self._fault: str | None = None
        self._store_call_began: float | None = None
        self._heartbeats: dict[int, tuple[int, float]] = {}  # rank -> last heartbeat, and when it first arrived here
        self._main_thread = threading.main_thread().ident
        self._thread = threading.Thread(target=self._run, daemon=True, name="watchdog")

    def start(self) -> None:
        self._send_heartbeat()
        self._thread.start()
        threading.Thread(target=self._guard_store, daemon=True, name="watchdog-guard").start()

    def stop(self) -> None:
        """Report a regular exit, so that the other processes do not count this one as gone."""
        if not self._is_stopping.is_set():
            self._is_stopping.set()
            self._thread.join(GRACE)
            with self._store_call():  # rank 0, which hosts the store, may have exited before
                self._store.set(str(self._rank), json.dumps({"done": True}))

    def report(self, cause: str) -> bool:
        """Report to the other processes why this one is about to exit. Return True if rank 0 reports the same cause."""
        is_shared = False
        if not self._is_stopping.is_set():
            with self._store_call():
                self._store.compare_set(FAULT, "", f"rank {self._rank}: {cause}")
                if self._rank == 0:
                    self._store.set(FIRST_CAUSE, cause)
                    time.sleep(2 * INTERVAL)  # rank 0 hosts the store: the others must read it before rank 0 exits
                else:
                    self._store.wait([FIRST_CAUSE], timedelta(seconds=2 * INTERVAL))  # an error if there is none
                    is_shared = self._store.get(FIRST_CAUSE).decode() == cause
        return is_shared

    def find_cause(self, error: Exception) -> str:
        """Return the cause of a failed collective: wait until a process has found the fault."""
        deadline = time.monotonic() + SILENCE + 10
        while time.monotonic() < deadline and self._fault is None:
            time.sleep(INTERVAL / 2)
        return self._fault or f"lost contact with another process ({first_line(error)})"

    @contextlib.contextmanager
    def _store_call(self) -> Iterator[None]:
        """Record when a store call starts, for `_guard_store`; ignore errors of a store that is gone."""
        self._store_call_began = time.monotonic()
        with contextlib.suppress(RuntimeError):
            yield
        self._store_call_began = None

    def _guard_store(self) -> None:
        """Exit if the store does not answer: its calls wait forever if rank 0 is frozen or its machine is down."""
        while True:
            time.sleep(INTERVAL)
            began = self._store_call_began
            if began is not None and time.monotonic() - began > SILENCE:
                self._exit(FIRST_RANK_GONE)

    def _exit(self, fault: str) -> None:
        prefix = "\nerror: " if self._rank == 0 else f"\nerror: rank {self._rank}: "  # on a line below the progress bar
        write_to_stderr(f"{prefix}{fault}; {self.advice}")
        self._clean_up()
        os._exit(1)

    def note_progress(self) -> None:
        """Restart the timeout. Counts no event, because ranks score different numbers of benchmark batches."""
        self._last_progress = max(self._last_progress, time.monotonic())  # the startup ends later than now

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Allow any time within the context, for work such as tokenizing; then the startup begins again."""
        self._is_paused = True
        try:
            yield
        finally:
            self._last_progress = time.monotonic() + self._startup
            self._is_paused = False

    # Progress, as reported by Lightning's loops

    def on_train_batch_start(self, *_: Any) -> None:
        """Count any start as progress."""
        self._events += 1
        self.note_progress()

    def on_train_batch_end(self, *_: Any) -> None:
        """Count any end as progress. The first one ends the startup, in which a process imports and compiles."""
        self._events, self._last_progress = self._events + 1, time.monotonic()

    on_train_start = on_validation_start = on_test_start = on_train_batch_start
    on_validation_batch_end = on_validation_end = on_test_batch_end = on_save_checkpoint = on_train_batch_end

    # The watchdog thread

    def _run(self) -> None:
        while not self._is_stopping.wait(INTERVAL):
            fault: str | None = FIRST_RANK_GONE  # if the store does not answer
            with self._store_call():
                fault = self._check()
            self._fault = fault
            if self._fault and not self._is_stopping.wait(GRACE):  # otherwise the main thread reports it and exits
                self._exit(self._fault)

    def _check(self) -> str | None:
        """Return the fault that a process has found first, or None."""
        self._send_heartbeat()
        if fault := self._find_fault():
            self._store.compare_set(FAULT, "", fault)
        return self._store.get(FAULT).decode() if self._store.check([FAULT]) else None

    def _send_heartbeat(self) -> None:
        # Private: the main thread's stack has no public accessor.
        frame = sys._current_frames().get(self._main_thread or 0)
        where = f"{_shorten(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else "?"
        idle = 0.0 if self._is_paused else time.monotonic() - self._last_progress
        status = {"beat": time.monotonic(), "events": self._events, "idle": idle, "where": where}
        self._store.set(str(self._rank), json.dumps(status | {"host": socket.gethostname(), "pid": os.getpid()}))

    def _find_fault(self) -> str | None:
        """Check all processes on rank 0, and rank 0 on the others."""
        known = [r for r in (range(self._size) if self._rank == 0 else [0]) if self._store.check([str(r)])]
        statuses = {rank: json.loads(self._store.get(str(rank))) for rank in known}
        statuses = {rank: status for rank, status in statuses.items() if "done" not in status}
        for rank, status in statuses.items():
            if rank != self._rank and self._is_gone(rank, status):
                return f"rank {rank} (process {status['pid']} on {status['host']}) is gone"
        everyone = len(statuses) == self._size
        if everyone and min(status["idle"] for status in statuses.values()) > self._timeout:
            return _describe_hang(statuses, self._timeout)
        return None

    def _is_gone(self, rank: int, status: dict[str, Any]) -> bool:
        if status["host"] == socket.gethostname() and not read_start_time(status["pid"]):
            return True
        now, (beat, since) = time.monotonic(), self._heartbeats.get(rank, (None, 0.0))
        if beat != status["beat"]:
            self._heartbeats[rank] = (status["beat"], now)
            return False
        return now - since > SILENCE


def _connect_store(rank: int, size: int) -> dist.Store:
    """Connect to a store on rank 0, separate from the store of the collectives."""
    address: list[Any] = [None, None]
    if rank == 0:
        host = os.environ["MASTER_ADDR"]
        store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
        address = [host, store.port]
    dist.broadcast_object_list(address)
    return store if rank == 0 else dist.TCPStore(address[0], address[1], size, is_master=False)


def _describe_hang(statuses: dict[int, dict[str, Any]], timeout: float) -> str:
    """Name the ranks that have passed the fewest hooks, or else those at a different line of code than most."""
    events = Counter(status["events"] for status in statuses.values())
    lines = Counter(status["where"] for status in statuses.values())
    fewest, common = min(events), lines.most_common(1)[0][0]
    stuck = [r for r, status in statuses.items() if status["events"] == fewest] if len(events) > 1 else []
    if lines[common] > len(statuses) / 2:
        stuck = stuck or [r for r, status in statuses.items() if status["where"] != common]
    stuck = stuck or [r for r, status in statuses.items() if not status["where"].startswith("torch/")] or list(statuses)
    named = ", ".join(f"rank {rank} at {statuses[rank]['where']}" for rank in stuck[:8])
    rest = next((status["where"] for rank, status in statuses.items() if rank not in stuck), None)
    waiting = f"; the others wait at {rest}" if rest else ""
    return f"no progress for {timeout:g} s: {named}{waiting}; see trainer.collective_timeout_seconds"


def _shorten(file: str) -> str:
    """Return torch/autograd/graph.py for .../site-packages/torch/autograd/graph.py."""
    return file.rsplit("site-packages/", 1)[-1] if "site-packages/" in file else "/".join(file.split("/")[-2:])
