"""What a task of formal languages is: strings of symbols in, strings of symbols out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stackexp.config.formal_language import TASKS as SIZES

Drawn = tuple[np.ndarray, np.ndarray] | tuple[np.ndarray, np.ndarray, np.ndarray]
Draw = Callable[[np.random.Generator, int, int], Drawn]


class Batch(NamedTuple):
    """Strings of one length L, the task's `string_length` of what was asked for, and their answers."""

    inputs: np.ndarray  # int64 [B, L]
    targets: np.ndarray  # int64 [B, O]
    mask: np.ndarray  # bool [B, O]: the answers that accuracy counts


def same(length: int) -> int:
    return length


def constant(length: int) -> None:
    """No number of slots that grows with the string."""
    return None


@dataclass(frozen=True)
class Task:
    """A generator of strings with exact answers, after Deletang et al. 2023.

    `draw(rng, batch_size, length)` gives inputs [B, L], targets [B, O] and, where an answer ends before its last
    position, the position of the symbol that ends it [B].
    """

    name: str
    draw: Draw
    symbols: tuple[str, ...]  # as they are written, by id
    answers: tuple[str, ...]
    string_length: Callable[[int], int] = same  # of the strings drawn when so much is asked for
    needs_slots: Callable[[int], int | None] = constant  # of a stack that keeps a string so long

    def __post_init__(self) -> None:
        assert (len(self.symbols), len(self.answers)) == SIZES[self.name][:2]

    @property
    def inputs(self) -> int:
        """How many symbols strings consist of; this is the id of the empty token."""
        return len(self.symbols)

    @property
    def outputs(self) -> int:
        return len(self.answers)

    @property
    def min_length(self) -> int:
        """Of the shortest string the task is defined for."""
        return SIZES[self.name].min_length

    def output_length(self, length: int) -> int:
        """Symbols of the answer to a string of so many."""
        return SIZES[self.name].output_length(length)

    def sample(self, rng: np.random.Generator, batch_size: int, length: int) -> Batch:
        """Draws a batch: the same state of `rng`, the same strings.

        Raises ValueError where `length` is below `min_length`.
        """
        if length < self.min_length:
            least = f"its strings have {self.min_length} or more"
            raise ValueError(f"task {self.name}: length {length} is too short, {least}")
        inputs, targets, *end = self.draw(rng, batch_size, length)
        mask = np.ones(targets.shape, bool)
        if end:
            mask = np.arange(targets.shape[1]) <= end[0][:, None]
        return Batch(inputs, targets, mask)

    def text(self, string: np.ndarray) -> str:
        """A string [L], written."""
        return written(string, self.symbols)

    def answer_text(self, answer: np.ndarray) -> str:
        """An answer [O], written."""
        return written(answer, self.answers)


def written(ids: np.ndarray, names: tuple[str, ...]) -> str:
    """Symbols one after another, with spaces between them where a name has several characters."""
    separator = " " if any(len(name) > 1 for name in names) else ""
    return separator.join(names[i] for i in ids)
