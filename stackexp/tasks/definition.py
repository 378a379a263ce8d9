"""The definition of a formal-language task, and the decorator that registers one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from stackexp.errors import ConfigError
from stackexp.lazy import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy")  # composing a config must not import it

Drawn: TypeAlias = "tuple[np.ndarray, np.ndarray] | tuple[np.ndarray, np.ndarray, np.ndarray]"
Generator: TypeAlias = "Callable[[np.random.Generator, int, int], Drawn]"
NO_TARGET = -100  # target of a position without an answer: it counts neither in the loss nor in the accuracy


class TaskBatch(NamedTuple):
    """Strings of one length L with their answers of length O."""

    inputs: np.ndarray  # int64 [B, L]
    targets: np.ndarray  # int64 [B, O], NO_TARGET at positions without an answer
    mask: np.ndarray  # bool [B, O], True where accuracy counts the answer symbol


MAX_LOOP = 3
"""Most symbols of a repeated word, times `Task.loop_step`."""


@dataclass(frozen=True)
class Task:
    """A generator of random strings with exact answers.

    A model reads the string followed by one empty token for each answer symbol. The empty token has id `num_symbols`.
    If the task answers at every token, there are no empty tokens: the model outputs an answer after each symbol.
    """

    name: str
    family: str  # the heading of the task in reports: its Chomsky class, or its benchmark
    generate: Generator
    symbols: Sequence[str]  # the name of each input id
    answer_symbols: Sequence[str]  # the name of each output id
    output_length: Callable[[int], int]  # from string length to answer length
    answers_every_token: bool = False
    min_length: int = 1
    length_step: int = 1  # strings have length_start plus a multiple of this; other lengths are rounded down
    length_start: int | None = None  # None: min_length. Strings of min_length symbols exist in any case
    # Stack slots that a string needs; None if they do not grow with it
    required_slots: Callable[[int], int | None] = lambda length: None
    max_length: int = 40  # default of data.max_length, the longest training string
    validation_max_length: int = 60  # default of data.validation_max_length
    eval_max_length: int = 500  # default of data.eval_max_length
    rivals: Sequence[int] | None = None  # output ids that accuracy compares (see Transduction); None compares all
    # From a length and the longest training length to the lowest possible loss, in nats per answer symbol
    entropy: Callable[[int, int], float] | None = None
    # From strings [B, L] to answers, also of strings with loops; None: a string with a loop may be invalid
    solve: Callable[[np.ndarray], np.ndarray] | None = None
    loop_step: int = 1  # the length of a word that may be repeated in any string is a multiple of this

    @property
    def num_symbols(self) -> int:
        """The number of input symbols, which is also the id of the empty token."""
        return len(self.symbols)

    @property
    def vocab_size(self) -> int:
        """The number of input ids: the symbols, and the empty token if the task has one."""
        return self.num_symbols + (not self.answers_every_token)

    @property
    def num_answer_symbols(self) -> int:
        """The number of output symbols."""
        return len(self.answer_symbols)

    def count_tokens(self, length: int) -> int:
        """Return the tokens of a string of this length, including empty tokens."""
        length = self.fit(length)
        return self.output_length(length) + (0 if self.answers_every_token else length)

    def sample(self, rng: np.random.Generator, batch_size: int, length: int, loop_fraction: float = 0.0) -> TaskBatch:
        """Draw a batch. The generator state alone determines the strings.

        With `loop_fraction`, this share of the strings ends with a repeated word of one to three symbols, times
        `loop_step`; requires `solve`. Raises ConfigError if `length` is below `min_length`, or the generator breaks
        its contract.
        """
        if length < self.min_length:
            raise ConfigError(f"task {self.name}: length {length} is too short; use at least {self.min_length}")
        drawn = self.generate(rng, batch_size, self.fit(length))
        if not isinstance(drawn, tuple) or [type(array) for array in drawn] not in ([np.ndarray] * 2, [np.ndarray] * 3):
            raise ConfigError(f"task {self.name}: its generator must return a tuple of two or three NumPy arrays")
        inputs, targets, *counted = drawn
        if loop_fraction and self.solve:
            if counted:
                raise ConfigError(
                    f"task {self.name}: has a mask of its own, which data.loop_fraction would change; omit it"
                )
            inputs = _repeat_words(rng, inputs, loop_fraction, self.loop_step)
            targets = self.solve(inputs)
        self._check(inputs, targets, counted, batch_size, length)
        mask = targets != NO_TARGET
        if counted:
            mask &= counted[0] if counted[0].ndim == 2 else np.arange(targets.shape[1]) <= counted[0][:, None]
        if not mask.any():
            raise ConfigError(f"task {self.name}: at length {length} its mask counts no answer; raise its min_length")
        return TaskBatch(inputs, targets, mask)

    def fit(self, length: int) -> int:
        """Return the largest length up to this one that has strings."""
        start = self.min_length if self.length_start is None else self.length_start
        return max(fit_length(length, start, self.length_step), self.min_length)

    def find_unseen_length(self, longest: int) -> int:
        """Return the smallest length whose strings are longer than all strings of up to `longest` symbols."""
        return self.fit(longest) + self.length_step

    def _check(
        self, inputs: np.ndarray, targets: np.ndarray, counted: list[np.ndarray], batch_size: int, length: int
    ) -> None:
        """Raise ConfigError if an array has another shape, type or ids than the task declares."""
        where = f"task {self.name}: at length {length} its generator returned"
        answers = self.output_length(self.fit(length))
        for name, array, num_ids in (
            ("string", inputs, self.num_symbols),
            ("answer", targets, self.num_answer_symbols),
        ):
            if array.ndim != 2 or len(array) != batch_size or array.dtype != "int64":
                found = f"{name}s {list(array.shape)} of {array.dtype}"
                raise ConfigError(f"{where} {found}; return int64 [{batch_size}, length of the {name}]")
            ids = array if name == "string" else array[array != NO_TARGET]
            if len(unknown := ids[(ids < 0) | (ids >= num_ids)]):
                raise ConfigError(f"{where} the {name} id {unknown[0]}; return ids from 0 to {num_ids - 1}")
        for array in counted:
            is_mask = array.dtype == bool and array.shape == targets.shape
            is_position = array.dtype == "int64" and array.shape == (batch_size,)
            if not is_mask and not (is_position and ((array >= 0) & (array < answers)).all()):
                found = f"as third array {array.dtype} {list(array.shape)}"
                mask, position = (
                    f"a mask, bool {list(targets.shape)}",
                    f"positions below {answers}, int64 [{batch_size}]",
                )
                raise ConfigError(f"{where} {found}; return {mask}, or {position}")
        if targets.shape[1] != answers:
            raise ConfigError(f"{where} answers of {targets.shape[1]} symbols; output_length gives {answers}")
        if self.answers_every_token and inputs.shape != targets.shape:
            raise ConfigError(
                f"{where} {inputs.shape[1]} symbols and {answers} answers; return an answer for each symbol"
            )
        if not self.answers_every_token and inputs.shape[1] > length:
            raise ConfigError(f"{where} strings of {inputs.shape[1]} symbols; return at most {length}")
        if not (targets != NO_TARGET).any(1).all():
            raise ConfigError(f"{where} a string without an answer; each needs one that is not {NO_TARGET}")


def _repeat_words(rng: np.random.Generator, strings: np.ndarray, fraction: float, step: int) -> np.ndarray:
    """Make a share of the strings [B, L] repeat, from a random position on, the one to three times `step` symbols."""
    batch_size, length = strings.shape
    start = np.where(rng.random(batch_size) < fraction, rng.integers(0, length, batch_size), length)[:, None]
    period, position = step * rng.integers(1, MAX_LOOP + 1, (batch_size, 1)), np.arange(length)
    source = np.where(position < start, position, start + (position - start) % period)
    return np.take_along_axis(strings, np.minimum(source, length - 1), 1)


TASKS: dict[str, Task] = {}
"""All tasks by name: those of Deletang et al. first, from regular to context-sensitive, then the other families."""


def task(family: str, *, name: str | None = None, **options: Any) -> Callable[[Generator], Generator]:
    """Register the decorated generator as the task `name`, by default its own name. `options` are fields of `Task`.

    The generator takes a numpy random generator, the batch size and the length. It returns strings [B, L], answers
    [B, O] and optionally what accuracy counts: the position of each answer's last symbol [B], or a mask [B, O]. O is
    1 by default, and L if the task answers at every token.

    Raises ValueError if another function has registered a task of this name, or if a symbol is repeated.
    """

    def register(generate: Generator) -> Generator:
        key = name or generate.__name__
        known = TASKS.get(key)
        if known and _identify(known.generate) != _identify(generate):
            raise ValueError(f"task {key!r} is already registered by {_identify(known.generate)}; choose another name")
        for names in ("symbols", "answer_symbols"):
            if len(set(options[names])) < len(options[names]):
                raise ValueError(f"task {key!r}: {names} repeat a symbol; give each id a name of its own")
        answers_every_token = options.get("answers_every_token", False)
        options.setdefault("output_length", lambda length: length if answers_every_token else 1)
        TASKS[key] = Task(key, family, generate, **options)
        return generate

    return register


def _identify(generate: Generator) -> str:
    return f"{generate.__module__}.{generate.__qualname__}"


def fit_length(length: int, start: int, step: int) -> int:
    """Return the largest length up to this one that is `start` plus a multiple of `step`."""
    return length - (length - start) % step
