"""Regular languages: a finite automaton reads the string, and its final state is the answer."""

from __future__ import annotations

from stackexp.tasks.definition import Drawn, np, task

MODULUS = 5


def compare_ends(strings: np.ndarray) -> np.ndarray:
    """Return 1 where the first and last symbols differ, which means that the count of ab and ba pairs is odd."""
    return strings[:, :1] ^ strings[:, -1:]


def compute_parity(strings: np.ndarray) -> np.ndarray:
    """Return 1 where the count of b is odd."""
    return strings.sum(1, keepdims=True) % 2


def add_moves(strings: np.ndarray) -> np.ndarray:
    """Return the final position on a circle of five after moves of -1, 0 and +1."""
    return (strings - 1).sum(1, keepdims=True) % MODULUS


@task("regular", symbols="ab", answer_symbols="01", solve=compare_ends)
def even_pairs(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Return 1 if the count of ab and ba pairs is odd."""
    strings = rng.integers(0, 2, (batch_size, length))
    return strings, compare_ends(strings)


@task("regular", symbols="ab", answer_symbols="01", solve=compute_parity)
def parity_check(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Return 1 if the count of b is odd."""
    strings = rng.integers(0, 2, (batch_size, length))
    return strings, compute_parity(strings)


@task("regular", symbols="-0+", answer_symbols="01234", solve=add_moves)
def cycle_navigation(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Return the final position on a circle of five."""
    strings = rng.integers(0, 3, (batch_size, length))
    return strings, add_moves(strings)


def evaluate(strings: np.ndarray) -> np.ndarray:
    """Return the value mod 5 of digits joined by operators, strings [B, L] with odd L, as answers [B, 1]."""
    digits, operators = strings[:, ::2], strings[:, 1::2] - MODULUS
    is_product, sign = (operators == 2).T, np.where(operators == 1, -1, 1).T  # [operators, B]
    total, term = np.zeros(len(strings), np.int64), digits[:, 0]
    for i, digit in enumerate(digits[:, 1:].T):
        total = np.where(is_product[i], total, total + term)
        term = np.where(is_product[i], term, sign[i]) * digit % MODULUS
    return (total + term)[:, None] % MODULUS


# The ninth symbol belongs to the alphabet of Deletang et al. but occurs in no string.
@task("regular", symbols="01234+-*_", answer_symbols="01234", solve=evaluate, loop_step=2, length_step=2)
def modular_arithmetic(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
    """Return the value mod 5 of digits joined by + - *, where * takes precedence. Even lengths lose one symbol."""
    string_length = length - 1 + length % 2  # odd, because digits and operators alternate
    digits = rng.integers(0, MODULUS, (batch_size, string_length // 2 + 1))
    operators = rng.integers(0, 3, (batch_size, digits.shape[1] - 1))
    strings = np.empty((batch_size, string_length), np.int64)
    strings[:, ::2], strings[:, 1::2] = digits, MODULUS + operators
    return strings, evaluate(strings)
