"""One writer at a time for a folder, or for a numbered part of one."""

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_held: set[IO] = set()


@contextmanager
def locked(path: Path, what: str, shared: bool = False) -> Iterator[None]:
    """Hold the lock file `path`, waiting (and saying so) while another process does.

    `shared`: with others that share it, but not while one holds it alone. The system releases the lock when its holder
    ends, however it ends, so a kill leaves nothing behind. Processes that the holder forks do not hold it.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with open(path, "a+") as file:  # NFS shares a lock only on a file that is open for reading
        _held.add(file)
        try:
            _wait(lambda flags: fcntl.flock(file, kind | flags), what)
            yield
        finally:
            _held.discard(file)


@contextmanager
def locked_part(path: Path, number: int, what: str) -> Iterator[None]:
    """Hold part `number` of the lock file `path`, as `locked` does a whole one.

    A process that holds one part must not open the file for another: closing it would release both.
    """
    with open(path, "ab") as file:
        _wait(lambda flags: fcntl.lockf(file, fcntl.LOCK_EX | flags, 1, number), what)
        yield


def _wait(lock, what: str) -> None:
    try:
        lock(fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the latter on some systems
        print(f"waiting for another process to finish {what}", file=sys.stderr, flush=True)
        lock(0)


def _let_go() -> None:
    """Close the files in a forked child: the lock lasts as long as any process has its file open."""
    for file in _held:
        file.close()


os.register_at_fork(after_in_child=_let_go)
