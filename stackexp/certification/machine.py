"""A trained network as a machine: it reads symbols and answers, batch by batch, from states that can be copied."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from stackexp.models.transformer import Cache

ROWS = 2048  # strings processed at once
CHUNK = 64  # tokens read at once: longer chunks compute a larger part of windowed attention in vain


@dataclass
class Machine:
    """A network with its caches as states. All rows of a cache have read the same number of tokens.

    With `grid`, the slots are rounded to multiples of 1 / grid after each token.
    """

    model: Any
    empty_token: int
    grid: int | None = None

    @torch.no_grad()
    def read(self, cache: Cache, tokens: np.ndarray) -> Cache:
        """Return the state after tokens [B, T]."""
        cache = copy_cache(cache)
        for part in torch.from_numpy(np.ascontiguousarray(tokens)).split(1 if self.grid else CHUNK, 1):
            self.model(part, cache, return_hidden=True)
            if self.grid:
                for layer, state in cache.states.items():
                    cache.states[layer] = state._replace(slots=(state.slots * self.grid).round() / self.grid)
        return cache

    @torch.no_grad()
    def answer(self, cache: Cache, rows: int, count: int = 1) -> Tensor:
        """Return the logits [B, count, A] of the next `count` empty tokens."""
        cache, tokens = copy_cache(cache), torch.full((rows, count), self.empty_token)
        return torch.cat([self.model(part, cache).logits for part in tokens.split(CHUNK, 1)], 1)


def copy_cache(cache: Cache) -> Cache:
    """Return a copy that `forward` may advance. Tensors are shared, because none is changed in place."""
    assert cache.max_length is None
    return Cache(cache.length, dict(cache.keys_values), dict(cache.states))


def select_rows(cache: Cache, rows: Any) -> Cache:
    """Return the state of some rows, an index into the batch."""
    chosen = tree_map(lambda x: x[rows], (cache.keys_values, cache.states))
    return Cache(cache.length, *chosen)


def hash_rows(cache: Cache) -> list[bytes]:
    """Return the bits of each row that determine all later outputs: keys, values and slots.

    Without a global read, the occupancy of the slots influences nothing.
    """
    tensors = tree_flatten([cache.keys_values, [state.slots for state in cache.states.values()]])[0]
    rows = torch.cat([x.flatten(1) for x in tensors], 1) + 0.0  # -0.0 and 0.0 are one state
    return [row.tobytes() for row in rows.numpy()]


def list_prefixes(may_follow: np.ndarray, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (prefixes [B, L], numbers of the prefixes without their last symbol [B]) for L = 0 .. `length`.

    The prefixes are in lexicographic order. `may_follow` is that of `StackTask`.
    """
    levels = [(np.zeros((1, 0), np.int64), np.zeros(1, np.int64))]
    for n in range(length):
        strings = levels[-1][0]
        parents, symbols = np.nonzero(may_follow[strings[:, -1] if n else [-1]])
        levels.append((np.column_stack([strings[parents], symbols]), parents))
    return levels


def walk_prefixes(
    machine: Machine, levels: list[tuple[np.ndarray, np.ndarray]]
) -> Iterator[tuple[int, np.ndarray, Cache]]:
    """Yield (L, numbers [B] of prefixes, state) until all prefixes of L = 1, 2, ... symbols were read."""
    waiting = [(0, np.zeros(1, np.int64), Cache())]
    while waiting:  # depth first, so that few states are held
        length, numbers, cache = waiting.pop()
        if length:
            yield length, numbers, cache
        if length + 1 == len(levels):
            continue
        strings, parents = levels[length + 1]
        children = np.flatnonzero(np.isin(parents, numbers))
        for start in range(0, len(children), ROWS):
            part = children[start : start + ROWS]
            before = select_rows(cache, np.searchsorted(numbers, parents[part]))
            waiting.append((length + 1, part, machine.read(before, strings[part, -1:])))


def measure_gaps(logits: Tensor) -> np.ndarray:
    """Return the largest minus the second largest of logits [..., A]: [...]."""
    largest = logits.topk(2, -1).values
    return (largest[..., 0] - largest[..., 1]).numpy()
