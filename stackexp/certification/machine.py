"""A trained network as a machine: it reads symbols and answers, batch by batch, from states that can be copied."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from stackexp.certification.automata import FORBIDDEN, Grammar
from stackexp.models.transformer import Cache

ROWS = 2048  # strings processed at once
CHUNK = 64  # tokens read at once: longer chunks compute a larger part of windowed attention in vain


@dataclass
class ReadState(Cache):
    """The state of a network after some symbols."""

    logits: tuple[Tensor, ...] = ()  # of the last symbol [B, 1, A], if every symbol has an answer


@dataclass
class NetworkMachine:
    """A network with its caches as states. All rows of a state have read the same number of tokens.

    With `grid`, the slots are rounded to multiples of 1 / grid after each token. With `batch_size`, tokens are read one
    by one in batches of exactly this many rows, the last one padded. Matrix products of other sizes round differently,
    so only then do equal states have equal successors, however many strings are read together. With
    `answers_every_token`, the answer is that of the last symbol instead of the following empty tokens.
    """

    model: Any
    empty_token: int
    grid: int | None = None
    batch_size: int | None = None
    answers_every_token: bool = False

    @torch.no_grad()
    def read(self, cache: ReadState, tokens: np.ndarray) -> ReadState:
        """Return the state after tokens [B, T]."""
        states, ids = [], torch.from_numpy(np.ascontiguousarray(tokens))
        for rows, state in self._split(cache, len(ids)):
            for part in ids[rows].split(1 if self.grid or self.batch_size else CHUNK, 1):
                output = self.model(part, state, return_hidden=not self.answers_every_token)
                if self.answers_every_token:
                    state.logits = (output.logits[:, -1:],)
                if self.grid:
                    for layer, stack in state.states.items():
                        state.states[layer] = stack._replace(slots=(stack.slots * self.grid).round() / self.grid)
            states.append(state)
        return states[0] if self.batch_size is None else select_rows(join_rows(states), slice(len(tokens)))

    @torch.no_grad()
    def answer(self, cache: ReadState, rows: int, count: int = 1) -> Tensor:
        """Return the logits [B, count, A] of the next `count` empty tokens, or [B, 1, A] of the last symbol."""
        if self.answers_every_token:
            return cache.logits[0][:rows]
        logits = []
        for part, state in self._split(cache, rows):
            tokens = torch.full((len(part), count), self.empty_token).split(1 if self.batch_size else CHUNK, 1)
            logits.append(torch.cat([self.model(token, state).logits for token in tokens], 1))
        return torch.cat(logits)[:rows]

    def _split(self, cache: ReadState, rows: int) -> Iterator[tuple[np.ndarray, ReadState]]:
        """Yield row numbers and a copy of their state, batch by batch. The last row fills the last batch."""
        if self.batch_size is None:
            yield np.arange(rows), select_rows(cache, slice(None))
            return
        for start in range(0, rows, self.batch_size):
            numbers = np.arange(start, start + self.batch_size).clip(max=rows - 1)
            yield numbers, select_rows(cache, numbers)


def select_rows(cache: ReadState, rows: Any) -> ReadState:
    """Return the state of some rows, an index into the batch."""
    return _build_state(cache.length, tree_map(lambda x: x[rows], _list_parts(cache)))


def join_rows(caches: Sequence[ReadState]) -> ReadState:
    """Return the state with the rows of all caches, whose tensors must have the same shapes except for the rows."""
    if len(caches) == 1:
        return caches[0]
    return _build_state(caches[0].length, tree_map(lambda *parts: torch.cat(parts), *map(_list_parts, caches)))


def _list_parts(cache: ReadState) -> tuple[Any, ...]:
    return cache.keys_values, cache.states, cache.logits


def _build_state(length: Any, parts: tuple[Any, ...]) -> ReadState:
    keys_values, states, logits = parts
    return ReadState(length, keys_values, states, logits=logits)


def list_shapes(cache: ReadState) -> list[torch.Size]:
    """Return the shape of each tensor of a state without its rows."""
    return [x.shape[1:] for x in tree_flatten(_list_parts(cache))[0]]


def hash_rows(cache: ReadState) -> list[bytes]:
    """Return the bits of each row that determine this answer and all later ones: keys, values, slots and logits.

    Without a global read and with the discipline `stack`, the occupancy of the slots influences nothing.
    """
    slots = [state.slots for state in cache.states.values()]
    tensors = tree_flatten([cache.keys_values, slots, cache.logits])[0]
    rows = torch.cat([x.flatten(1) for x in tensors], 1) + 0.0  # -0.0 and 0.0 are one state
    return [row.tobytes() for row in rows.numpy()]


def list_prefixes(grammar: Grammar, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (prefixes [B, L], numbers of the prefixes without their last symbol [B]) for L = 0 .. `length`.

    The prefixes are in lexicographic order.
    """
    levels, states = [(np.zeros((1, 0), np.int64), np.zeros(1, np.int64))], np.zeros(1, np.int64)
    for _ in range(length):
        parents, symbols = np.nonzero(grammar.follow[states] != FORBIDDEN)
        levels.append((np.column_stack([levels[-1][0][parents], symbols]), parents))
        states = grammar.follow[states[parents], symbols]
    return levels


def walk_prefixes(
    machine: NetworkMachine, levels: list[tuple[np.ndarray, np.ndarray]]
) -> Iterator[tuple[int, np.ndarray, ReadState]]:
    """Yield (L, numbers [B] of prefixes, state) until all prefixes of L = 1, 2, ... symbols were read."""
    waiting = [(0, np.zeros(1, np.int64), ReadState())]
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
