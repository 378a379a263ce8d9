"""Named sets of tokens to validate and test on: map-style, every sequence once, whatever the batch or the ranks."""

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from stackexp.data.shards import TokenSet

PADDING = -1  # the index of a row that fills up a batch and must not count


class Sequences(Dataset):
    """A prepared set as a map-style dataset: {"tokens": int64 [T], "index": int}; index -1 gives a padding row."""

    def __init__(self, tokens: TokenSet):
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor | int]:
        row = self.tokens[0 if index == PADDING else index]
        return {"tokens": torch.from_numpy(row.astype("int64")), "index": index}


class RankBatches(Sampler[list[int]]):
    """Batches of one rank over sequences 0..length-1, in turns; every rank gets as many, of the same size.

    Over all ranks each sequence comes once; what is missing at the end is filled with PADDING.
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
    tokens: TokenSet, batch_size: int, limit: int | None = None, rank: int = 0, world_size: int = 1
) -> DataLoader:
    """A loader of this rank's share of the set's first `limit` sequences (None: all)."""
    length = len(tokens) if limit is None else min(limit, len(tokens))
    return DataLoader(Sequences(tokens), batch_sampler=RankBatches(length, batch_size, rank, world_size))
