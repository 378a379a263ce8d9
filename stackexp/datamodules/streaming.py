"""mosaicml-streaming as we use it: exact resume, downloads that are checked, nothing shared with other runs here.

The library decides the order of samples and looks ahead; which shards are here is decided here. Its own cache counts a
shard only once it is downloaded, evicts shards of sources that are no cache, waits without end for one that another
process has evicted or could not download, and ends an epoch early where a download fails.
"""

import atexit
import os
import secrets
import signal
import tempfile
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.process import BaseProcess, parent_process
from pathlib import Path
from threading import Thread
from time import sleep, time_ns
from typing import Any

import numpy as np
import streaming.base.dataset
import torch
from filelock import FileLock
from streaming import Stream, StreamingDataLoader, StreamingDataset
from streaming.base.constant import LOCALS, TICK
from streaming.base.format import Reader
from streaming.base.shared import SharedArray, SharedMemory
from streaming.base.world import World
from torch import distributed

from stackexp.data.documents import compute_document_ids, find_document_bounds
from stackexp.data.hash_log import hash_sequence
from stackexp.datamodules.remote import Remote, SourceError
from stackexp.errors import first_line

ABSENT, COMING, HERE = range(3)  # states of a shard


class Source(Stream):
    """One set in a TokenStream: `sequences` of it in each epoch. With a `remote`, `folder` is the cache of it."""

    def __init__(self, folder: str | Path, sequences: int, remote: Remote | None = None):
        super().__init__(local=str(folder), choose=sequences)
        self._copy_of = remote

    @property
    def is_cache(self) -> bool:
        return self._copy_of is not None

    def set_up_local(self, shards: list[Reader], cache_usage_per_shard: np.ndarray) -> None:
        """Have the library take every shard for present: `TokenStream.prepare_shard` knows which are."""
        cache_usage_per_shard[:] = [shard.get_raw_size() for shard in shards]

    def fetch(self, shard: Reader, patient: bool) -> None:
        """Download a shard. Raises SourceError or OSError, if `patient` after as many attempts as the config allows."""
        path = Path(self.local, shard.raw_data.basename)
        if self._copy_of is None:
            raise SourceError(f"{path}: has gone since the run began; put it back, then go on with --ckpt_path last")
        self._copy_of.fetch(shard.raw_data.basename, path, shard.raw_data.hashes["sha256"], patient)


