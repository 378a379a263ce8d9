"""The answers of every task, against readers of the written string that follow the definition symbol by symbol."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from stackexp.tasks import TASKS

READERS: dict[str, Callable[[str], str]] = {}


def reads(reader: Callable[[str], str]) -> Callable[[str], str]:
    READERS[reader.__name__] = reader
    return reader


@reads
def even_pairs(string: str) -> str:
    pairs = [string[i : i + 2] for i in range(len(string) - 1)]
    return "01"[(pairs.count("ab") + pairs.count("ba")) % 2]


@reads
def parity_check(string: str) -> str:
    even = True
    for symbol in string:
        even = even != (symbol == "b")
    return "0" if even else "1"


@reads
def cycle_navigation(string: str) -> str:
    circle = [0, 1, 2, 3, 4]
    for move in string:
        circle = {"+": circle[1:] + circle[:1], "0": circle, "-": circle[-1:] + circle[:-1]}[move]
    return str(circle[0])


@reads
def modular_arithmetic(string: str) -> str:
    assert re.fullmatch(r"[0-4]([-+*][0-4])*", string)
    return str(eval(string) % 5)


def reduced(expression: str) -> str:
    """As a person would: the value of a bracket without brackets in it takes its place, again and again."""
    assert not re.search(r"(^|[-+*(])-\(", expression), "only digits have a sign"
    while len(expression) > 1:
        shorter = re.sub(r"\((-?\d)\)|^(-\d)$", lambda m: str(int(m[1] or m[2]) % 5), expression)
        shorter = re.sub(r"\((-?\d)([-+*])(-?\d)\)", lambda m: combined(*m.groups()), shorter)
        assert shorter != expression, f"{expression} cannot be read"
        expression = shorter
    return expression


def combined(left: str, operator: str, right: str) -> str:
    a, b = int(left), int(right)
    return str({"+": a + b, "-": a - b, "*": a * b}[operator] % 5)


@reads
def modular_arithmetic_brackets(string: str) -> str:
    return reduced(string)


@reads
def solve_equation(string: str) -> str:
    assert "*" not in string
    assert string.count("x") == string.count("=") == 1
    left, right = string.split("=")
    (solution,) = [x for x in "01234" if reduced(left.replace("x", x)) == right]
    return solution


@reads
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


@reads
def reverse_string(string: str) -> str:
    answer = ""
    for symbol in string:
        answer = symbol + answer
    return answer


@reads
def odds_first(string: str) -> str:
    """Odd by the place, counted from 0."""
    odd, even = "", ""
    for place, symbol in enumerate(string):
        odd, even = (odd + symbol, even) if place % 2 else (odd, even + symbol)
    return odd + even


@reads
def duplicate_string(string: str) -> str:
    return string * 2


@reads
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


def sum_of(a: list[int], b: list[int]) -> list[int]:
    """On paper, from the lowest digit on: the digits of a + b."""
    digits, carry = [], 0
    for i in range(max(len(a), len(b)) + 1):
        carry, digit = divmod((a[i] if i < len(a) else 0) + (b[i] if i < len(b) else 0) + carry, 2)
        digits.append(digit)
    return digits


def operands(string: str, operator: str) -> list[list[int]]:
    assert re.fullmatch(rf"[01]+[{operator}][01]+", string)
    numbers = [list(map(int, number)) for number in string.split(operator)]
    assert all(map(any, numbers)), "an operand is zero"
    return numbers


def ended(digits: list[int]) -> str:
    return "".join(map(str, digits)).rstrip("0") + "."


@reads
def binary_addition(string: str) -> str:
    return ended(sum_of(*operands(string, "+")))


@reads
def binary_multiplication(string: str) -> str:
    a, b = operands(string, "*")
    product = [0]
    for place, digit in enumerate(b):
        if digit:
            product = sum_of(product, [0] * place + a)
    return ended(product)


@reads
def compute_sqrt(string: str) -> str:
    """By bisection between roots that are too small and roots that are too large."""
    number = int(string, 2)
    assert number, "the number is zero"
    small, large = 0, number + 1
    while large - small > 1:
        middle = (small + large) // 2
        small, large = (middle, large) if middle * middle <= number else (small, middle)
    return f"{small:b}".zfill((len(string) + 1) // 2)


@reads
def bucket_sort(string: str) -> str:
    return "".join(symbol * string.count(symbol) for symbol in "01234")


def test_every_task_has_a_reader():
    assert READERS.keys() == TASKS.keys()


def check(name: str, batch_size: int, length: int) -> None:
    """All answers of a batch are the reader's; what accuracy does not count are zeros after it."""
    task = TASKS[name]
    batch = task.sample(np.random.default_rng(length), batch_size, length)
    for string, answer, counted in zip(*batch, strict=True):
        written = READERS[name](task.text(string))
        assert task.answer_text(answer) == written.ljust(task.output_length(length), "0"), task.text(string)
        assert counted.tolist() == [i < len(written) for i in range(len(answer))]


LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 40, 41]


@pytest.mark.parametrize(
    ("name", "length"), [(n, x) for n, task in TASKS.items() for x in LENGTHS if x >= task.min_length]
)
def test_answers(name, length):
    check(name, 64, length)


@pytest.mark.parametrize("length", [499, 500])
@pytest.mark.parametrize("name", TASKS)
def test_answers_of_long_strings(name, length):
    check(name, 12, length)


@pytest.mark.parametrize("name", ["modular_arithmetic", "modular_arithmetic_brackets", "solve_equation"])
def test_there_is_no_limit_of_recursion(name):
    check(name, 2, 3001)


def test_readers_know_the_examples_of_the_paper():
    """Of Deletang et al. 2023, table and docstrings, where an answer of theirs is given."""
    assert READERS["even_pairs"]("aabba") == "0"
    assert READERS["modular_arithmetic"]("1+2-4") == "4"
    assert READERS["modular_arithmetic_brackets"]("(-2*(-3-1))") == "3"
    assert READERS["stack_manipulation"]("0 1 1 0 PUSH1 POP POP") == "110."
    assert READERS["stack_manipulation"]("1 1 0 POP POP POP") == "."
    assert READERS["missing_duplicate"]("011_0110") == "0"
    assert READERS["binary_addition"]("001+01101") == "01011."
    assert READERS["binary_multiplication"]("1001*000001") == "00000100" + "1."
    assert READERS["compute_sqrt"]("100101") == "110"
