"""One writer at a time for a folder."""

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_held: set[IO] = set()


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path`, waiting (and saying so) while another process does.

    The system releases the lock when its holder ends, however it ends, so a kill leaves nothing behind. Processes
    that the holder forks do not hold it.
    """
    with open(path, "a") as file:
        _held.add(file)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process to finish {what}", file=sys.stderr, flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            _held.discard(file)


def _let_go() -> None:
    """Close the files in a forked child: the lock lasts as long as any process has its file open."""
    for file in _held:
        file.close()


os.register_at_fork(after_in_child=_let_go)
