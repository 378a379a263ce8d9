"""Storage of the training data on a node: cache folders of remote sets, and shared memory.

Both may outlive a killed run. The next run reuses a cache folder; the next run of the same user removes shared memory.
mosaicml-streaming names its segments in /dev/shm and its lock files in the temporary folder `<prefix>_...`, where the
prefix is a random number for each run. Every process of a run holds a shared lock on the owner file of its prefix. If
no process holds it, the run has ended.
"""

import contextlib
import hashlib
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TypeVar

import torch.distributed as dist
from streaming.base.storage import CloudDownloader
from streaming.base.util import retry

from stackexp.errors import RunError, first_line
from stackexp.files import get_cache_root, is_locked, try_lock

T = TypeVar("T")
log = logging.getLogger(__name__)

# Cache folders

METADATA_FILES = ("corpus.json", "index.json", "tokenizer.json")
LOCK_FILE = ".remote"  # holds the URL of the remote set


class SourceError(RunError):
    """Raised if training data cannot be read.

    torch raises the error of a worker process again with the worker's traceback as its message. Only the last line,
    the original message, is kept.
    """

    def __init__(self, message: str):
        super().__init__(message.rpartition(f"{SourceError.__qualname__}: ")[2].strip())


def explain_failure(url: str, error: Exception) -> SourceError:
    """Return a one-line error for a file that could not be downloaded from `url`."""
    if isinstance(error, OSError) and error.errno and not str(error.filename).startswith(url):
        reason = f"{error.filename or 'the cache'}: {error.strerror}"
        return SourceError(f"{reason}; free space, or name another cache with data.path or STACKEXP_CACHE")
    return SourceError(f"{url}: {first_line(error)}; check data.remote and the credentials, then resume the run")


class CacheFolder:
    """A locked folder with the metadata of a remote set and some of its shards.

    It belongs to one run at a time, because a run deletes shards that others may read.
    """

    def __init__(self, remote: str, folder: str | None, timeout: float = 60, attempts: int = 1):
        """Lock the first of `folder`, `folder`-2, ... that is not in use (None: a folder in the cache root).

        Raises SourceError if the metadata of `remote` cannot be downloaded or the folder holds other files, and OSError
        if it cannot be written.
        """
        self.remote = remote
        name = hashlib.sha256(remote.encode()).hexdigest()[:16]
        first = Path(folder) if folder else get_cache_root() / "remotes" / name
        for number in itertools.count(1):
            self.path = first.with_name(f"{first.name}-{number}") if number > 1 else first
            if lock := self._try_lock():
                self.lock = lock  # until this file is closed
                break
        if folder and number > 1:
            log.warning("%s: another run uses this cache; this run uses %s", first, self.path)
        for name in METADATA_FILES:
            self._download(name, timeout, attempts)

    def _try_lock(self) -> IO[str] | None:
        """Return the locked file of the folder; None if another run holds the lock."""
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / LOCK_FILE).is_file():
            raise SourceError(
                f"{self.path}: holds other files, so it cannot be the cache of {self.remote}; "
                "remove data.path, or name an empty folder"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        lock = try_lock(self.path / LOCK_FILE)
        if lock is None:
            return None
        lock.seek(0)
        if (url := lock.read()) not in ("", self.remote):
            raise SourceError(f"{self.path}: is the cache of {url}, not of {self.remote}; name another folder")
        if not url:
            lock.write(self.remote)
            lock.flush()
        return lock

    def _download(self, name: str, timeout: float, attempts: int) -> None:
        """Replace a metadata file by that of the remote set."""
        url, new = f"{self.remote}/{name}", self.path / f".{name}.new"
        new.unlink(missing_ok=True)  # the library keeps a file that exists
        try:
            downloader = CloudDownloader.get(self.remote)  # not shared with forked processes
            retry(num_attempts=attempts, clean_up_fn=downloader.clean_up)(
                lambda: downloader.download(url, str(new), timeout)
            )()
        except Exception as error:  # each service raises its own
            raise explain_failure(url, error) from None
        os.replace(new, self.path / name)


_open_folders: dict[tuple[str, str | None], CacheFolder] = {}


def open_node_cache(remote: str, folder: str | None, timeout: float, attempts: int) -> Path:
    """Open the `CacheFolder` that all processes of this node share; its first process holds the lock until it ends.

    Raises SourceError, and OSError if the folder cannot be written.
    """
    key = (remote, folder)

    def open_folder() -> Path:
        if key not in _open_folders:
            _open_folders[key] = CacheFolder(remote, folder, timeout, attempts)
        return _open_folders[key].path

    return run_once_per_node(open_folder)


def run_once_per_node(function: Callable[[], T]) -> T:
    """Call `function` in the first process of each node and return its result in all processes of that node.

    Every process of the run must call this. If one call raises RunError or OSError, all processes raise that error.
    """
    if not dist.is_initialized():
        return function()
    result, error = None, None
    is_first = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0) == 0
    if is_first:
        try:
            result = function()
        except (RunError, OSError) as caught:
            error = caught
    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (is_first, result, error))
    for _, _, error in answers:
        if error is not None:
            raise error
    return next(result for is_first, result, _ in reversed(answers[: dist.get_rank() + 1]) if is_first)


