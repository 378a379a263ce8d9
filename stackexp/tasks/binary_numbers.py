"""Binary numbers of any length as arrays of bits, computed with Python integers."""

from __future__ import annotations

from collections.abc import Iterable

from stackexp.tasks.definition import np

OPERATOR = 2  # input id between the operands
END = 2  # output id after the highest bit of a result


def to_integers(bits: np.ndarray) -> list[int]:
    """Convert rows of bits [B, n], lowest bit first, to integers."""
    return [int.from_bytes(row, "little") for row in np.packbits(bits.astype(np.uint8), axis=1, bitorder="little")]


def to_bits(numbers: Iterable[int], length: int) -> np.ndarray:
    """Convert integers to bits, int64 [B, length], lowest bit first."""
    num_bytes = -(-length // 8)
    packed = np.frombuffer(b"".join(n.to_bytes(num_bytes, "little") for n in numbers), np.uint8)
    bits = np.unpackbits(packed.reshape(-1, num_bytes), axis=1, count=length, bitorder="little")
    return bits.astype(np.int64)


def draw_operands(rng: np.random.Generator, batch_size: int, length: int) -> tuple[np.ndarray, list[int], list[int]]:
    """Draw strings [B, L] of two positive numbers, lowest bit first, with an operator between; also return the numbers.

    The first number has 1 .. L-2 digits, the second the rest. Each is uniform over the positive numbers that fit.
    """
    operator = rng.integers(1, length - 1, (batch_size, 1))
    is_first, is_second = np.arange(length) < operator, np.arange(length) > operator
    strings = np.zeros((batch_size, length), np.int64)
    pending = np.arange(batch_size)  # rows that are not drawn yet or have a zero operand
    while pending.size:
        strings[pending] = rng.integers(0, 2, (pending.size, length))
        pending = np.flatnonzero(~((strings & is_first).any(1) & (strings & is_second).any(1)))
    left, right = to_integers(strings & is_first), to_integers(strings & is_second)
    right = [number >> i + 1 for number, i in zip(right, operator[:, 0].tolist(), strict=True)]
    np.put_along_axis(strings, operator, OPERATOR, 1)
    return strings, left, right


def write_results(results: list[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return answers [B, length], lowest bit first with END after the highest 1, and the positions of END [B]."""
    targets, end = to_bits(results, length), np.array([n.bit_length() for n in results])
    targets[np.arange(len(results)), end] = END
    return targets, end
