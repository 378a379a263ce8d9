"""Task answers, compared with reference solvers that follow the task definitions symbol by symbol."""

import re
from collections.abc import Callable

import numpy as np
import pytest

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
    is_even = True
    for symbol in string:
        is_even = is_even != (symbol == "b")
    return "0" if is_even else "1"


@solves
def cycle_navigation(string: str) -> str:
    circle = [0, 1, 2, 3, 4]
    for move in string:
        circle = {"+": circle[1:] + circle[:1], "0": circle, "-": circle[-1:] + circle[:-1]}[move]
    return str(circle[0])


@solves
def modular_arithmetic(string: str) -> str:
    assert re.fullmatch(r"[0-4]([-+*][0-4])*", string)
    return str(eval(string) % 5)


def reduce_brackets(expression: str) -> str:
    """Replace innermost brackets by their values until one digit is left."""
    assert not re.search(r"(^|[-+*(])-\(", expression), "only digits have a sign"
    while len(expression) > 1:
        shorter = re.sub(r"\((-?\d)\)|^(-\d)$", lambda m: str(int(m[1] or m[2]) % 5), expression)
        shorter = re.sub(r"\((-?\d)([-+*])(-?\d)\)", lambda m: calculate(*m.groups()), shorter)
        assert shorter != expression, f"malformed expression {expression}"
        expression = shorter
    return expression


def calculate(left: str, operator: str, right: str) -> str:
    a, b = int(left), int(right)
    return str({"+": a + b, "-": a - b, "*": a * b}[operator] % 5)


@solves
def modular_arithmetic_brackets(string: str) -> str:
    return reduce_brackets(string)


@solves
def solve_equation(string: str) -> str:
    assert "*" not in string
    assert string.count("x") == string.count("=") == 1
    left, right = string.split("=")
    (solution,) = [x for x in "01234" if reduce_brackets(left.replace("x", x)) == right]
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
    answer = ""
    for symbol in string:
        answer = symbol + answer
    return answer


@solves
def odds_first(string: str) -> str:
    odd, even = "", ""
    for position, symbol in enumerate(string):
        odd, even = (odd + symbol, even) if position % 2 else (odd, even + symbol)
    return odd + even


@solves
def duplicate_string(string: str) -> str:
    return string * 2


@solves
def missing_duplicate(string: str) -> str:
    if len(string) % 2:
        assert string[-1] == "."
        string = string[:-1]
    middle = len(string) // 2
    missing = []
    for a, b in zip(string[:middle], string[middle:], strict=True):
        if "_" in (a, b):
            missing += [symbol for symbol in (a, b) if symbol != "_"]
        else:
            assert a == b
    (answer,) = missing
    return answer


def add(a: list[int], b: list[int]) -> list[int]:
    """Add with pencil and paper, from the lowest digit on."""
    digits, carry = [], 0
    for i in range(max(len(a), len(b)) + 1):
        carry, digit = divmod((a[i] if i < len(a) else 0) + (b[i] if i < len(b) else 0) + carry, 2)
        digits.append(digit)
    return digits


def parse_operands(string: str, operator: str) -> list[list[int]]:
    assert re.fullmatch(rf"[01]+[{operator}][01]+", string)
    numbers = [list(map(int, number)) for number in string.split(operator)]
    assert all(map(any, numbers)), "an operand is zero"
    return numbers


def write_result(digits: list[int]) -> str:
    return "".join(map(str, digits)).rstrip("0") + "."


@solves
def binary_addition(string: str) -> str:
    return write_result(add(*parse_operands(string, "+")))


@solves
def binary_multiplication(string: str) -> str:
    a, b = parse_operands(string, "*")
    product = [0]
    for shift, digit in enumerate(b):
        if digit:
            product = add(product, [0] * shift + a)
    return write_result(product)


@solves
def compute_sqrt(string: str) -> str:
    """Bisect between a root that is too small and one that is too large."""
    number = int(string, 2)
    assert number, "the number is zero"
    small, large = 0, number + 1
    while large - small > 1:
        middle = (small + large) // 2
        small, large = (middle, large) if middle * middle <= number else (small, middle)
    return f"{small:b}".zfill((len(string) + 1) // 2)


@solves
def bucket_sort(string: str) -> str:
    return "".join(symbol * string.count(symbol) for symbol in "01234")


def check_answers(name: str, batch_size: int, length: int) -> None:
    """Compare a batch with the solver; answers are padded with zeros that accuracy does not count."""
    task = TASKS[name]
    batch = task.sample(np.random.default_rng(length), batch_size, length)
    for string, answer, mask in zip(*batch, strict=True):
        expected = SOLVERS[name](task.format_string(string))
        assert task.format_answer(answer) == expected.ljust(task.output_length(length), "0"), task.format_string(string)
        assert mask.tolist() == [i < len(expected) for i in range(len(answer))]


@pytest.mark.parametrize("name", TASKS)
def test_answers_to_short_strings(name):
    for length in [1, 2, 3, 4, 5, 6, 7, 8, 40, 41]:
        if length >= TASKS[name].min_length:
            check_answers(name, 64, length)


@pytest.mark.parametrize("name", TASKS)
def test_answers_to_long_strings(name):
    for length in [499, 500]:
        check_answers(name, 12, length)


@pytest.mark.parametrize("name", ["modular_arithmetic", "modular_arithmetic_brackets", "solve_equation"])
def test_expressions_beyond_the_recursion_limit(name):
    check_answers(name, 2, 3001)


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
