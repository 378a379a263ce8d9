"""List the rules of modular arithmetic with brackets that a network lacks."""

from typing import Any

import numpy as np

from stackexp.certification.machine import Machine
from stackexp.models.transformer import Cache
from stackexp.tasks import TASKS
from stackexp.tasks.expressions import MODULUS

TASK = "modular_arithmetic_brackets"
MAX_DEPTH = 8
OPERATORS = {"+": np.add, "-": np.subtract, "*": np.multiply}


def list_rules(depth: int) -> list[tuple[str, str, int]]:
    """Return (rule, expression, value) of each operation on two digits, inside `depth` more brackets on each side.

    `(0+ ... )` puts it at the right of a sum, so that the stack must hold the outer operand; `( ... +0)` at the left.
    """
    rules = []
    for operator, compute in OPERATORS.items():
        for a in range(MODULUS):
            for b in range(MODULUS):
                value = int(compute(a, b)) % MODULUS
                for side, left, right in (("right", "(0+", ")"), ("left", "(", "+0)")):
                    if depth or side == "right":
                        expression = left * depth + f"({a}{operator}{b})" + right * depth
                        rules.append((f"{operator} {side} {depth}", expression, value))
    for digit in range(MODULUS):
        rules.append((f"negation right {depth}", "(0+" * depth + f"(-{digit})" + ")" * depth, -digit % MODULUS))
    return rules


def find_missing_rules(machine: Machine) -> list[dict[str, Any]]:
    """Return for each operation, side and nesting depth the expressions that the network gets wrong."""
    symbols, missing = TASKS[TASK].symbols, []
    for depth in range(MAX_DEPTH + 1):
        rules = list_rules(depth)
        for name in dict.fromkeys(rule for rule, _, _ in rules):
            wrong, total = [], 0
            chosen = [(text, value) for rule, text, value in rules if rule == name]
            for length in {len(text) for text, _ in chosen}:
                part = [(text, value) for text, value in chosen if len(text) == length]
                strings = np.array([[symbols.index(c) for c in text] for text, _ in part])
                logits = machine.answer(machine.read(Cache(), strings), len(part))
                found = logits[:, 0].argmax(-1).tolist()
                wrong += [text for (text, value), answer in zip(part, found, strict=True) if answer != value]
                total += len(part)
            operation, side, _ = name.split()
            if wrong:
                missing.append(
                    {"operation": operation, "side": side, "depth": depth, "of": total, "wrong_expressions": wrong}
                )
    return missing
