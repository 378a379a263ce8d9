"""Named sets of tokens to validate and test on: map-style, every chunk once, whatever the batch or the ranks."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from stackexp.data.token_files import Chunks

PADDING = -1  # the index of a row that fills up a batch and must not count


class ChunkRows(Dataset):
    """Chunks as a map-style dataset: {"tokens": int64 [T], "index": int, "length": its ids, the rest of the row is 0}.

    With a `limit`, so many of them, evenly spaced. Index -1 gives a padding row, of length 0.
    """

    def __init__(self, chunks: Chunks, limit: int | None = None):
        self.chunks = chunks
        self.length = len(chunks) if limit is None else min(limit, len(chunks))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor | int]:
        row = torch.zeros(self.chunks.context_length, dtype=torch.int64)
        chunk = self.chunks[index * len(self.chunks) // self.length] if index != PADDING else np.empty(0)
        row[: len(chunk)] = torch.from_numpy(chunk.astype("int64"))
        return {"tokens": row, "index": index, "length": len(chunk)}


class RankBatches(Sampler[list[int]]):
    """Batches of one rank over chunks 0..length-1, in turns; every rank gets as many, of the same size.

    Over all ranks each chunk comes once; what is missing at the end is filled with PADDING.
    """

    def __init__(self, length: int, batch_size: int, rank: int = 0, world_size: int = 1):
        self.length, self.batch_size, self.rank, self.world_size = length, batch_size, rank, world_size

    def __len__(self) -> int:
        return -(-self.length // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        for turn in range(len(self)):
            begin = (turn * self.world_size + self.rank) * self.batch_size
            yield [i if i < self.length else PADDING for i in range(begin, begin + self.batch_size)]


def perplexity_loader(
    chunks: Chunks, batch_size: int, limit: int | None = None, rank: int = 0, world_size: int = 1
) -> DataLoader:
    """A loader of this rank's share of `limit` chunks of the set (None: all)."""
    rows = ChunkRows(chunks, limit)
    return DataLoader(rows, batch_sampler=RankBatches(len(rows), batch_size, rank, world_size))
