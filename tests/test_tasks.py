"""Formal-language tasks: shapes, seeds, errors, the distribution of strings, and answers."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest

from stackexp.tasks import CHOMSKY_TASKS as TASKS

OUTPUT_LENGTHS = {
    **dict.fromkeys(["reverse_string", "odds_first", "binary_multiplication", "bucket_sort"], lambda n: n),
    **dict.fromkeys(["stack_manipulation", "binary_addition"], lambda n: n + 1),
    "duplicate_string": lambda n: 2 * n,
    "compute_sqrt": lambda n: (n + 1) // 2,
}
CLASSIFICATION = [name for name in TASKS if name not in OUTPUT_LENGTHS]  # the answer is one symbol
MIN_LENGTHS = {"solve_equation": 3, "missing_duplicate": 2, "binary_addition": 3, "binary_multiplication": 3}
UNUSED_SYMBOLS = {"modular_arithmetic": "_", "modular_arithmetic_brackets": "x"}
all_tasks = pytest.mark.parametrize("name", TASKS)


def format_symbols(ids: Iterable[int], names: Sequence[str]) -> str:
    """Return the names of these ids, separated by spaces if one has several characters."""
    separator = " " if any(len(name) > 1 for name in names) else ""
    return separator.join(names[i] for i in ids)


def sample(name: str, batch_size: int = 128, length: int = 40, seed: int = 0):
    return TASKS[name].sample(np.random.default_rng(seed), batch_size, length)


def sample_strings(name: str, batch_size: int, length: int) -> list[str]:
    return [format_symbols(row, TASKS[name].symbols) for row in sample(name, batch_size, length).inputs]


def assert_uniform(found: Iterable, values: Iterable) -> None:
    """Check that each value occurs about equally often (within 5 standard deviations) and no other value occurs."""
    counts, values = Counter(found), list(values)
    total, p = counts.total(), 1 / len(values)
    assert counts.keys() == set(values)
    deviation = max(abs(count - total * p) for count in counts.values())
    assert deviation <= 5 * np.sqrt(total * p * (1 - p)), counts


@all_tasks
def test_batch_shapes_and_dtypes(name):
    task, minimum = TASKS[name], MIN_LENGTHS.get(name, 1)
    assert (task.name, task.min_length) == (name, minimum)
    with pytest.raises(ValueError, match=f"^task {name}: length {minimum - 1} is too short; use at least {minimum}$"):
        sample(name, 2, minimum - 1)
    for batch_size, length in (1, 5), (7, 40), (3, 41):
        batch = sample(name, batch_size, length)
        string_length = 39 if (name, length) == ("modular_arithmetic", 40) else length
        output_length = 1 if name in CLASSIFICATION else OUTPUT_LENGTHS[name](length)
        assert task.output_length(length) == output_length
        assert batch.inputs.shape == (batch_size, string_length)
        assert batch.targets.shape == batch.mask.shape == (batch_size, output_length)
        assert (batch.inputs.dtype, batch.targets.dtype, batch.mask.dtype) == (np.int64, np.int64, bool)
        for array in batch:
            assert array.flags.c_contiguous  # as torch.from_numpy requires
            assert array.flags.writeable


@all_tasks
def test_every_symbol_occurs(name):
    task, batch = TASKS[name], sample(name, 256, length=41)
    assert {task.symbols[i] for i in np.unique(batch.inputs)} == set(task.symbols) - set(UNUSED_SYMBOLS.get(name, ""))
    assert len(np.unique(batch.targets)) == task.num_answer_symbols


@all_tasks
def test_strings_depend_only_on_the_generator_state(name):
    def same(a, b) -> bool:
        return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))

    first = sample(name)
    assert not same(first, sample(name, seed=1))
    rng = np.random.default_rng(0)
    np.random.seed(1)
    assert same(first, TASKS[name].sample(rng, 128, 40))
    assert not same(first, TASKS[name].sample(rng, 128, 40))


@pytest.mark.parametrize("name", CLASSIFICATION)
@pytest.mark.parametrize("length", [40, 500])
def test_classes_are_balanced(name, length):
    """Classes occur about equally often, except that products make 0 more frequent."""
    answers = sample(name, 1000, length).targets[:, 0]
    share = np.bincount(answers, minlength=TASKS[name].num_answer_symbols) / len(answers)
    minimum = 0.6 / len(share) if name.startswith("modular_arithmetic") else 0.8 / len(share)
    assert share.min() > minimum, share
    assert share.max() < 0.6, share


@pytest.mark.parametrize("name", ["binary_addition", "binary_multiplication"])
def test_operands_are_uniform(name):
    operator = TASKS[name].symbols[2]
    assert_uniform((s.index(operator) for s in sample_strings(name, 4000, 12)), range(1, 11))
    pairs = [s.split(operator) for s in sample_strings(name, 4000, 5)]
    assert_uniform([a for a, b in pairs if len(a) == 2], ["10", "01", "11"])
    assert_uniform([b for a, b in pairs if len(a) == 1], ["100", "010", "110", "001", "101", "011", "111"])


def test_radicands_are_uniform():
    assert_uniform(sample_strings("compute_sqrt", 4000, 3), [f"{n:03b}" for n in range(1, 8)])


def test_stack_lengths_and_instructions_are_uniform():
    lengths = (sample("stack_manipulation", 4000, 12).inputs < 2).sum(1)
    assert_uniform(lengths.tolist(), range(1, 12))
    words = (word for s in sample_strings("stack_manipulation", 1000, 12) for word in s.split()[1:])
    assert_uniform((word for word in words if word.startswith("P")), ["POP", "PUSH0", "PUSH1"])


@pytest.mark.parametrize("length", [12, 13])
def test_the_hole_position_is_uniform(length):
    assert_uniform((s.index("_") for s in sample_strings("missing_duplicate", 4000, length)), range(12))


def test_short_expressions_are_uniform():
    for length, pattern in enumerate(["d", "-d", "(d)", "(-d)"], 1):
        expected = [pattern.replace("d", digit) for digit in "01234"]
        assert_uniform(sample_strings("modular_arithmetic_brackets", 1000, length), expected)
        left_sides = [s.split("=")[0] for s in sample_strings("solve_equation", 1000, length + 2)]
        assert_uniform(left_sides, [pattern.replace("d", "x")])


@pytest.mark.parametrize(
    ("name", "extra", "operators"), [("modular_arithmetic_brackets", 0, "+-*"), ("solve_equation", 2, "+-")]
)
def test_the_outermost_split_and_operator_are_uniform(name, extra, operators):
    """In an expression of 20 symbols the left part has 1 .. 16."""
    found = [find_outermost_operator(s) for s in sample_strings(name, 8000, 20 + extra)]
    assert_uniform((position - 1 for position, _ in found), range(1, 17))
    assert_uniform((operator for _, operator in found), operators)


def find_outermost_operator(expression: str) -> tuple[int, str]:
    depth = 0
    for position, symbol in enumerate(expression):
        depth += (symbol == "(") - (symbol == ")")
        if depth == 1 and symbol in "+-*" and expression[position - 1] != "(":
            return position, symbol
    raise AssertionError(expression)


def test_x_replaces_the_first_digit_after_a_random_position():
    """In (d+d)=d, positions 4, 0 and 1 replace the first digit; 2 and 3 the second."""
    first = [bool(re.match(r"\(x", s)) for s in sample_strings("solve_equation", 4000, 7)]
    assert abs(np.mean(first) - 0.6) < 0.04


def test_required_slots():
    """Some tasks need the whole string on the stack, expressions only their open brackets."""
    whole = dict.fromkeys(["reverse_string", "odds_first", "duplicate_string", "stack_manipulation"], 500)
    brackets = {"modular_arithmetic_brackets": 21, "solve_equation": 21}
    assert {name: task.required_slots(500) for name, task in TASKS.items()} == dict.fromkeys(TASKS) | whole | brackets
    task = TASKS["modular_arithmetic_brackets"]
    assert [task.required_slots(length) for length in (1, 4, 5, 9, 40)] == [0, 0, 1, 2, 9]
    signs = np.array([(s == "(") - (s == ")") for s in task.symbols])
    deepest = signs[sample(task.name, 1000, 500).inputs].cumsum(1).max()
    assert 15 < deepest < 25


# Answers, compared with reference solvers for one string

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
