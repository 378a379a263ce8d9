"""Binary arithmetic on integers of any size, by Python's own."""

import math
from collections.abc import Iterable

import numpy as np

from stackexp.tasks.task import Drawn, Task

OPERATOR = 2  # between the operands
END = 2  # after the last digit of a result, which is 1


def integers(bits: np.ndarray) -> list[int]:
    """Rows of bits [B, n], the lowest first, as numbers."""
    return [int.from_bytes(row, "little") for row in np.packbits(bits.astype(np.uint8), axis=1, bitorder="little")]


def binary(numbers: Iterable[int], length: int) -> np.ndarray:
    """Numbers as int64 [B, length], the lowest bit first."""
    size = -(-length // 8)
    packed = np.frombuffer(b"".join(n.to_bytes(size, "little") for n in numbers), np.uint8).reshape(-1, size)
    return np.unpackbits(packed, axis=1, count=length, bitorder="little").astype(np.int64)


def operands(rng: np.random.Generator, batch_size: int, length: int) -> tuple[np.ndarray, list[int], list[int]]:
    """Strings [B, L] of two numbers, the lowest bit first, with an operator between them; and the numbers.

    The first has 1 .. L-2 digits, the second the rest. Each is uniform among the numbers from 1 that fit its digits.
    """
    operator = rng.integers(1, length - 1, (batch_size, 1))
    first, second = np.arange(length) < operator, np.arange(length) > operator
    strings = np.zeros((batch_size, length), np.int64)
    again = np.arange(batch_size)  # the rows that have no number, or a zero
    while again.size:
        strings[again] = rng.integers(0, 2, (again.size, length))
        again = np.flatnonzero(~((strings & first).any(1) & (strings & second).any(1)))
    left, right = integers(strings & first), integers(strings & second)
    right = [number >> i + 1 for number, i in zip(right, operator[:, 0].tolist(), strict=True)]
    np.put_along_axis(strings, operator, OPERATOR, 1)
    return strings, left, right


def ended(results: list[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Results as they are answered: the lowest bit first, END after the highest 1, zeros; and where END stands [B]."""
    targets, end = binary(results, length), np.array([n.bit_length() for n in results])
    targets[np.arange(len(results)), end] = END
    return targets, end


def binary_addition(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    strings, left, right = operands(rng, batch_size, length)
    return strings, *ended([a + b for a, b in zip(left, right, strict=True)], length + 1)


def binary_multiplication(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    strings, left, right = operands(rng, batch_size, length)
    return strings, *ended([a * b for a, b in zip(left, right, strict=True)], length)


def half(length: int) -> int:
    """Digits of the root of a number of so many."""
    return -(-length // 2)


def compute_sqrt(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """The root, rounded down, of a number from 1 that fits L digits; the highest bit first."""
    strings = np.zeros((batch_size, length), np.int64)
    while (zero := ~strings.any(1)).any():
        strings[zero] = rng.integers(0, 2, (zero.sum(), length))
    roots = binary(map(math.isqrt, integers(strings[:, ::-1])), half(length))
    return strings, roots[:, ::-1].copy()


TASKS = [
    Task("binary_addition", binary_addition, tuple("01+"), tuple("01.")),
    Task("binary_multiplication", binary_multiplication, tuple("01*"), tuple("01.")),
    Task("compute_sqrt", compute_sqrt, tuple("01"), tuple("01")),
]
