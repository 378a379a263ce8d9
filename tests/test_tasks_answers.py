"""Task answers, compared with reference solvers for one string."""

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from task_strings import format_symbols

from stackexp.tasks import TASKS

SOLVERS: dict[str, Callable[[str], str]] = {}


def solves(solver: Callable[[str], str]) -> Callable[[str], str]:
    SOLVERS[solver.__name__] = solver
    return solver


@solves
def even_pairs(string: str) -> str:
    pairs = [string[i : i + 2] for i in range(len(string) - 1)]
    return "01"[(pairs.count("ab") + pairs.count("ba")) % 2]


@solves
def parity_check(string: str) -> str:
    return str(string.count("b") % 2)


@solves
def cycle_navigation(string: str) -> str:
    return str((string.count("+") - string.count("-")) % 5)


@solves
def modular_arithmetic(string: str) -> str:
    assert re.fullmatch(r"[0-4]([-+*][0-4])*", string)
    return str(eval(string) % 5)


@solves
def modular_arithmetic_brackets(string: str) -> str:
    assert not re.search(r"(^|[-+*(])-\(", string), "only digits have a sign"
    return str(eval(string) % 5)


@solves
def solve_equation(string: str) -> str:
    assert "*" not in string
    assert string.count("x") == string.count("=") == 1
    left, right = string.split("=")
    (solution,) = [x for x in "01234" if modular_arithmetic_brackets(left.replace("x", x)) == right]
    return solution


@solves
def stack_manipulation(string: str) -> str:
    stack: list[str] = []
    words = string.split()
    assert re.fullmatch(r"[01]+(POP|PUSH0|PUSH1)*", "".join(words)), "instructions follow the stack"
    for word in words:
        if word != "POP":
            stack.append(word[-1])
        elif stack:
            stack.pop()
    return "".join(reversed(stack)) + "."


@solves
def reverse_string(string: str) -> str:
    return string[::-1]


@solves
def odds_first(string: str) -> str:
    return string[1::2] + string[::2]


@solves
def duplicate_string(string: str) -> str:
    return string * 2


@solves
def missing_duplicate(string: str) -> str:
    if len(string) % 2:
        assert string[-1] == "."
        string = string[:-1]
    middle = len(string) // 2
    ((a, b),) = [pair for pair in zip(string[:middle], string[middle:], strict=True) if len({*pair}) > 1]
    return (a + b).replace("_", "", 1)


def parse_operands(string: str, operator: str) -> list[int]:
    assert re.fullmatch(rf"[01]+[{operator}][01]+", string)
    numbers = [int(number[::-1], 2) for number in string.split(operator)]
    assert all(numbers), "an operand is zero"
    return numbers


@solves
def binary_addition(string: str) -> str:
    return f"{sum(parse_operands(string, '+')):b}"[::-1] + "."


@solves
def binary_multiplication(string: str) -> str:
    return f"{math.prod(parse_operands(string, '*')):b}"[::-1] + "."


@solves
def compute_sqrt(string: str) -> str:
    assert int(string, 2), "the number is zero"
    return f"{math.isqrt(int(string, 2)):b}".zfill((len(string) + 1) // 2)


@solves
def bucket_sort(string: str) -> str:
    return "".join(sorted(string))


def check_answers(name: str, batch_size: int, length: int) -> None:
    """Compare a batch with the solver; answers are padded with zeros that accuracy does not count."""
    task = TASKS[name]
    batch = task.sample(np.random.default_rng(length), batch_size, length)
    for string, answer, mask in zip(*batch, strict=True):
        written = format_symbols(string, task.symbols)
        expected = SOLVERS[name](written)
        padded = expected.ljust(task.output_length(length), "0")
        assert format_symbols(answer, task.answer_symbols) == padded, written
        assert mask.tolist() == [i < len(expected) for i in range(len(answer))]


@pytest.mark.parametrize("name", TASKS)
def test_answers(name):
    for length in [1, 2, 3, 4, 5, 6, 7, 8, 40, 41]:
        if length >= TASKS[name].min_length:
            check_answers(name, 64, length)
    for length in [499, 500, 3001]:  # brackets of 3,001 symbols have more operators than Python's recursion limit
        check_answers(name, 4, length)


@pytest.mark.parametrize(
    ("name", "string", "answer"),
    [
        ("even_pairs", "aabba", "0"),
        ("modular_arithmetic", "1+2-4", "4"),
        ("modular_arithmetic_brackets", "(-2*(-3-1))", "3"),
        ("stack_manipulation", "0 1 1 0 PUSH1 POP POP", "110."),
        ("stack_manipulation", "1 1 0 POP POP POP", "."),
        ("missing_duplicate", "011_0110", "0"),
        ("binary_addition", "001+01101", "01011."),
        ("binary_multiplication", "1001*000001", "000001001."),
        ("compute_sqrt", "100101", "110"),
    ],
)
def test_solvers_agree_with_the_examples_of_deletang_et_al(name, string, answer):
    assert SOLVERS[name](string) == answer
