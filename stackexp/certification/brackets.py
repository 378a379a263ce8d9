"""Compare a network with modular arithmetic in brackets: all short expressions, and the rules for three operations."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from stackexp.certification.machine import ROWS, NetworkMachine, ReadState
from stackexp.tasks import TASKS
from stackexp.tasks.expressions import MIN_SPLIT, MODULUS

TASK = "modular_arithmetic_brackets"
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: (a + b) % MODULUS,
    "-": lambda a, b: (a - b) % MODULUS,
    "*": lambda a, b: a * b % MODULUS,
}
LEAVES = ("{}", "-{}", "({})", "(-{})")
"""Expressions without an operator, by length."""
Valued = tuple[str, int]
"""An expression and its value."""


def join(left: Valued, operator: str, right: Valued) -> Valued:
    """Return (left operator right)."""
    return f"({left[0]}{operator}{right[0]})", OPERATORS[operator](left[1], right[1])


RULES: dict[str, Callable[..., Valued]] = {
    "(a{}(b{}(c{}d)))": lambda a, b, c, d, o, p, q: join(a, o, join(b, p, join(c, q, d))),
    "(a{}((b{}c){}d))": lambda a, b, c, d, o, p, q: join(a, o, join(join(b, p, c), q, d)),
    "((a{}b){}(c{}d))": lambda a, b, c, d, o, p, q: join(join(a, o, b), p, join(c, q, d)),
    "((a{}(b{}c)){}d)": lambda a, b, c, d, o, p, q: join(join(a, o, join(b, p, c)), q, d),
    "(((a{}b){}c){}d)": lambda a, b, c, d, o, p, q: join(join(join(a, o, b), p, c), q, d),
}
"""All orders of three operations."""


def list_expressions(length: int) -> list[list[Valued]]:
    """Return all expressions of 0 .. `length` symbols with their values."""
    levels: list[list[Valued]] = [[]]
    for n in range(1, length + 1):
        if n < MIN_SPLIT:
            levels.append([(LEAVES[n - 1].format(d), (d if n % 2 else -d) % MODULUS) for d in range(MODULUS)])
        else:
            pairs = (itertools.product(levels[size], levels[n - 3 - size]) for size in range(1, n - 3))
            levels.append([join(a, name, b) for part in pairs for a, b in part for name in OPERATORS])
    return levels


def list_rules() -> Iterator[tuple[str, list[Valued]]]:
    """Yield each rule, an order of three operators, with its expressions over all digits a, b, c and d."""
    digits = [(str(d), d) for d in range(MODULUS)]
    for rule, build in RULES.items():
        for operators in itertools.product(OPERATORS, repeat=3):
            yield rule.format(*operators), [build(*four, *operators) for four in itertools.product(digits, repeat=4)]


def find_wrong(machine: NetworkMachine, expressions: Iterable[Valued]) -> list[str]:
    """Return the expressions that the network gets wrong."""
    symbols, wrong = TASKS[TASK].symbols, []
    by_length: dict[int, list[Valued]] = defaultdict(list)
    for text, value in expressions:
        by_length[len(text)].append((text, value))
    for valued in by_length.values():
        for start in range(0, len(valued), ROWS):
            part = valued[start : start + ROWS]
            strings = np.array([[symbols.index(symbol) for symbol in text] for text, _ in part])
            answers = machine.answer(machine.read(ReadState(), strings), len(part))[:, 0].argmax(-1).tolist()
            wrong += [text for (text, value), answer in zip(part, answers, strict=True) if answer != value]
    return wrong


def find_missing_rules(machine: NetworkMachine) -> list[dict[str, Any]]:
    """Return the rules that the network gets wrong for some digits: these expressions, and the digits at each place."""
    missing = []
    for rule, expressions in list_rules():
        if wrong := find_wrong(machine, expressions):
            digits = {name: sorted({text[rule.index(name)] for text in wrong}) for name in "abcd"}
            missing.append({"rule": rule, "of": len(expressions), "digits": digits, "wrong_expressions": wrong})
    return missing