class TokenStream(StreamingDataset):
    """One prepared set, or a mixture of several. Samples are

    {"tokens": uint16 or uint32 [T], "index": its number among all sequences, "source": whose, "hash": 64 bits of it}

    `cache_limit`: bytes that all caches on this node may have together, whatever its `processes` (loaders) download at
    once; None: no limit. Raises SourceError if that is too little, or where a shard cannot be had.
    """

    def __init__(self, sources: list[Source], cache_limit: int | None = None, processes: int = 1, **options: Any):
        super().__init__(streams=sources, **options)
        self._executor = _Threads()
        self._epoch: Any = None  # the library's position in the epoch under way
        self._limit = cache_limit
        self._is_cached = np.array([source.is_cache for source in sources])[self.stream_per_shard]
        self._states = SharedArray(self.num_shards, np.uint8, f"{self._shm_prefix_int:06}_stackexp_states")
        self._used = SharedArray(1, np.int64, f"{self._shm_prefix_int:06}_stackexp_used")
        if self._unique_rank_world.is_local_leader:
            self._states[:] = [HERE if os.path.isfile(_path(shard)) else ABSENT for shard in self.shards]
            self._used[0] = sum(_size_of_files(source.local) for source in sources if source.is_cache)
            self._check_limit(processes)
            self._make_room(0)

    def _check_limit(self, processes: int) -> None:
        """Each process may fetch one shard to read and one ahead: with less room they wait for one another."""
        sizes = [shard.get_raw_size() for shard, cached in zip(self.shards, self._is_cached, strict=True) if cached]
        if self._limit is None or not sizes:
            return
        shards = self._states.numpy()[self._is_cached] == HERE
        description = int(self._used[0]) - int(np.array(sizes)[shards].sum())
        number = min(2 + 2 * processes, len(sizes))
        least = description + number * max(sizes)
        if self._limit < least:
            raise SourceError(
                f"data.cache_limit: {self._limit:,} bytes are too few for {processes} loader process(es) on a node and "
                f"shards of {max(sizes):,} bytes; set data.cache_limit={least}b or more"
            )

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            tokens = super().__getitem__(index)["tokens"]
        except SourceError:
            raise
        except OSError as error:
            raise SourceError(_line(error)) from None
        except RuntimeError as error:  # the library's: a shard was evicted, or removed, so often before it was read
            too_small = "data.cache_limit: too small for so many loader processes; raise it"
            raise SourceError(too_small if self._limit else first_line(error)) from None
        except (IndexError, ValueError) as error:  # its bytes are not what its index says
            shard = self.shards[self.spanner[index][0]]
            remedy = "prepare it again, or copy it again, then go on with --ckpt_path last"
            raise SourceError(f"{_path(shard)}: damaged ({first_line(error)}); {remedy}") from None
        return {
            "tokens": tokens,
            "index": int(index),
            "source": int(np.searchsorted(self.sample_offset_per_stream, index, side="right")) - 1,
            "hash": hash_sequence(tokens),
        }

    def _each_sample_id(self, it: Any) -> Iterator[int]:
        """Also when an epoch is left by an error, or given up, the threads that look ahead for it end."""
        self._epoch = it
        try:
            yield from super()._each_sample_id(it)
        finally:
            it.non_blocking_exit()

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Have a shard here: fetch it, or wait for the process that does. Raises SourceError or OSError.

        Without `blocking`, which is to look ahead: try once, and leave it to the one who needs it where that fails, and
        not at all what is read already, since shards to come would be evicted for it.
        """
        if self._is_here(shard_id) or (not blocking and self._lags()):
            return
        with self._locked():
            ours = self._states[shard_id] != COMING and not self._is_here(shard_id)
            if ours:
                if self._states[shard_id] == HERE:  # somebody else has removed the file
                    self._count(shard_id, -1)
                self._states[shard_id] = COMING
        if ours:
            try:
                self._fetch(shard_id, patient=blocking)
            except Exception:
                if blocking:
                    raise
        while blocking and self._states[shard_id] == COMING:
            sleep(TICK)

    def _lags(self) -> bool:
        """Whether the thread that is to look ahead is behind what is read."""
        return self._epoch is not None and self._epoch.prepare_index < self._epoch.yield_index

    def _is_here(self, shard_id: int) -> bool:
        return self._states[shard_id] == HERE and os.path.isfile(_path(self.shards[shard_id]))

    def _fetch(self, shard_id: int, patient: bool) -> None:
        shard, source = self.shards[shard_id], self.streams[self.stream_per_shard[shard_id]]
        state = ABSENT
        try:
            self._make_room(shard.get_raw_size() if source.is_cache else 0)
            try:
                source.fetch(shard, patient)
                self._shard_access_times[shard_id] = time_ns()  # not the first to be evicted, before it is read
                state = HERE
            finally:
                with self._locked():
                    if state == ABSENT:
                        self._count(shard_id, -1)
        finally:
            self._states[shard_id] = state

    def _make_room(self, size: int) -> None:
        """Count `size` bytes as used once there is room for them: evict what was not used for longest, or wait."""
        while True:
            with self._locked():
                while self._lacks(size) and (candidates := self._evictable()).size:
                    self._evict(candidates[np.argmin(self._shard_access_times.numpy()[candidates])])
                if not self._lacks(size):
                    self._used[0] += size
                    return
            sleep(TICK)  # all that is cached is being fetched

    def _lacks(self, size: int) -> bool:
        return self._limit is not None and self._used[0] + size > self._limit

    def _evictable(self) -> np.ndarray:
        return np.flatnonzero(self._is_cached & (self._states.numpy() == HERE))

    def _evict(self, shard_id: int) -> None:
        self._states[shard_id] = ABSENT
        self.shards[shard_id].evict()
        self._count(shard_id, -1)

    def _count(self, shard_id: int, sign: int) -> None:
        if self._is_cached[shard_id]:
            self._used[0] += sign * self.shards[shard_id].get_raw_size()

    def _locked(self) -> FileLock:
        """The lock of states and bytes, held by one thread of the node at a time."""
        return FileLock(self._cache_filelock_path)


class _Threads:
    """The executor that looks ahead: at exit nobody waits for its threads, which may be in a long download."""

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


class Loader(StreamingDataLoader):
    """The library's loader, whose processes leave SIGTERM to the run, and end when it is collected, or with the run."""

    def __init__(self, *arguments: Any, **options: Any):
        self._processes: list[BaseProcess] = []
        super().__init__(*arguments, worker_init_fn=_serve_the_run, **options)

    def _get_iterator(self) -> Any:
        iterator = super()._get_iterator()
        if processes := getattr(iterator, "_workers", []):
            self._processes = processes
            _keep(iterator)
        return iterator

    def __del__(self) -> None:
        super().__del__()  # asks them, waits 5 s, ends them by SIGTERM, which they ignore
        _kill(self._processes)


