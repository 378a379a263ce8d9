"""Shared memory of the training data on one node: check its free space, and remove leftovers of killed runs.

mosaicml-streaming names its segments in /dev/shm and its lock files in the temporary folder `<prefix>_...`, where the
prefix is a random number for each run. Every process of a run holds a shared lock on the owner file of its prefix. If
no process holds it, the run is dead, and the next run of the same user removes its files.
"""

import contextlib
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from stackexp.errors import RunError
from stackexp.files import hold_lock, is_locked

SHARED_MEMORY = Path("/dev/shm")
OWNER_SUFFIX = "_stackexp_owner_filelock"
PREFETCHED_BATCHES = 2  # by each loader worker; torch's default

_owned = ExitStack()


def claim_prefix(prefix: int) -> None:
    """Mark the shared memory of `prefix` as used, until this process ends."""
    path = _owner_file(f"{prefix:06}")
    _owned.enter_context(hold_lock(path, f"the removal of {path}", shared=True))


def remove_remains() -> None:
    """Delete shared memory and lock files of dead runs of this user."""
    for path in Path(tempfile.gettempdir()).glob(f"*{OWNER_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # another process removes them too
            if path.stat().st_uid == os.geteuid() and not is_locked(path, count_shared=True):
                prefix = path.name.removesuffix(OWNER_SUFFIX)
                for segment in SHARED_MEMORY.glob(f"{prefix}_*"):
                    if segment.stat().st_uid == os.geteuid():
                        segment.unlink(missing_ok=True)
                remove_lock_files(prefix)


def remove_lock_files(prefix: str) -> None:
    """Delete the lock files of a dataset from the temporary folder, the owner file last."""
    for path in sorted(
        Path(tempfile.gettempdir()).glob(f"{prefix}_*_filelock"), key=lambda p: p == _owner_file(prefix)
    ):
        path.unlink(missing_ok=True)


def check_space(samples: int, loaders: int, batch_bytes: int) -> None:
    """Raise RunError if shared memory is too small, because the kernel would later kill the run with SIGBUS.

    Args:
        samples: Sequences in an epoch over all nodes; each has an id of 8 bytes.
        loaders: Loader workers on this node.
        batch_bytes: Size of a batch that a worker sends to its process.
    """
    if not SHARED_MEMORY.is_dir():
        return
    needed, free = 8 * samples + loaders * (PREFETCHED_BATCHES + 1) * batch_bytes, shutil.disk_usage(SHARED_MEMORY).free
    if needed > free:
        advice = f"in a container use --shm-size={-(-2 * needed // 2**20)}m"
        workers = ", or set data.num_workers=0" if loaders and 8 * samples < free else ""
        message = f"{SHARED_MEMORY}: the training data need {needed:,} bytes, but only {free:,} are free"
        raise RunError(f"{message}; {advice}{workers}")


def _owner_file(prefix: str) -> Path:
    return Path(tempfile.gettempdir(), f"{prefix}{OWNER_SUFFIX}")
