"""Signals and time limits that end a run or an evaluation early: SIGTERM, SIGUSR1, max_time and Ctrl-C."""

import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

from stackexp.errors import InterruptedRunError, StoppedError
from stackexp.terminal import write_to_stderr

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # Slurm sends SIGUSR1 ahead of the time limit
FINISHING = {signal.SIGINT: "interrupted: finishing this step; press Ctrl-C again to stop at once"}
FINISHING |= {number: f"{number.name}: finishing this step" for number in STOP_SIGNALS}


class StopRequest:
    """A request to save and stop: SIGTERM, SIGUSR1, Ctrl-C, or `max_time` (DD:HH:MM:SS) from now.

    If no batch ends for `grace_seconds` after a signal, as when a loader worker is frozen, the process exits with
    code 1 and without saving.
    """

    def __init__(self, max_time: str | None, grace_seconds: float):
        self._signal: signal.Signals | None = None
        self._grace_seconds, self._last_progress = grace_seconds, time.monotonic()
        self._is_handled = threading.Event()
        self._max_time = max_time
        self._deadline = time.monotonic() + parse_seconds(max_time) if max_time else None
        self._process, self._interrupts = os.getpid(), 0
        self._expected = set(STOP_SIGNALS)
        # Slurm may also signal Python's resource tracker, which would end it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        threading.Thread(target=self._listen, args=(_redirect_signals(),), daemon=True, name="stop").start()
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        atexit.register(_prepare_exit)

    def _handle(self, number: int, _: Any) -> None:
        self._signal = signal.Signals(number)

    def _listen(self, numbers: socket.socket) -> None:
        """Announce the first signal and start the grace period.

        The kernel may give a signal to any thread. Python runs its handler in the main thread, which does not wake up
        for it: waiting for a frozen worker, it would never run the handler.
        """
        is_first = True
        with numbers:
            while number := numbers.recv(1):  # empty once a later StopRequest listens
                if is_first and number[0] in self._expected:
                    is_first, first, self._last_progress = False, signal.Signals(number[0]), time.monotonic()
                    self._signal = self._signal or first
                    threading.Thread(target=self._exit_without_progress, daemon=True, name="grace").start()
                    if os.environ.get("RANK", "0") == "0":
                        write_to_stderr(FINISHING[first])

    def _exit_without_progress(self) -> None:
        while (left := self._last_progress + self._grace_seconds - time.monotonic()) > 0:
            if self._is_handled.wait(left):
                return
        for worker in multiprocessing.active_children():
            worker.kill()
        assert self._signal is not None
        message = f"{self._signal.name}: no batch has ended for {self._grace_seconds:g} s; exiting without a checkpoint"
        write_to_stderr(f"\nerror: {message}; see trainer.stop_grace_seconds")
        os._exit(1)

    def note_progress(self) -> None:
        """Restart the grace period; called after every batch."""
        self._last_progress = time.monotonic()

    def end_grace_period(self) -> None:
        """End the grace period, because the run is about to be saved."""
        self._is_handled.set()

    @property
    def is_set(self) -> bool:
        """Return True if this process should stop."""
        return self._signal is not None or (self._deadline is not None and time.monotonic() > self._deadline)

    def build_error(self) -> StoppedError:
        """Build the exception that ends the run once it is saved."""
        self.end_grace_period()
        if self._signal == signal.SIGINT:
            return InterruptedRunError("interrupted")
        if self._signal is not None:
            return StoppedError(self._signal.name)
        is_over = f"trainer.max_time {self._max_time} is over"
        return StoppedError(is_over if self.is_set else "another process received a stop request")

    @contextlib.contextmanager
    def handle_interrupts(self) -> Iterator[None]:
        """Let the first Ctrl-C within the context request a stop, and the second end the process at once.

        Does nothing if SIGINT is ignored, as in background processes of a script. Every process of a run handles its
        own SIGINT; the watchdog ends the processes that received none.
        """
        previous = signal.getsignal(signal.SIGINT)
        if previous is not signal.SIG_IGN:
            self._expected.add(signal.SIGINT)
            signal.signal(signal.SIGINT, self._handle_interrupt)
        try:
            yield
        except SystemExit:  # Lightning replaces KeyboardInterrupt by SystemExit
            raise KeyboardInterrupt from None
        finally:
            signal.signal(signal.SIGINT, previous)
            self._expected.discard(signal.SIGINT)

    def _handle_interrupt(self, number: int, _: Any) -> None:
        """Handle SIGINT: request a stop the first time, end the process the second time.

        The first time raises no exception: raised inside a signal handler, it may leave a `threading` lock held, such
        as that of TensorBoard's queue, and the process would wait for it at exit.
        """
        self._interrupts += 1
        if self._interrupts > 1 or os.getpid() != self._process:
            raise KeyboardInterrupt
        self._handle(number, None)


_sender: socket.socket | None = None


def _redirect_signals() -> socket.socket:
    """Return a socket that gets the number of every signal for which this process, not its children, has a handler."""
    global _sender
    previous = _sender
    receiver, _sender = socket.socketpair()
    _sender.setblocking(False)
    signal.set_wakeup_fd(_sender.fileno(), warn_on_full_buffer=False)
    if previous:
        previous.close()  # its listener ends
    else:
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    return receiver


def _prepare_exit() -> None:
    """Ignore further stop signals, and kill loader workers that still run.

    Python removes the handlers before the process ends, so another signal would replace the exit code. It would wait
    forever for a frozen worker.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report them as failed
    for worker in multiprocessing.active_children():
        worker.kill()


def parse_seconds(max_time: str) -> int:
    """Convert DD:HH:MM:SS to seconds."""
    days, hours, minutes, seconds = map(int, max_time.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
