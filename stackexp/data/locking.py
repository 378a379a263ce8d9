"""One writer at a time for a folder."""

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path`, waiting (and saying so) while another process does.

    The system releases the lock when its holder ends, however it ends, so a kill leaves nothing behind.
    """
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process to finish {what}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
