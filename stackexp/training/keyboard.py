"""Ctrl-C, obeyed between two batches."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl

SAID = "interrupted: the batch is finished first; once more to stop at once\n"


class Keyboard(pl.Callback):
    """Raises KeyboardInterrupt when the batch has ended in which SIGINT came; a second SIGINT raises it at once.

    Raised anywhere it may leave a lock of Python's `threading` held for ever, such as that of the queue which
    TensorBoard's thread reads, and the process would wait for it at its end. Each process of a run obeys by itself;
    one that was not interrupted is ended by the watchdog.
    """

    def __init__(self) -> None:
        self._asked, self._process = False, os.getpid()

    def note(self, *_: Any) -> None:
        """The handler of SIGINT. It writes by itself: what is buffered may be in the middle of a line."""
        if self._asked or os.getpid() != self._process:
            raise KeyboardInterrupt
        self._asked = True
        if os.environ.get("RANK", "0") == "0":
            os.write(2, SAID.encode())

    def obey(self, *_: Any) -> None:
        if self._asked:
            raise KeyboardInterrupt

    # Before a batch: all callbacks have done with the last one.
    on_train_batch_start = on_validation_batch_start = on_test_batch_start = obey


@contextlib.contextmanager
def interruptible(trainer: pl.Trainer) -> Iterator[None]:
    """Ctrl-C is obeyed between two batches of `trainer`, as a KeyboardInterrupt; Lightning makes it SystemExit.

    Where it is ignored, as by what a script starts in the background, it stays so.
    """
    keyboard, before = Keyboard(), signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        trainer.callbacks.append(keyboard)
        signal.signal(signal.SIGINT, keyboard.note)
    try:
        yield
        keyboard.obey()
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)
