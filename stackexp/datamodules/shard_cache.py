"""The shards on this node: downloads, the cache limit and evictions, shared by all processes that read them."""

import tempfile
from pathlib import Path
from time import sleep, time_ns
from typing import NamedTuple

import numpy as np
from filelock import FileLock
from streaming.base.shared import SharedArray

from stackexp.data.verification import DamagedFileError, verify_file
from stackexp.datamodules.download import RemoteFolder, SourceError

ABSENT, DOWNLOADING, PRESENT = range(3)  # states of a shard
POLL_SECONDS = 0.007


class Shard(NamedTuple):
    """A shard file. With a `remote`, it is a cached copy; without, it is the original, which is never deleted."""

    folder: Path
    name: str  # relative to folder and to remote
    size: int  # bytes
    sha256: str
    remote: RemoteFolder | None

    @property
    def path(self) -> Path:
        """The path of the file on this node."""
        return self.folder / self.name


class ShardCache:
    """Shard states, bytes used and access times in shared memory, common to all processes of a node.

    Every process creates one with the same arguments. Then one process calls `initialize` before others call `prepare`.
    A shard counts against the limit from the start of its download until it is deleted.
    """

    def __init__(self, name: str, shards: list[Shard], limit: int | None):
        """Create a cache whose `name` is unique on the node; `limit` is in bytes (None: no limit)."""
        self._shards, self._limit = shards, limit
        self._sizes = np.array([shard.size for shard in shards])
        self._is_cached = np.array([shard.remote is not None for shard in shards])
        self._states = SharedArray(len(shards), np.uint8, f"{name}_states")
        self._last_used = SharedArray(len(shards), np.int64, f"{name}_last_used")  # ns
        self._used_bytes = SharedArray(1, np.int64, f"{name}_used_bytes")
        self._verified: set[int] = set()  # shards that this process has verified
        self._lock_path = Path(tempfile.gettempdir(), f"{name}_filelock")

    def initialize(self, num_loaders: int) -> None:
        """Look for the shards on disk. Raises SourceError if the limit is too low for `num_loaders` processes."""
        folders = {shard.folder for shard in self._shards if shard.remote}
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        self._used_bytes[0] = sum(path.stat().st_size for path in files)
        self._states[:] = [PRESENT if shard.path.is_file() else ABSENT for shard in self._shards]
        self._last_used[:] = 0
        if self._limit is not None and self._is_cached.any():
            self._check_limit(self._limit, num_loaders)
        self._evict_until_free(0)

    def prepare(self, shard_id: int, should_wait: bool = True) -> None:
        """Download a shard unless it is present. Raises SourceError or OSError.

        Without `should_wait`, try once, ignore errors, and do not wait for another process that downloads the shard.
        """
        if self._is_present(shard_id):
            return
        with self._lock():
            is_ours = self._states[shard_id] != DOWNLOADING and not self._is_present(shard_id)
            if is_ours:
                if self._states[shard_id] == PRESENT:  # the file was deleted by somebody else
                    self._release_bytes(shard_id)
                self._states[shard_id] = DOWNLOADING
        if is_ours:
            try:
                self._download(shard_id, should_wait)
            except Exception:
                if should_wait:
                    raise
        while should_wait and self._states[shard_id] == DOWNLOADING:
            sleep(POLL_SECONDS)

    def verify(self, shard_id: int) -> None:
        """Compare a shard with its recorded hash, on the first use by this process.

        A damaged copy is deleted, so that it is downloaded again. Raises SourceError for a damaged original.
        """
        if shard_id in self._verified:
            return
        shard = self._shards[shard_id]
        try:
            verify_file(shard.path, shard.sha256)
            self._verified.add(shard_id)
        except FileNotFoundError:  # not downloaded yet, or evicted
            pass
        except DamagedFileError as error:
            if shard.remote is None:
                raise SourceError(str(error)) from None
            shard.path.unlink(missing_ok=True)

    def mark_used(self, shard_id: int) -> None:
        """Record an access, because the least recently used shard is evicted first."""
        self._last_used[shard_id] = time_ns()

    def _check_limit(self, limit: int, num_loaders: int) -> None:
        # Each loader may need one shard to read and one to look ahead. With less space, they would wait for each other.
        largest = int(self._sizes[self._is_cached].max())
        metadata = int(self._used_bytes[0]) - int(self._sizes[self._is_on_disk()].sum())
        minimum = metadata + min(2 + 2 * num_loaders, int(self._is_cached.sum())) * largest
        if limit < minimum:
            raise SourceError(
                f"data.cache_limit: {limit:,} bytes are too few for {num_loaders} loader process(es) per node and "
                f"shards of {largest:,} bytes; set data.cache_limit={minimum}b or more"
            )

    def _is_present(self, shard_id: int) -> bool:
        return self._states[shard_id] == PRESENT and self._shards[shard_id].path.is_file()

    def _download(self, shard_id: int, should_retry: bool) -> None:
        shard, state = self._shards[shard_id], ABSENT
        try:
            if shard.remote is None:
                hint = "put it back, then resume the run"
                raise SourceError(f"{shard.path}: deleted since the run began; {hint}")
            self._evict_until_free(shard.size)
            try:
                shard.remote.download(shard.name, shard.path, shard.sha256, should_retry)
                self.mark_used(shard_id)  # so that it is not evicted before it is read
                state = PRESENT
            finally:
                if state == ABSENT:
                    with self._lock():
                        self._release_bytes(shard_id)
        finally:
            self._states[shard_id] = state

    def _evict_until_free(self, size: int) -> None:
        """Reserve `size` bytes: evict the least recently used shards, or wait until there are shards to evict."""
        while True:
            with self._lock():
                while self._is_over_limit(size) and (candidates := np.flatnonzero(self._is_on_disk())).size:
                    self._evict(int(candidates[np.argmin(self._last_used.numpy()[candidates])]))
                if not self._is_over_limit(size):
                    self._used_bytes[0] += size
                    return
            sleep(POLL_SECONDS)  # all cached shards are being downloaded

    def _is_over_limit(self, size: int) -> bool:
        return self._limit is not None and self._used_bytes[0] + size > self._limit

    def _is_on_disk(self) -> np.ndarray:
        """Return True for each cached shard that is present, bool [N]."""
        return self._is_cached & (self._states.numpy() == PRESENT)

    def _evict(self, shard_id: int) -> None:
        self._states[shard_id] = ABSENT
        self._shards[shard_id].path.unlink(missing_ok=True)
        self._release_bytes(shard_id)

    def _release_bytes(self, shard_id: int) -> None:
        if self._is_cached[shard_id]:
            self._used_bytes[0] -= self._shards[shard_id].size

    def _lock(self) -> FileLock:
        """Return a lock that excludes all other threads and processes of the node."""
        return FileLock(self._lock_path)
