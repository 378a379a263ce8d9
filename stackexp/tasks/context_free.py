"""Deterministic context-free languages: a stack machine solves them."""

from __future__ import annotations

from stackexp.tasks import expressions
from stackexp.tasks.definition import Drawn, np, task

POP, PUSH = 2, 3  # input ids of stack_manipulation; PUSH 0 is 3, PUSH 1 is 4
END = 2  # output id that ends the answers of stack_manipulation

BRACKETS = "01234+-*()x"  # x belongs to the alphabet of Deletang et al. but occurs in no string
EQUATION = "01234+-()x="
MAX_OBSERVED_DEPTH = 21


def nesting_depth(length: int) -> int:
    """Return the maximum bracket depth of an expression.

    The maximum possible depth is length / 4, but it is rare: of 10,000 strings of length 500, half nest at most 13
    deep and few more than 21.
    """
    return min((length - 1) // 4, MAX_OBSERVED_DEPTH)


@task(
    "deterministic context-free",
    symbols=("0", "1", "POP", "PUSH0", "PUSH1"),
    answer_symbols="01.",
    output_length=lambda length: length + 1,
    required_slots=lambda length: length,
)
def stack_manipulation(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Return the final stack from top to bottom, then END.

    A string is a stack of 1 .. L-1 symbols from bottom to top, then instructions. A POP of an empty stack does
    nothing. A string of length 1 has no instructions.
    """
    stack_length = rng.integers(1, max(length, 2), (batch_size, 1))
    strings = rng.integers(0, 2, (batch_size, length))
    instructions = rng.integers(POP, PUSH + 2, (batch_size, length))
    strings = np.where(np.arange(length) < stack_length, strings, instructions)

    is_pop = strings == POP
    balance = np.cumsum(np.where(is_pop, -1, 1), 1)
    height = balance - np.minimum(np.minimum.accumulate(balance, 1), 0)  # [B, L], stack height after each symbol
    lowest_later = np.minimum.accumulate(height[:, ::-1], 1)[:, ::-1]
    row, position = np.nonzero(~is_pop & (height == lowest_later))  # symbols that are pushed and never popped
    final = height[:, -1]
    targets = np.zeros((batch_size, length + 1), np.int64)
    targets[row, (final[row] - height[row, position])] = strings[row, position] % PUSH
    targets[np.arange(batch_size), final] = END
    return strings, targets, final


@task(
    "deterministic context-free",
    symbols="01",
    answer_symbols="01",
    output_length=lambda length: length,
    required_slots=lambda length: length,
)
def reverse_string(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Return the string in reverse order."""
    strings = rng.integers(0, 2, (batch_size, length))
    return strings, strings[:, ::-1].copy()


@task("deterministic context-free", symbols=BRACKETS, answer_symbols="01234", required_slots=nesting_depth)
def modular_arithmetic_brackets(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Return the value mod 5 of an expression with + - * and brackets."""
    levels = expressions.draw_levels(rng, batch_size, length, num_operators=3)
    return expressions.write(levels, batch_size, length, BRACKETS), expressions.evaluate(levels)[:, None]


@task(
    "deterministic context-free",
    symbols=EQUATION,
    answer_symbols="01234",
    min_length=3,
    required_slots=lambda length: nesting_depth(length - 2),  # without the equals sign and the value
)
def solve_equation(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Return the digit x in an expression with + - and brackets of known value.

    As in Deletang et al., x replaces the first digit at or after a random position.
    """
    levels = expressions.draw_levels(rng, batch_size, length - 2, num_operators=2)
    strings = expressions.write(levels, batch_size, length - 2, EQUATION)
    position = np.where(strings < expressions.MODULUS, np.arange(length - 2), length)
    next_digit = np.minimum.accumulate(position[:, ::-1], 1)[:, ::-1]  # [B, L-2]; L if no digit follows
    x = np.take_along_axis(next_digit, rng.integers(0, length - 2, (batch_size, 1)), 1)
    x = np.where(x < length, x, next_digit[:, :1])
    solution = np.take_along_axis(strings, x, 1)
    np.put_along_axis(strings, x, EQUATION.index("x"), 1)
    equals = np.full(batch_size, EQUATION.index("="))
    return np.column_stack([strings, equals, expressions.evaluate(levels)]), solution
