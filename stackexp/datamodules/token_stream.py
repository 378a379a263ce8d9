"""Prepared sets as a dataset of mosaicml-streaming, and the loader of training batches.

The library orders the samples, restores the position on resume, downloads shards ahead and evicts them. Through public
hooks, this file adds: a shard is used only if its hash matches index.json; shards of local sets are never evicted; a
failed download raises an error instead of ending the epoch early; the look-ahead fits the cache. It also uses four
private names of the library and of torch:

- `streaming.base.dataset.get_shm_prefix`: replaced while a dataset is constructed. It names shared memory and lock
  files by counting up to the first free number, so two runs that start together use the same one and crash, and
  files of a killed run may be mistaken for those of this run.
- `_executor`: set to daemon threads. Python waits at exit for the library's threads, which may be in a long download.
- `_iterator`: its threads are stopped when an epoch is abandoned, and counted as stopped when they fail.
- `DataLoader._get_iterator`: it starts the workers, which are killed with the loader if they do not exit.
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import multiprocessing.util
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import streaming.base.dataset
import torch
from streaming import Stream, StreamingDataLoader, StreamingDataset
from streaming.base.format import Reader
from streaming.base.world import World
from torch import distributed

from stackexp.data.documents import compute_document_ids, find_document_bounds
from stackexp.data.hash_log import hash_sequence
from stackexp.data.shards import DamagedFileError, verify_file
from stackexp.datamodules import node_storage
from stackexp.datamodules.node_storage import SourceError, explain_failure
from stackexp.errors import first_line

LOOK_AHEAD_BATCHES = 8  # the library's default for `predownload`
WORKER_EXIT_SECONDS = 5  # for a stopped worker to exit; for a killed one, from its first closed socket to its exit
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class TokenSource(Stream):
    """One prepared set with `sequences` samples per epoch. With a `remote`, `folder` is its cache."""

    def __init__(
        self, folder: str | Path, sequences: int, remote: str | None = None, timeout: float = 60, attempts: int = 1
    ):
        super().__init__(
            local=str(folder), remote=remote, choose=sequences, download_timeout=timeout, download_retry=attempts
        )

    def get_shards(self, world: World, allow_unsafe_types: bool) -> list[Reader]:
        """Return the shards of index.json; those of a local set are never evicted."""
        shards = super().get_shards(world, allow_unsafe_types)
        for shard in shards if self.remote is None else ():
            shard.evict = _keep_files  # type: ignore[method-assign]
        return shards

    def set_up_local(self, shards: list[Reader], cache_usage_per_shard: np.ndarray) -> None:
        """Delete all files of the cache except intact shards of this set and the metadata.

        Shards of a local set take no space in the cache; `prepare_shard` verifies each before its first use.
        """
        if self.remote is None:
            return
        hashes = {find_path(shard): _get_hash(shard) for shard in shards}
        kept = {Path(self.local, name) for name in (*node_storage.METADATA_FILES, node_storage.LOCK_FILE)}
        for path in [path for path in Path(self.local).rglob("*") if path.is_file() and path not in kept]:
            try:
                verify_file(path, hashes[path])
            except (KeyError, DamagedFileError):
                path.unlink()
        super().set_up_local(shards, cache_usage_per_shard)

    def prepare_shard(self, shard: Reader) -> int:
        """Download and verify a shard. Return the bytes that it adds to the cache. Raises SourceError."""
        path, added = find_path(shard), 0
        url = f"{self.remote}/{path.relative_to(self.local)}"
        try:
            if self.remote is not None:
                added = super().prepare_shard(shard)
            verify_file(path, _get_hash(shard))
            return added
        except DamagedFileError as error:
            if self.remote is None:
                raise SourceError(str(error)) from None
            path.unlink()
            reason = "the SHA-256 of the downloaded file differs from index.json; copy the set there again"
            raise SourceError(f"{url}: {reason}") from None
        except Exception as error:  # each service raises its own
            if self.remote is None:
                reason = "deleted since the run began" if isinstance(error, FileNotFoundError) else first_line(error)
                raise SourceError(f"{path}: {reason}; put it back, then resume the run") from None
            raise explain_failure(url, error) from None


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
            cache_limit: Bytes that the shards of all caches on this node may use together; None: no limit.
            num_loaders: Processes per node that download shards at the same time.
            options: Options of StreamingDataset.

        Raises:
            SourceError: If the limit is too low. Reading samples raises it if a shard cannot be read.
        """
        self._failure: BaseException | None = None
        self._prepared: set[int] = set()  # shards that this process has verified
        prefix, is_first = _draw_prefix(), World.detect().is_local_leader
        if is_first:
            node_storage.remove_stale_storage()
        node_storage.lock_prefix(f"{prefix:06}")
        if is_first:  # registered first, so called after the library's functions
            atexit.register(node_storage.remove_prefix, f"{prefix:06}")
        with _use_prefix(prefix):
            super().__init__(streams=sources, **options)
        self._executor = _DaemonExecutor()  # type: ignore[assignment]
        if cache_limit is not None:
            self._limit_cache(cache_limit, num_loaders)
            while is_first and self.cache_limit and self.cache_usage > self.cache_limit:
                self.evict_coldest_shard()

    def _limit_cache(self, limit: int, num_loaders: int) -> None:
        """Limit the look-ahead to the samples that fit the cache even if each is in a different shard.

        A loader reads one shard, and downloads up to two more, which the library does not count until they are there.
        """
        remote = [self.streams[source].remote is not None for source in self.stream_per_shard]
        sizes = [shard.get_raw_size() for shard, is_remote in zip(self.shards, remote, strict=True) if is_remote]
        index, batch = sum(stream.get_index_size() for stream in self.streams), self.batch_size
        if not sizes or index + sum(sizes) <= limit:
            return
        assert batch is not None
        largest = max(sizes)
        look_ahead = (limit - index) // (num_loaders * largest) - 4
        if look_ahead < batch:
            minimum = index + num_loaders * largest * (batch + 4)
            raise SourceError(
                f"data.cache_limit: {limit:,} bytes are too few for {num_loaders} loader processes per node and shards "
                f"of {largest:,} bytes; set data.cache_limit={min(minimum, index + sum(sizes))}b or more"
            )
        self.predownload = min(look_ahead, LOOK_AHEAD_BATCHES * batch)
        self.cache_limit = limit - 2 * num_loaders * largest

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Download a shard unless it is present. Raises SourceError.

        The library locks the cache for each sample. Without a limit a shard is never evicted, so once is enough.
        """
        if blocking or self.cache_limit is not None or shard_id not in self._prepared:
            super().prepare_shard(shard_id, blocking)
            self._prepared.add(shard_id)

    def get_item(self, sample_id: int, retry: int = 7) -> dict[str, Any]:
        """Return a sample by its number. Raises SourceError."""
        shard_id = int(self.spanner[sample_id][0])
        try:
            tokens = super().get_item(sample_id, retry)["tokens"]
        except SourceError:
            raise
        except RuntimeError as error:  # the look-ahead failed, or the shard was evicted repeatedly before its use
            raise self._failure or SourceError(f"data.cache_limit: too low ({first_line(error)}); raise it") from None
        except (OSError, IndexError, ValueError) as error:
            hint = "prepare or copy it again, then resume the run"
            path = find_path(self.shards[shard_id])
            raise SourceError(f"{path}: damaged ({first_line(error)}); {hint}") from None
        return {
            "tokens": tokens,
            "index": int(sample_id),
            "source": int(self.stream_per_shard[shard_id]),
            "hash": hash_sequence(tokens),
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield this worker's samples of an epoch. Raises SourceError."""
        try:
            if not self._failure:
                yield from super().__iter__()
        finally:  # also after an error and when the epoch is abandoned
            if hasattr(self, "_iterator"):
                self._iterator.non_blocking_exit()
        if self._failure:  # the library would end the epoch without an error
            raise self._failure

    def on_exception(self, future: Future) -> None:
        """Store the error of a look-ahead thread; the library only logs it."""
        if error := future.exception():
            self._failure = self._failure or error
            self._iterator.on_exit()  # the thread did not; without this, the epoch waits for it forever at its end
        with contextlib.suppress(Exception):
            super().on_exception(future)


