"""Strings rearranged: reversed, copied, sorted, changed by the instructions in them."""

import numpy as np

from stackexp.tasks.task import Drawn, Task, same

HOLE, PAD = 2, 3  # of missing_duplicate
POP, PUSH = 2, 3  # of stack_manipulation: PUSH 0 is 3, PUSH 1 is 4
END = 2  # of stack_manipulation's answers


def reverse_string(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    strings = rng.integers(0, 2, (batch_size, length))
    return strings, strings[:, ::-1].copy()


def odds_first(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Every second symbol from the second on, then the others."""
    strings = rng.integers(0, 2, (batch_size, length))
    return strings, np.concatenate([strings[:, 1::2], strings[:, ::2]], 1)


def duplicate_string(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    strings = rng.integers(0, 2, (batch_size, length))
    return strings, np.concatenate([strings, strings], 1)


def missing_duplicate(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """The symbol missing in a string that stands twice; a pad follows where the length is odd."""
    half = rng.integers(0, 2, (batch_size, length // 2))
    strings = np.concatenate([half, half, np.full((batch_size, length % 2), PAD)], 1)
    hole = rng.integers(0, length // 2 * 2, (batch_size, 1))
    missing = np.take_along_axis(strings, hole, 1)
    np.put_along_axis(strings, hole, HOLE, 1)
    return strings, missing


def bucket_sort(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    strings = rng.integers(0, 5, (batch_size, length))
    return strings, np.sort(strings, 1)


def stack_manipulation(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """A stack from bottom to top, 1 .. L-1 symbols, then instructions; the stack that results from top to bottom, END.

    A POP of an empty stack does nothing. A string of one symbol is a stack without instructions.
    """
    stack_length = rng.integers(1, max(length, 2), (batch_size, 1))
    strings = rng.integers(0, 2, (batch_size, length))
    instructions = rng.integers(POP, PUSH + 2, (batch_size, length))
    strings = np.where(np.arange(length) < stack_length, strings, instructions)

    pop = strings == POP
    balance = np.cumsum(np.where(pop, -1, 1), 1)
    height = balance - np.minimum(np.minimum.accumulate(balance, 1), 0)  # [B, L]: of the stack after each symbol
    lowest = np.minimum.accumulate(height[:, ::-1], 1)[:, ::-1]  # ... from each symbol on
    row, position = np.nonzero(~pop & (height == lowest))  # what was pushed and is never popped
    final = height[:, -1]
    targets = np.zeros((batch_size, length + 1), np.int64)
    targets[row, (final[row] - height[row, position])] = strings[row, position] % PUSH
    targets[np.arange(batch_size), final] = END
    return strings, targets, final


BITS = tuple("01")
TASKS = [
    Task("reverse_string", reverse_string, BITS, BITS, needs_slots=same),
    Task("odds_first", odds_first, BITS, BITS, needs_slots=same),
    Task("duplicate_string", duplicate_string, BITS, BITS, needs_slots=same),
    Task("missing_duplicate", missing_duplicate, tuple("01_."), BITS),
    Task("bucket_sort", bucket_sort, tuple("01234"), tuple("01234")),
    Task(
        "stack_manipulation",
        stack_manipulation,
        ("0", "1", "POP", "PUSH0", "PUSH1"),
        tuple("01."),
        needs_slots=same,
    ),
]