def _serve_the_run(_: int) -> None:
    """In a loader's process: end with the run, and leave to the run what signals every process: SIGTERM, by which Slurm
    may warn, and Ctrl-C.

    torch looks whether the parent is there. A fork server, by which Python 3.14 starts processes, stays when the run
    has been killed.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with, args=(parent_process(),), daemon=True).start()


def _end_with(run: Any) -> None:
    run.join()
    os._exit(1)


_kept: list[tuple[weakref.ref, list[BaseProcess], list]] = []


def _keep(iterator: Any) -> None:
    """Hold the queues of an iterator as long as its processes live.

    Were they collected together with it they would be closed first, and the processes never told to end.
    """
    _kept[:] = [kept for kept in _kept if any(process.is_alive() for process in kept[1])]
    _kept.append((weakref.ref(iterator), iterator._workers, iterator._index_queues))


def _end_processes() -> None:
    """At exit: Python would end a loader's processes by SIGTERM, which they ignore, and wait for them without end."""
    for iterator, processes, _ in _kept:
        if iterator() is not None:
            iterator()._shutdown_workers()  # asks them, and waits 5 s
        _kill(processes)


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()


atexit.register(_end_processes)
os.register_at_fork(after_in_child=_kept.clear)


def _path(shard: Reader) -> str:
    return os.path.join(shard.dirname, shard.split, shard.raw_data.basename)


def _size_of_files(folder: str) -> int:
    """Bytes in all files of a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def collate(samples: list[dict[str, Any]], end_of_document: int | None = None) -> dict[str, torch.Tensor | np.ndarray]:
    """A batch: tokens int64 [B, T], index int64 [B]; source int64 [B] and hash uint64 [B] in numpy: they stay here.

    Where the id that ends documents is given, also documents int64 [B, T], each token's document, and their
    document_bounds int32 [n + 1] (see data/documents).
    """
    tokens = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))
    documents = {}
    if end_of_document is not None:
        numbers = compute_document_ids(tokens, end_of_document)
        documents = {"documents": numbers, "document_bounds": find_document_bounds(numbers)}
    return {
        "tokens": tokens,
        "index": torch.tensor([sample["index"] for sample in samples]),
        "source": np.array([sample["source"] for sample in samples]),
        "hash": np.array([sample["hash"] for sample in samples], np.uint64),
    } | documents


def set_world(rank: int, world_size: int, ranks_per_node: int) -> None:
    """Tell streaming where it runs: it reads nothing but the environment, when built and again when it is saved.

    LOCAL_RANK stays as it is: Lightning takes it for a sign that somebody else launches the processes.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(ranks_per_node))


def _line(error: OSError) -> str:
    """What the command line says of an OSError: it does not come through a loader's process whole."""
    where = error.filename or "the cache"
    return f"{where}: {error.strerror or error}; free space, or name another cache with data.path or STACKEXP_CACHE"


def _private_prefix(locals_: list[str], remotes: list, world: World, retry: int = 0) -> tuple[int, SharedMemory]:
    """The number in the names of a dataset's shared memory and lock files: drawn by rank 0 for this dataset alone.

    The library counts up from 0 to the first number that looks free, so two runs that start together take the
    same one (one crashes), and what a killed run left behind may be taken for our own.
    """
    drawn = [secrets.randbelow(10**9)]
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(drawn)
    prefix = drawn[0] + world.node  # two nodes may be one machine
    name = streaming.base.dataset._get_path(prefix, LOCALS)
    if world.is_local_leader:
        record = "\0".join([*locals_, str(prefix)]).encode()
        memory = SharedMemory(name, True, 4 + len(record))
        memory.buf[: 4 + len(record)] = (4 + len(record)).to_bytes(4, "little") + record
        atexit.register(_remove_locks, prefix)
    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
    return prefix, memory if world.is_local_leader else SharedMemory(name, False)


def _remove_locks(prefix: int) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix:06}_*_filelock"):
        path.unlink(missing_ok=True)


assert callable(streaming.base.dataset.get_shm_prefix)
streaming.base.dataset.get_shm_prefix = _private_prefix