def find_path(shard: Reader) -> Path:
    """Return the path of a shard on this node."""
    return Path(shard.dirname, shard.file_pairs[0][0].basename)


def _get_hash(shard: Reader) -> str:
    return shard.file_pairs[0][0].hashes["sha256"]


def _keep_files() -> int:
    """Replace `Reader.evict` of a local set: no bytes become free."""
    return 0


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


def _draw_prefix() -> int:
    """Return a random number that names shared memory and lock files of a dataset, the same on all ranks of a node."""
    drawn = [secrets.randbelow(10**9)]
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(drawn)
    return drawn[0] + World.detect().node  # in tests, two nodes may be one machine


@contextlib.contextmanager
def _use_prefix(prefix: int) -> Iterator[None]:
    original = streaming.base.dataset.get_shm_prefix
    streaming.base.dataset.get_shm_prefix = lambda *_: (prefix, None)  # type: ignore[assignment]
    try:
        yield
    finally:
        streaming.base.dataset.get_shm_prefix = original


def set_world(rank: int, world_size: int, ranks_per_node: int) -> None:
    """Set the environment variables from which the library reads its rank, at construction and when it saves.

    LOCAL_RANK is not set, because Lightning would then assume that another program launches the processes.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(ranks_per_node))


# The loader


class TokenLoader(StreamingDataLoader):
    """A StreamingDataLoader whose workers ignore SIGTERM and exit with the loader or with the run.

    torch requests its workers to exit through queues. That does not reach a worker that is in a download, or whose
    queue was garbage-collected first, and Python would wait for such a worker forever at exit.

    It draws random numbers from a generator of its own: an iterator draws a seed when it is created, which in a resumed
    run is after the random state of the checkpoint is restored.
    """

    def __init__(self, dataset: StreamingDataset, **options: Any):
        stop_receiver, stop_sender = multiprocessing.Pipe(duplex=False)
        self._workers: list[BaseProcess] = []
        # Called by the process that made the loader, before it is collected or before Python waits for the workers.
        arguments = (stop_sender, self._workers)
        self._stop_workers = multiprocessing.util.Finalize(self, _stop_workers, arguments, exitpriority=0)
        options |= {"worker_init_fn": partial(_set_up_worker, stop_receiver), "generator": torch.Generator()}
        super().__init__(dataset, **options)

    def _get_iterator(self) -> Any:
        iterator = super()._get_iterator()
        self._workers += getattr(iterator, "_workers", [])
        return iterator

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches."""
        try:
            yield from super().__iter__()
        except (ConnectionError, EOFError):
            # A killed worker closes its sockets first. Once it has exited, torch raises an error that names it.
            time.sleep(WORKER_EXIT_SECONDS)
            raise

    def __del__(self) -> None:
        self._stop_workers()
        super().__del__()


