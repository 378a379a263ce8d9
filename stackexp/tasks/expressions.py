"""Random arithmetic expressions mod 5 with brackets: sample, evaluate and write one batch at a time."""

from __future__ import annotations

from typing import NamedTuple

from stackexp.tasks.definition import np

MODULUS = 5
MIN_SPLIT = 5  # the shortest expression with an operator between two subexpressions: (d+d)


class Level(NamedTuple):
    """All subexpressions of a batch that lie inside the same number of brackets."""

    start: np.ndarray  # int64 [N], positions in the flattened batch
    length: np.ndarray  # int64 [N]
    operator_at: np.ndarray  # int64 [M], operator positions of the M subexpressions with an operator
    operator: np.ndarray  # int64 [M]: 0 +, 1 -, 2 *
    digit: np.ndarray  # int64 [N - M], digits of the other subexpressions


def draw_levels(rng: np.random.Generator, batch_size: int, length: int, *, num_operators: int) -> list[Level]:
    """Draw the expression trees of a batch from the outside in, with the first `num_operators` of + - *.

    An expression of up to 4 symbols is d, -d, (d) or (-d). One of n symbols is (left operator right), where the
    length of left is uniform in 1 .. n-4.
    """
    levels = []
    start, size = np.arange(batch_size) * length, np.full(batch_size, length)
    while start.size:
        is_split = size >= MIN_SPLIT
        outer, n = start[is_split], size[is_split]
        left = rng.integers(1, n - 3) if n.size else n
        operator, digit = rng.integers(0, num_operators, n.size), rng.integers(0, MODULUS, size.size - n.size)
        levels.append(Level(start, size, outer + 1 + left, operator, digit))
        start, size = np.concatenate([outer + 1, outer + left + 2]), np.concatenate([left, n - left - 3])
    return levels


def evaluate(levels: list[Level]) -> np.ndarray:
    """Return the values mod 5 [B], computed from the inside out without recursion."""
    values = np.empty(0, np.int64)  # values of the next inner level
    for level in reversed(levels):
        left, right = np.split(values, 2)
        is_split = level.length >= MIN_SPLIT
        leaf_length = level.length[~is_split]
        values = np.empty(is_split.size, np.int64)
        values[is_split] = np.choose(level.operator, [left + right, left - right, left * right])
        values[~is_split] = np.where(leaf_length % 2, level.digit, -level.digit)
        values %= MODULUS
    return values


def write(levels: list[Level], batch_size: int, length: int, alphabet: str) -> np.ndarray:
    """Return the expressions as symbol ids [B, L] of an alphabet that begins with the digits and operators."""
    start, size, operator_at, operator, digit = map(np.concatenate, zip(*levels, strict=True))
    strings = np.empty(batch_size * length, np.int64)
    strings[operator_at] = alphabet.index("+") + operator
    has_brackets = size >= 3
    strings[start[has_brackets]] = alphabet.index("(")
    strings[(start + size)[has_brackets] - 1] = alphabet.index(")")
    is_leaf = size < MIN_SPLIT
    digit_at = (start + size // 2)[is_leaf]
    strings[digit_at] = digit
    strings[digit_at[size[is_leaf] % 2 == 0] - 1] = alphabet.index("-")
    return strings.reshape(batch_size, length)
