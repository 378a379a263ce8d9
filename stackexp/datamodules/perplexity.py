"""Loaders of token sets for perplexity: every chunk once, whatever the batch size and number of ranks."""

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from stackexp.data.token_files import Chunks
from stackexp.datamodules.base import PADDING, RankBatches


class ChunkDataset(Dataset):
    """Chunks as a map-style dataset: {"tokens": int64 [T], "index": int, "length": int}.

    A chunk of fewer than T tokens is followed by zeros. With a `limit`, only that many chunks, evenly spaced. Index
    PADDING gives a row of length 0.
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


def build_perplexity_loader(
    chunks: Chunks, batch_size: int, limit: int | None = None, rank: int = 0, world_size: int = 1
) -> DataLoader:
    """Return a loader of one rank's share of a set, or with a `limit` of that many of its chunks."""
    dataset = ChunkDataset(chunks, limit)
    return DataLoader(dataset, batch_sampler=RankBatches(len(dataset), batch_size, rank, world_size))