def _stop_workers(stop_sender: Connection, workers: list[BaseProcess]) -> None:
    """Request the workers to exit, and kill those that do not, such as one that was stopped with SIGSTOP."""
    stop_sender.send_bytes(b"")
    deadline = time.monotonic() + WORKER_EXIT_SECONDS
    for worker in workers:
        worker.join(max(0, deadline - time.monotonic()))
        with contextlib.suppress(RuntimeError):  # torch's handler of SIGCHLD reports a killed worker
            worker.kill()
            worker.join()


def _set_up_worker(stop_receiver: Connection, worker_id: int) -> None:
    """Ignore signals that are meant for the run (Slurm's SIGTERM, Ctrl-C), and exit with the loader or the run."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _ignore_lost_connection
    if sys.platform == "linux":  # the kernel kills the worker when the run ends, even a stopped one
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    run = multiprocessing.parent_process()
    assert run is not None
    Thread(target=_exit_when_ready, args=([stop_receiver, run.sentinel],), daemon=True).start()


def _ignore_lost_connection(kind: type[BaseException], *failure: Any) -> None:
    """Suppress the traceback of a worker whose run was killed while it fetched a batch; the worker exits next."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, *failure)


def _exit_when_ready(events: list[Any]) -> None:
    wait(events)  # the message is never received, so that every worker wakes up
    os._exit(0)


def collate(samples: list[dict[str, Any]], end_of_document: int | None = None) -> dict[str, torch.Tensor | np.ndarray]:
    """Return a batch: tokens int64 [B, T], index int64 [B], and as numpy arrays source int64 [B] and hash uint64 [B].

    With the id of the token that ends documents, also documents int64 [B, T], the document number of each token, and
    document_bounds int32 [n + 1]; see data/documents.py.
    """
    tokens = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))
    batch: dict[str, torch.Tensor | np.ndarray] = {
        "tokens": tokens,
        "index": torch.tensor([sample["index"] for sample in samples]),
        "source": np.array([sample["source"] for sample in samples]),
        "hash": np.array([sample["hash"] for sample in samples], np.uint64),
    }
    if end_of_document is not None:
        documents = compute_document_ids(tokens, end_of_document)
        batch |= {"documents": documents, "document_bounds": find_document_bounds(documents)}
    return batch
