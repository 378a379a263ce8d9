"""Regular languages: a machine with finitely many states reads the string and tells the class it ends in."""

import numpy as np

from stackexp.tasks.task import Drawn, Task

MODULUS = 5


def even_pairs(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """1 where the pairs ab and ba are odd in number: where the last symbol is not the first."""
    strings = rng.integers(0, 2, (batch_size, length))
    return strings, strings[:, :1] ^ strings[:, -1:]


def parity_check(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """1 where b is odd in number."""
    strings = rng.integers(0, 2, (batch_size, length))
    return strings, strings.sum(1, keepdims=True) % 2


def cycle_navigation(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Where on a circle of 5 the moves end: symbol x moves by x - 1."""
    strings = rng.integers(0, 3, (batch_size, length))
    return strings, (strings - 1).sum(1, keepdims=True) % MODULUS


def odd_length(length: int) -> int:
    """Digits with an operator between each two are odd in number."""
    return length - 1 + length % 2


def modular_arithmetic(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """The value mod 5 of digits with +, -, * between them, where * binds closer; of an even length, one symbol less."""
    digits = rng.integers(0, MODULUS, (batch_size, odd_length(length) // 2 + 1))
    operators = rng.integers(0, 3, (batch_size, digits.shape[1] - 1))
    strings = np.empty((batch_size, odd_length(length)), np.int64)
    strings[:, ::2], strings[:, 1::2] = digits, MODULUS + operators
    times, sign = (operators == 2).T, np.where(operators == 1, -1, 1).T  # [pairs, B]
    total, term = np.zeros(batch_size, np.int64), digits[:, 0]
    for i, digit in enumerate(digits[:, 1:].T):
        total = np.where(times[i], total, total + term)
        term = np.where(times[i], term, sign[i]) * digit % MODULUS
    return strings, (total + term)[:, None] % MODULUS


TASKS = [
    Task("even_pairs", even_pairs, tuple("ab"), tuple("01")),
    Task("parity_check", parity_check, tuple("ab"), tuple("01")),
    Task("cycle_navigation", cycle_navigation, tuple("-0+"), tuple("01234")),
    Task(  # the ninth symbol is of Deletang et al.'s alphabet, but not of their strings
        "modular_arithmetic",
        modular_arithmetic,
        tuple("01234+-*_"),
        tuple("01234"),
        string_length=odd_length,
    ),
]
