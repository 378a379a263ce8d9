"""mosaicml-streaming as we use it: local shards, exact resume, nothing shared with other runs on the machine."""

import atexit
import os
import secrets
import tempfile
from pathlib import Path

import streaming.base.dataset
import torch
from streaming import StreamingDataset
from streaming.base.constant import LOCALS
from streaming.base.shared import SharedMemory
from streaming.base.world import World
from torch import distributed


class TokenStream(StreamingDataset):
    """A prepared set as a StreamingDataset: samples are {"tokens": int64 [T], "index": its number in the set}."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor | int]:
        tokens = super().__getitem__(index)["tokens"]
        return {"tokens": torch.from_numpy(tokens.astype("int64")), "index": int(index)}


def set_world(rank: int, world_size: int, ranks_per_node: int) -> None:
    """Tell streaming where it runs: it reads nothing but the environment, when built and again when it is saved.

    LOCAL_RANK stays as it is: Lightning takes it for a sign that somebody else launches the processes.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(ranks_per_node))


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
