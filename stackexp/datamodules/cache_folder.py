"""The folder that caches a remote set on this node.

A cache folder belongs to one run at a time; the next run finds it filled. It never holds an incomplete shard under
the shard's name.
"""

import hashlib
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

import torch.distributed as dist

from stackexp.datamodules.download import RemoteFolder, SourceError
from stackexp.errors import RunError
from stackexp.files import get_cache_root, read_json, try_lock

T = TypeVar("T")
log = logging.getLogger(__name__)
METADATA_FILES = ("corpus.json", "index.json", "tokenizer.json")
LOCK_FILE = ".remote"  # holds the URL of the remote


class CacheFolder:
    """A locked folder with the metadata of a remote set and some of its shards. `close` releases the lock."""

    def __init__(self, remote: RemoteFolder, folder: str | None):
        """Lock the first of `folder`, `folder`-2, ... that is not in use (None: a folder in the cache root).

        Raises SourceError if the folder cannot be a cache of `remote`, and OSError if it cannot be written.
        """
        self.remote = remote
        name = hashlib.sha256(remote.url.encode()).hexdigest()[:16]
        first = Path(folder) if folder else get_cache_root() / "remotes" / name
        for number in itertools.count(1):
            self.path = first.with_name(f"{first.name}-{number}") if number > 1 else first
            if lock := self._try_lock():
                self._lock = lock
                break
        if folder and number > 1:
            log.warning("%s: another run uses this cache; this run uses %s", first, self.path)
        self._update()

    def close(self) -> None:
        """Release the folder for other runs."""
        self._lock.close()

    def _try_lock(self) -> IO[str] | None:
        """Return the locked file of the folder; None if another run holds the lock."""
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / LOCK_FILE).is_file():
            raise SourceError(
                f"{self.path}: holds other files, so it cannot be the cache of {self.remote.url}; "
                "remove data.path, or name an empty folder"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        lock = try_lock(self.path / LOCK_FILE)
        if lock is None:
            return None
        lock.seek(0)
        if (url := lock.read()) not in ("", self.remote.url):
            raise SourceError(f"{self.path}: is the cache of {url}, not of {self.remote.url}; name another folder")
        if not url:
            lock.write(self.remote.url)
            lock.flush()
        return lock

    def _update(self) -> None:
        """Download the metadata, then delete everything except complete shards that still belong to the remote set."""
        before = self._read_shards()
        for name in METADATA_FILES:
            self.remote.download(name, self.path / name)
        self.remote.disconnect()
        after = self._read_shards()
        for path in self.path.rglob("*"):
            name = path.relative_to(self.path).as_posix()
            if path.is_file() and name not in (*METADATA_FILES, LOCK_FILE):
                is_current = name in after and before.get(name) == after[name]
                if not is_current or path.stat().st_size != after[name]["bytes"]:
                    path.unlink()

    def _read_shards(self) -> dict[str, dict[str, Any]]:
        """Return file name, size and hashes of every shard. `TokenSet` reports a damaged index.json."""
        try:
            shards = read_json(self.path / "index.json")["shards"]
            return {shard["raw_data"]["basename"]: shard["raw_data"] for shard in shards}
        except (OSError, RunError, KeyError, TypeError):
            return {}


_open_folders: dict[tuple[str, str | None], CacheFolder] = {}


def open_node_cache(remote: RemoteFolder, folder: str | None) -> Path:
    """Open the `CacheFolder` that all processes of this node share; its first process holds the lock until it ends.

    Raises SourceError, and OSError if the folder cannot be written.
    """
    key = (remote.url, folder)

    def open_folder() -> Path:
        if key not in _open_folders:
            _open_folders[key] = CacheFolder(remote, folder)
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
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (is_first, result, error))
    for _, _, error in answers:
        if error is not None:
            raise error
    return next(result for is_first, result, _ in reversed(answers[: dist.get_rank() + 1]) if is_first)
