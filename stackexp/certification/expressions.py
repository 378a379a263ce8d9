"""Compare a network with arithmetic in brackets: all short expressions or equations, and rules for three operations."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from stackexp.certification.machine import ROWS, NetworkMachine, ReadState
from stackexp.tasks import TASKS
from stackexp.tasks.expressions import MIN_SPLIT, MODULUS

BRACKETS, EQUATIONS = "modular_arithmetic_brackets", "solve_equation"
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: (a + b) % MODULUS,
    "-": lambda a, b: (a - b) % MODULUS,
    "*": lambda a, b: a * b % MODULUS,
}
OPERATORS_OF = {BRACKETS: "+-*", EQUATIONS: "+-"}
LEAVES = ("{}", "-{}", "({})", "(-{})")
"""Expressions without an operator, by length."""
Valued = tuple[str, int]
"""An expression and its value, or an equation and its solution."""


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


def list_strings(task: str, length: int) -> list[Valued]:
    """Return all strings of a task of up to `length` symbols with their answers."""
    if task == BRACKETS:
        return list(itertools.chain(*list_expressions(length, OPERATORS_OF[task])))
    expressions = itertools.chain(*list_expressions(length - len("=0"), OPERATORS_OF[task]))
    digits = ((text, value, i) for text, value in expressions for i in range(len(text)) if text[i].isdigit())
    return [pose_equation(*digit) for digit in digits]


def pose_equation(text: str, value: int, position: int) -> Valued:
    """Replace the digit at a position of an expression by x."""
    return f"{text[:position]}x{text[position + 1 :]}={value}", int(text[position])


def list_expressions(length: int, operators: str) -> list[list[Valued]]:
    """Return all expressions of 0 .. `length` symbols with their values."""
    levels: list[list[Valued]] = [[]]
    for n in range(1, length + 1):
        if n < MIN_SPLIT:
            levels.append([(LEAVES[n - 1].format(d), (d if n % 2 else -d) % MODULUS) for d in range(MODULUS)])
        else:
            pairs = (itertools.product(levels[size], levels[n - 3 - size]) for size in range(1, n - 3))
            levels.append([join(a, name, b) for part in pairs for a, b in part for name in operators])
    return levels


def list_rules(task: str) -> Iterator[tuple[str, list[Valued]]]:
    """Yield each rule with its strings over all digits a, b, c and d.

    A rule is an order of three operators, in an equation also with x in the place of one digit.
    """
    digits = [(str(d), d) for d in range(MODULUS)]
    for rule, build in RULES.items():
        for operators in itertools.product(OPERATORS_OF[task], repeat=3):
            text = rule.format(*operators)
            expressions = [build(*four, *operators) for four in itertools.product(digits, repeat=4)]
            if task == BRACKETS:
                yield text, expressions
                continue
            for name in "abcd":
                place = text.index(name)
                yield f"{text.replace(name, 'x')}=e", [pose_equation(*valued, place) for valued in expressions]


def find_wrong(machine: NetworkMachine, task: str, strings_of_task: Iterable[Valued]) -> list[str]:
    """Return the strings that the network gets wrong."""
    symbols, wrong = TASKS[task].symbols, []
    by_length: dict[int, list[Valued]] = defaultdict(list)
    for text, value in strings_of_task:
        by_length[len(text)].append((text, value))
    for valued in by_length.values():
        for start in range(0, len(valued), ROWS):
            part = valued[start : start + ROWS]
            strings = np.array([[symbols.index(symbol) for symbol in text] for text, _ in part])
            answers = machine.answer(machine.read(ReadState(), strings), len(part))[:, 0].argmax(-1).tolist()
            wrong += [text for (text, value), answer in zip(part, answers, strict=True) if answer != value]
    return wrong


def find_missing_rules(machine: NetworkMachine, task: str) -> list[dict[str, Any]]:
    """Return the rules that the network gets wrong for some digits: these strings, and the digits at each place."""
    missing = []
    for rule, valued in list_rules(task):
        if wrong := find_wrong(machine, task, valued):
            digits = {name: sorted({text[rule.index(name)] for text in wrong}) for name in "abcd" if name in rule}
            missing.append({"rule": rule, "of": len(valued), "digits": digits, "wrong_expressions": wrong})
    return missing
