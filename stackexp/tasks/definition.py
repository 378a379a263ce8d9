"""The definition of a formal-language task, and the decorator that registers one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # composing a config must not import numpy
    import numpy as np

    Drawn = tuple[np.ndarray, np.ndarray] | tuple[np.ndarray, np.ndarray, np.ndarray]
    Generator = Callable[[np.random.Generator, int, int], Drawn]

ChomskyClass = Literal["regular", "deterministic context-free", "context-sensitive"]


class TaskBatch(NamedTuple):
    """Strings of one length L with their answers of length O."""

    inputs: np.ndarray  # int64 [B, L]
    targets: np.ndarray  # int64 [B, O]
    mask: np.ndarray  # bool [B, O], True where accuracy counts the answer symbol


@dataclass(frozen=True)
class Task:
    """A generator of random strings with exact answers.

    A model reads the string followed by one empty token for each answer symbol. The empty token has id `num_symbols`.
    """

    name: str
    chomsky_class: ChomskyClass
    generate: Generator
    symbols: tuple[str, ...]  # the name of each input id
    answer_symbols: tuple[str, ...]  # the name of each output id
    output_length: Callable[[int], int]  # from string length to answer length
    min_length: int
    required_slots: Callable[[int], int | None]  # stack slots that a string needs; None if they do not grow with it

    @property
    def num_symbols(self) -> int:
        """The number of input symbols, which is also the id of the empty token."""
        return len(self.symbols)

    @property
    def num_answer_symbols(self) -> int:
        """The number of output symbols."""
        return len(self.answer_symbols)

    def sample(self, rng: np.random.Generator, batch_size: int, length: int) -> TaskBatch:
        """Draw a batch. The generator state alone determines the strings.

        Raises ValueError if `length` is below `min_length`.
        """
        import numpy as np

        if length < self.min_length:
            raise ValueError(f"task {self.name}: length {length} is too short; use at least {self.min_length}")
        inputs, targets, *end = self.generate(rng, batch_size, length)
        mask = np.ones(targets.shape, bool)
        if end:
            mask = np.arange(targets.shape[1]) <= end[0][:, None]
        return TaskBatch(inputs, targets, mask)


TASKS: dict[str, Task] = {}
"""All tasks by name: from regular to context-sensitive, and in the order of the StackTrans paper within a class."""


def task(
    chomsky_class: ChomskyClass,
    *,
    symbols: Sequence[str],
    answer_symbols: Sequence[str],
    output_length: Callable[[int], int] = lambda length: 1,
    min_length: int = 1,
    required_slots: Callable[[int], int | None] = lambda length: None,
) -> Callable[[Generator], Generator]:
    """Register the decorated generator as the task of its name.

    The generator takes a numpy random generator, the batch size and the length. It returns strings [B, L], answers
    [B, O] and, for answers of variable length, the position of each answer's last symbol [B].
    """

    def register(generate: Generator) -> Generator:
        name = generate.__name__
        TASKS[name] = Task(
            name,
            chomsky_class,
            generate,
            tuple(symbols),
            tuple(answer_symbols),
            output_length=output_length,
            min_length=min_length,
            required_slots=required_slots,
        )
        return generate

    return register
