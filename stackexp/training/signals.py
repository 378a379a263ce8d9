"""Signals and time limits that end a run early: SIGTERM, SIGUSR1, max_time and Ctrl-C."""

# mypy: disable-error-code="assignment"
# One method serves several hooks of Lightning, which all have different arguments.

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

import lightning.pytorch as pl

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # Slurm sends SIGUSR1 ahead of the time limit
INTERRUPT_MESSAGE = "interrupted: finishing the batch; press Ctrl-C again to stop at once\n"


class StopRequest:
    """A request to save a checkpoint and stop: SIGTERM, SIGUSR1, or `max_time` (DD:HH:MM:SS) from now."""

    def __init__(self, max_time: str | None):
        self._reason: str | None = None
        self._max_time = max_time
        self._deadline = time.monotonic() + parse_seconds(max_time) if max_time else None
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        _start_resource_tracker()

    def _handle(self, number: int, _: Any) -> None:
        self._reason = signal.Signals(number).name

    @property
    def reason(self) -> str | None:
        """Return why this process should stop, or None."""
        if self._reason is None and self._deadline is not None and time.monotonic() > self._deadline:
            self._reason = f"trainer.max_time {self._max_time} is over"
        return self._reason


def _start_resource_tracker() -> None:
    """Start Python's resource tracker with SIGUSR1 blocked: Slurm may signal it too, which would end it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def parse_seconds(max_time: str) -> int:
    """Return the seconds of DD:HH:MM:SS."""
    days, hours, minutes, seconds = map(int, max_time.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class _InterruptCallback(pl.Callback):
    """Raises KeyboardInterrupt between two batches after the first SIGINT, and at once after the second.

    Raised anywhere else, it may leave a lock of Python's `threading` held, such as the lock of TensorBoard's queue, and
    the process would wait for that lock when it exits.
    """

    def __init__(self) -> None:
        self._is_requested, self._process = False, os.getpid()

    def handle(self, *_: Any) -> None:
        """Handle SIGINT. Writes without Python's buffer, which may be in the middle of a line."""
        if self._is_requested or os.getpid() != self._process:
            raise KeyboardInterrupt
        self._is_requested = True
        if os.environ.get("RANK", "0") == "0":
            os.write(2, INTERRUPT_MESSAGE.encode())

    def raise_if_requested(self, *_: Any) -> None:
        if self._is_requested:
            raise KeyboardInterrupt

    # At the start of a batch all callbacks have finished the previous one.
    on_train_batch_start = on_validation_batch_start = on_test_batch_start = raise_if_requested


@contextlib.contextmanager
def handle_interrupts(trainer: pl.Trainer) -> Iterator[None]:
    """Turn Ctrl-C into a KeyboardInterrupt between two batches of `trainer`.

    Where SIGINT is ignored, as in processes that a script starts in the background, it stays ignored. Every process of
    a run handles its own SIGINT; the watchdog ends the processes that received none.
    """
    callback, previous = _InterruptCallback(), signal.getsignal(signal.SIGINT)
    if previous is not signal.SIG_IGN:
        trainer.callbacks.append(callback)  # type: ignore[attr-defined]
        signal.signal(signal.SIGINT, callback.handle)
    try:
        yield
        callback.raise_if_requested()
    except SystemExit:  # Lightning replaces KeyboardInterrupt by SystemExit
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, previous)