# Shared memory

SHARED_MEMORY = Path("/dev/shm")
OWNER_SUFFIX = "_stackexp_owner"
FIXED_BYTES = 1 << 18  # segments, queues and locks of a run, each at least a page
PREFETCHED_BATCHES = 2  # by each loader worker; torch's default
MAX_SOCKET_PATH_BYTES = 107  # on Linux
WORKER_SOCKET = "/pymp-12345678/listener-12345678"  # a path of Python's multiprocessing below the temporary folder

_owned = ExitStack()


def lock_prefix(prefix: str) -> None:
    """Lock the owner file of `prefix` until this process ends, which marks its shared memory as used.

    The owner file is in the folder of the segments, because another run may have another temporary folder. It holds
    the path of the temporary folder with the lock files.
    """
    while (owner := try_lock(_owner_file(prefix), shared=True)) is None:
        time.sleep(0.01)  # another run holds the lock while it checks it
    _owned.enter_context(owner)
    owner.write(f"{tempfile.gettempdir()}\n")  # every process writes the same line
    owner.flush()


def remove_stale_storage() -> None:
    """Delete shared memory and lock files of this user's runs that have ended."""
    for path in _owner_file("*").parent.glob(_owner_file("*").name):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_uid == os.geteuid() and not is_locked(path, count_shared=True):
                remove_prefix(path.name.removesuffix(OWNER_SUFFIX))


def remove_prefix(prefix: str) -> None:
    """Delete the segments and lock files of a run of this user, its owner file last."""
    owner = _owner_file(prefix)
    with contextlib.suppress(FileNotFoundError):  # another process removes them too
        locks = Path((owner.read_text().splitlines() or [tempfile.gettempdir()])[0])
        for path in (*locks.glob(f"{prefix}_*_filelock"), *SHARED_MEMORY.glob(f"{prefix}_*")):
            if path != owner and path.stat().st_uid == os.geteuid():
                path.unlink()
        owner.unlink()


def check_shared_memory(samples: int, loaders: int, batch_bytes: int) -> None:
    """Raise RunError if shared memory is too small, because the kernel would later kill the run with SIGBUS.

    Args:
        samples: Sequences in an epoch over all nodes; each has an id of 8 bytes.
        loaders: Loader workers on this node.
        batch_bytes: Size of a batch that a worker sends to its process.
    """
    if not SHARED_MEMORY.is_dir():
        return
    always, free = FIXED_BYTES + 8 * samples, shutil.disk_usage(SHARED_MEMORY).free
    needed = always + loaders * (PREFETCHED_BATCHES + 1) * batch_bytes
    if needed > free:
        advice = f"in a container use --shm-size={-(-2 * needed // 2**20)}m"
        workers = ", or set data.num_workers=0" if loaders and always < free else ""
        message = f"{SHARED_MEMORY}: the training data need {needed:,} bytes, but only {free:,} are free"
        raise RunError(f"{message}; {advice}{workers}")


def check_temporary_folder(loaders: int) -> None:
    """Raise RunError if the path of the temporary folder is too long for the sockets of loader workers.

    The workers could not send their batches, and the run would wait for them forever.
    """
    folder = tempfile.gettempdir()
    limit = MAX_SOCKET_PATH_BYTES - len(WORKER_SOCKET)
    if loaders and len(os.fsencode(folder)) > limit:
        advice = f"set TMPDIR to a path of at most {limit} bytes, or data.num_workers=0"
        raise RunError(f"{folder}: the path is too long for the sockets of loader workers; {advice}")


def _owner_file(prefix: str) -> Path:
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return folder / f"{prefix}{OWNER_SUFFIX}"
