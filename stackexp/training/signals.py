"""Signals and time limits that end a run early: SIGTERM, SIGUSR1, max_time and Ctrl-C."""

# mypy: disable-error-code="assignment"
# One method serves several hooks of Lightning, which all have different arguments.

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import lightning.pytorch as pl

from stackexp.errors import InterruptedRunError, StoppedError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # Slurm sends SIGUSR1 ahead of the time limit
STOPPED_ELSEWHERE = "another process received a stop request"


class StopRequest:
    """A request to save a checkpoint and stop: SIGTERM, SIGUSR1, Ctrl-C, or `max_time` (DD:HH:MM:SS) from now.

    If no batch ends for `grace_seconds` after a signal, as when a loader worker is frozen, the process exits with
    code 1 and without a checkpoint.
    """

    def __init__(self, max_time: str | None, grace_seconds: float):
        self._signal: signal.Signals | None = None
        self._grace_seconds, self._last_progress = grace_seconds, time.monotonic()
        self._is_obeyed = threading.Event()
        self._max_time = max_time
        self._deadline = time.monotonic() + parse_seconds(max_time) if max_time else None
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        _start_resource_tracker()

    def _handle(self, number: int, _: Any) -> None:
        if self._signal is None:
            self._last_progress = time.monotonic()
            threading.Thread(target=self._exit_without_progress, daemon=True, name="stop").start()
        self._signal = signal.Signals(number)

    def _exit_without_progress(self) -> None:
        while (left := self._last_progress + self._grace_seconds - time.monotonic()) > 0:
            if self._is_obeyed.wait(left):
                return
        for worker in multiprocessing.active_children():
            worker.kill()
        assert self._signal is not None
        message = f"{self._signal.name}: no batch has ended for {self._grace_seconds:g} s; exiting without a checkpoint"
        print(f"\nerror: {message}; see trainer.stop_grace_seconds", file=sys.stderr, flush=True)
        os._exit(1)

    def note_progress(self) -> None:
        """Restart the grace period; called after every batch."""
        self._last_progress = time.monotonic()

    def obey(self) -> None:
        """End the grace period: the run is being saved."""
        self._is_obeyed.set()

    def _interrupt(self) -> None:
        self._handle(signal.SIGINT, None)

    @property
    def is_set(self) -> bool:
        """Return True if this process should stop."""
        return self._signal is not None or (self._deadline is not None and time.monotonic() > self._deadline)

    def build_error(self) -> StoppedError:
        """Build the exception that ends the run once it is saved."""
        self.obey()
        if self._signal == signal.SIGINT:
            return InterruptedRunError("interrupted")
        if self._signal is not None:
            return StoppedError(self._signal.name)
        return StoppedError(f"trainer.max_time {self._max_time} is over" if self.is_set else STOPPED_ELSEWHERE)

    @contextlib.contextmanager
    def handle_interrupts(self) -> Iterator[None]:
        """Let the first Ctrl-C within the context request a stop, and the second end the process at once."""
        handler = _InterruptHandler("saving a checkpoint after this step", on_first=self._interrupt)
        with handler.install():
            yield


def _start_resource_tracker() -> None:
    """Start Python's resource tracker with SIGUSR1 blocked: Slurm may signal it too, which would end it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def parse_seconds(max_time: str) -> int:
    """Return the seconds of DD:HH:MM:SS."""
    days, hours, minutes, seconds = map(int, max_time.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class _InterruptHandler:
    """Handles SIGINT: calls `on_first` the first time, and raises KeyboardInterrupt the second time.

    An exception raised inside a signal handler may leave a lock of Python's `threading` held, such as the lock of
    TensorBoard's queue, and the process would wait for that lock when it exits. So the first time raises none.
    """

    def __init__(self, action: str, on_first: Callable[[], None]) -> None:
        self._message = f"interrupted: {action}; press Ctrl-C again to stop at once\n"
        self._on_first, self._is_first, self._process = on_first, True, os.getpid()

    def _handle(self, *_: Any) -> None:
        """Handle SIGINT. Writes without Python's buffer, which may be in the middle of a line."""
        if not self._is_first or os.getpid() != self._process:
            raise KeyboardInterrupt
        self._is_first = False
        self._on_first()
        if os.environ.get("RANK", "0") == "0":
            os.write(2, self._message.encode())

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        """Handle SIGINT within the context, unless it is ignored, as in the background processes of a script.

        Every process of a run handles its own SIGINT; the watchdog ends the processes that received none.
        """
        previous = signal.getsignal(signal.SIGINT)
        if previous is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        except SystemExit:  # Lightning replaces KeyboardInterrupt by SystemExit
            raise KeyboardInterrupt from None
        finally:
            signal.signal(signal.SIGINT, previous)


class _InterruptCallback(pl.Callback):
    """Raises KeyboardInterrupt between two batches of an evaluation, once it is requested."""

    is_requested = False

    def request(self) -> None:
        self.is_requested = True

    def raise_if_requested(self, *_: Any) -> None:
        if self.is_requested:
            raise KeyboardInterrupt

    # At the start of a batch all callbacks have finished the previous one.
    on_validation_batch_start = on_test_batch_start = raise_if_requested


@contextlib.contextmanager
def handle_interrupts(trainer: pl.Trainer) -> Iterator[None]:
    """Turn the first Ctrl-C into a KeyboardInterrupt between two batches of an evaluation by `trainer`."""
    callback = _InterruptCallback()
    trainer.callbacks.append(callback)  # type: ignore[attr-defined]
    with _InterruptHandler("finishing the batch", on_first=callback.request).install():
        yield
        callback.raise_if_requested()
