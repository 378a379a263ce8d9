"""Prepared sets as a dataset of mosaicml-streaming: its order and exact resume, with our own shard cache.

The library determines the order of samples, restores the position on resume, and loads shards ahead. `ShardCache`
decides which shards are on this node, because the library's own cache

- counts a shard only after its download,
- evicts shards of sources that are not caches,
- waits forever for a shard that another process evicted or failed to download, and
- ends an epoch early if a download fails.

Most of this uses public hooks: `Stream.set_up_local`, `StreamingDataset.prepare_shard`, `get_item` and `__iter__`.
These private or undocumented names are also used:

- `streaming.base.dataset.get_shm_prefix`: replaced while a dataset is constructed. It names shared memory and lock
  files by counting up to the first free number, so two runs that start together use the same one and crash, and
  leftovers of a killed run may be mistaken for our own.
- `_executor`: set to daemon threads. Python waits at exit for the library's threads, which may be in a long download.
- `_iterator`: its threads are stopped when an epoch is abandoned, and its indices show if the look-ahead is behind.
"""

import atexit
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import streaming.base.dataset
from streaming import Stream, StreamingDataset
from streaming.base.format import Reader
from streaming.base.world import World
from torch import distributed

from stackexp.data.hash_log import hash_sequence
from stackexp.datamodules.download import RemoteFolder, SourceError
from stackexp.datamodules.shard_cache import Shard, ShardCache
from stackexp.datamodules.shared_memory import claim_prefix, remove_lock_files, remove_remains
from stackexp.errors import first_line


class TokenSource(Stream):
    """One prepared set in a TokenStream, with `sequences` samples per epoch. With a `remote`, `folder` is its cache."""

    def __init__(self, folder: str | Path, sequences: int, remote: RemoteFolder | None = None):
        super().__init__(local=str(folder), choose=sequences)
        self.remote_folder = remote

    def set_up_local(self, shards: list[Reader], cache_usage_per_shard: np.ndarray) -> None:
        """Report to the library that every shard is present."""
        cache_usage_per_shard[:] = [shard.get_raw_size() for shard in shards]


class TokenStream(StreamingDataset):
    """One prepared set, or a mixture of several.

    A sample is {"tokens": uint16 or uint32 [T], "index": its number among the sequences of all sources, "source": the
    number of its source, "hash": its 64-bit hash}.
    """

    def __init__(
        self, sources: list[TokenSource], cache_limit: int | None = None, num_loaders: int = 1, **options: Any
    ):
        """Open the sources.

        Args:
            sources: The sets to read.
            cache_limit: Bytes that all caches on this node may use together; None: no limit.
            num_loaders: Processes per node that download shards at the same time.
            options: Options of StreamingDataset.

        Raises:
            SourceError: If the limit is too low. Reading samples raises it if a shard cannot be read.
        """
        with _unique_prefix() as prefix:
            if World.detect().is_local_leader:
                remove_remains()
            claim_prefix(prefix)
            super().__init__(streams=sources, **options)
        self._executor = _DaemonExecutor()  # type: ignore[assignment]
        self._has_limit = cache_limit is not None
        self._shards = [
            _describe_shard(shard, sources[source])
            for shard, source in zip(self.shards, self.stream_per_shard, strict=True)
        ]
        self._cache = ShardCache(f"{prefix:06}_stackexp", self._shards, cache_limit)
        if World.detect().is_local_leader:
            atexit.register(remove_lock_files, f"{prefix:06}")
            self._cache.initialize(num_loaders)

    def get_item(self, sample_id: int, retry: int = 7) -> dict[str, Any]:
        """Return a sample by its number. Raises SourceError."""
        shard_id = int(self.spanner[sample_id][0])
        try:
            self._cache.verify(shard_id)
            tokens = super().get_item(sample_id, retry)["tokens"]
        except SourceError:
            raise
        except OSError as error:  # it would lose its file name on the way out of a worker process
            where, hint = error.filename or "the cache", "name another cache with data.path or STACKEXP_CACHE"
            raise SourceError(f"{where}: {error.strerror or error}; free space, or {hint}") from None
        except RuntimeError as error:  # from the library: a shard was evicted repeatedly before its use
            too_low = "data.cache_limit: too low for this number of loader processes; raise it"
            raise SourceError(too_low if self._has_limit else first_line(error)) from None
        except (IndexError, ValueError) as error:
            hint = "prepare or copy it again, then resume the run"
            raise SourceError(f"{self._shards[shard_id].path}: damaged ({first_line(error)}); {hint}") from None
        self._cache.mark_used(shard_id)
        return {
            "tokens": tokens,
            "index": int(sample_id),
            "source": int(self.stream_per_shard[shard_id]),
            "hash": hash_sequence(tokens),
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            yield from super().__iter__()
        finally:  # also after an error and when the epoch is abandoned
            if hasattr(self, "_iterator"):
                self._iterator.non_blocking_exit()

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Download a shard unless it is present; the library calls this. Raises SourceError or OSError.

        Without `blocking`, the call loads ahead. If it is behind the samples being read, it downloads nothing, because
        that would evict shards that are needed soon.
        """
        if blocking or self._iterator.prepare_index >= self._iterator.yield_index:
            self._cache.prepare(shard_id, should_wait=blocking)


class _DaemonExecutor:
    """An executor for the look-ahead threads. Python does not wait for daemon threads at exit."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        future: Future = Future()
        Thread(target=self._run, args=(future, function, arguments), daemon=True).start()
        return future

    @staticmethod
    def _run(future: Future, function: Callable[..., Any], arguments: tuple) -> None:
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)


def _describe_shard(shard: Reader, source: TokenSource) -> Shard:
    ((file, _),) = shard.file_pairs
    return Shard(Path(source.local), file.basename, file.bytes, file.hashes["sha256"], source.remote_folder)


@contextmanager
def _unique_prefix() -> Iterator[int]:
    """Yield a random number that names shared memory and lock files of a dataset constructed within the context.

    Rank 0 draws the number for all ranks.
    """
    drawn = [secrets.randbelow(10**9)]
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(drawn)
    prefix = drawn[0] + World.detect().node  # in tests, two nodes may be one machine
    original = streaming.base.dataset.get_shm_prefix
    streaming.base.dataset.get_shm_prefix = lambda *_: (prefix, None)  # type: ignore[assignment]
    try:
        yield prefix
    finally:
        streaming.base.dataset.get_shm_prefix = original


def set_world(rank: int, world_size: int, ranks_per_node: int) -> None:
    """Set the environment variables from which the library reads its rank, at construction and when it saves.

    LOCAL_RANK is not set, because Lightning would then assume that another program launches the processes.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(ranks_per_node))
