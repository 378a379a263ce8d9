"""Arithmetic mod 5 with brackets: expressions to evaluate, equations to solve.

Brackets could nest L / 4 deep, but hardly ever do: of 10,000 strings of length 500, half nest 13 deep or less, none
more than 21.
"""

from typing import NamedTuple

import numpy as np

from stackexp.tasks.task import Drawn, Task

MODULUS = 5
BRACKETS = "01234+-*()x"  # no x occurs: the last symbol is of Deletang et al.'s alphabet, but not of their strings
EQUATION = "01234+-()x="
DEEPEST = 21


class Level(NamedTuple):
    """All subexpressions of a batch that stand within equally many others, each begun at `start` of the flat batch."""

    start: np.ndarray  # int64 [N]
    length: np.ndarray  # int64 [N]
    operator_at: np.ndarray  # int64 [M], of those that are two subexpressions with an operator between
    operator: np.ndarray  # int64 [M]: 0 +, 1 -, 2 *
    digit: np.ndarray  # int64 [N - M], of the others


def levels(rng: np.random.Generator, batch_size: int, length: int, operators: int) -> list[Level]:
    """Draws the trees of a batch of expressions of `length` symbols from the outside in, with so many of + - *.

    Of less than 5 symbols: d, -d, (d), (-d). Of n: (left operator right), left of 1 .. n-4 symbols, all equally likely.
    """
    found = []
    start, size = np.arange(batch_size) * length, np.full(batch_size, length)
    while start.size:
        split = size >= 5
        outer, n = start[split], size[split]
        left = rng.integers(1, n - 3) if n.size else n
        operator, digit = rng.integers(0, operators, n.size), rng.integers(0, MODULUS, size.size - n.size)
        found.append(Level(start, size, outer + 1 + left, operator, digit))
        start, size = np.concatenate([outer + 1, outer + left + 2]), np.concatenate([left, n - left - 3])
    return found


def evaluate(trees: list[Level]) -> np.ndarray:
    """The values mod 5 [B], from the inside out: no recursion, however deep the brackets."""
    values = np.empty(0, np.int64)  # of the level within
    for level in reversed(trees):
        left, right = np.split(values, 2)
        split = level.length >= 5
        leaf = level.length[~split]
        values = np.empty(split.size, np.int64)
        values[split] = np.choose(level.operator, [left + right, left - right, left * right])
        values[~split] = np.where(leaf % 2, level.digit, -level.digit)
        values %= MODULUS
    return values


def write(trees: list[Level], batch_size: int, length: int, symbols: str) -> np.ndarray:
    """The expressions as symbols [B, L]."""
    start, size, operator_at, operator, digit = map(np.concatenate, zip(*trees, strict=True))
    strings = np.empty(batch_size * length, np.int64)
    strings[operator_at] = symbols.index("+") + operator
    bracketed = size >= 3
    strings[start[bracketed]] = symbols.index("(")
    strings[(start + size)[bracketed] - 1] = symbols.index(")")
    leaf = size < 5
    digit_at = (start + size // 2)[leaf]
    strings[digit_at] = digit
    strings[digit_at[size[leaf] % 2 == 0] - 1] = symbols.index("-")
    return strings.reshape(batch_size, length)


def modular_arithmetic_brackets(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    trees = levels(rng, batch_size, length, operators=3)
    return write(trees, batch_size, length, BRACKETS), evaluate(trees)[:, None]


def solve_equation(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """The digit that x stands for in an expression with + and -, of which the value is given.

    As in Deletang et al., x takes the place of the first digit from a random position on.
    """
    trees = levels(rng, batch_size, length - 2, operators=2)
    expressions = write(trees, batch_size, length - 2, EQUATION)
    position = np.where(expressions < MODULUS, np.arange(length - 2), length)
    next_digit = np.minimum.accumulate(position[:, ::-1], 1)[:, ::-1]  # [B, L-2]; L: none until the end
    x = np.take_along_axis(next_digit, rng.integers(0, length - 2, (batch_size, 1)), 1)
    x = np.where(x < length, x, next_digit[:, :1])
    solution = np.take_along_axis(expressions, x, 1)
    np.put_along_axis(expressions, x, EQUATION.index("x"), 1)
    equals = np.full(batch_size, EQUATION.index("="))
    return np.column_stack([expressions, equals, evaluate(trees)]), solution


def nested(length: int) -> int:
    """How deep the brackets of a string nest at most: of what could be, no more than was ever seen."""
    return min((length - 1) // 4, DEEPEST)


def nested_in_equation(length: int) -> int:
    return nested(length - 2)  # without = and the value


VALUES = tuple("01234")
TASKS = [
    Task("modular_arithmetic_brackets", modular_arithmetic_brackets, tuple(BRACKETS), VALUES, needs_slots=nested),
    Task("solve_equation", solve_equation, tuple(EQUATION), VALUES, needs_slots=nested_in_equation),
]
