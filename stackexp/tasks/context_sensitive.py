"""Context-sensitive languages: copying, sorting and binary arithmetic."""

from __future__ import annotations

import math

from stackexp.tasks.binary_numbers import draw_operands, to_bits, to_integers, write_results
from stackexp.tasks.definition import Drawn, np, task

HOLE, PAD = 2, 3  # input ids of missing_duplicate


@task("context-sensitive", symbols="01_.", answer_symbols="01", min_length=2)
def missing_duplicate(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Return the symbol that a hole replaces in a string written twice. Odd lengths end with a pad."""
    half = rng.integers(0, 2, (batch_size, length // 2))
    strings = np.concatenate([half, half, np.full((batch_size, length % 2), PAD)], 1)
    hole = rng.integers(0, length // 2 * 2, (batch_size, 1))
    missing = np.take_along_axis(strings, hole, 1)
    np.put_along_axis(strings, hole, HOLE, 1)
    return strings, missing


@task(
    "context-sensitive",
    symbols="01",
    answer_symbols="01",
    output_length=lambda length: length,
    required_slots=lambda length: length,
)
def odds_first(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Return the symbols at odd positions (counted from 0), then those at even positions."""
    strings = rng.integers(0, 2, (batch_size, length))
    return strings, np.concatenate([strings[:, 1::2], strings[:, ::2]], 1)


@task("context-sensitive", symbols="01+", answer_symbols="01.", output_length=lambda length: length + 1, min_length=3)
def binary_addition(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Return the sum of two binary numbers, lowest bit first."""
    strings, left, right = draw_operands(rng, batch_size, length)
    return strings, *write_results([a + b for a, b in zip(left, right, strict=True)], length + 1)


@task("context-sensitive", symbols="01*", answer_symbols="01.", output_length=lambda length: length, min_length=3)
def binary_multiplication(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Return the product of two binary numbers, lowest bit first."""
    strings, left, right = draw_operands(rng, batch_size, length)
    return strings, *write_results([a * b for a, b in zip(left, right, strict=True)], length)


def half_rounded_up(length: int) -> int:
    """Return the number of digits of the square root of a number of `length` digits."""
    return -(-length // 2)


@task("context-sensitive", symbols="01", answer_symbols="01", output_length=half_rounded_up)
def compute_sqrt(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Return the square root, rounded down, of a positive binary number, highest bit first."""
    strings = np.zeros((batch_size, length), np.int64)
    while (is_zero := ~strings.any(1)).any():
        strings[is_zero] = rng.integers(0, 2, (is_zero.sum(), length))
    roots = to_bits(map(math.isqrt, to_integers(strings[:, ::-1])), half_rounded_up(length))
    return strings, roots[:, ::-1].copy()


@task("context-sensitive", symbols="01234", answer_symbols="01234", output_length=lambda length: length)
def bucket_sort(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Return the symbols in ascending order."""
    strings = rng.integers(0, 5, (batch_size, length))
    return strings, np.sort(strings, 1)


@task(
    "context-sensitive",
    symbols="01",
    answer_symbols="01",
    output_length=lambda length: 2 * length,
    required_slots=lambda length: length,
)
def duplicate_string(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Return the string twice."""
    strings = rng.integers(0, 2, (batch_size, length))
    return strings, np.concatenate([strings, strings], 1)
