"""The tasks of formal languages: shapes, seeds, errors, and how their strings are distributed."""

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest

from stackexp.config.formal_language import TASKS as SIZES
from stackexp.tasks import TASKS

OUTPUT_LENGTHS = {
    name: lambda n: n for name in ("reverse_string", "odds_first", "binary_multiplication", "bucket_sort")
}
OUTPUT_LENGTHS |= {name: lambda n: n + 1 for name in ("stack_manipulation", "binary_addition")}
OUTPUT_LENGTHS |= {"duplicate_string": lambda n: 2 * n, "compute_sqrt": lambda n: (n + 1) // 2}
CLASSES = [name for name in TASKS if name not in OUTPUT_LENGTHS]
MIN_LENGTHS = {"solve_equation": 3, "missing_duplicate": 2, "binary_addition": 3, "binary_multiplication": 3}
UNUSED = {"modular_arithmetic": "_", "modular_arithmetic_brackets": "x"}  # of the alphabet, but in no string


def sample(name: str, batch_size: int = 128, length: int = 40, seed: int = 0):
    return TASKS[name].sample(np.random.default_rng(seed), batch_size, length)


def strings(name: str, batch_size: int, length: int) -> list[str]:
    return [TASKS[name].text(row) for row in sample(name, batch_size, length).inputs]


def assert_uniform(found: Iterable, values: Iterable) -> None:
    """Every value about equally often (within 5 standard deviations), and no other."""
    counts, values = Counter(found), list(values)
    total, p = counts.total(), 1 / len(values)
    assert counts.keys() == set(values)
    deviation = max(abs(count - total * p) for count in counts.values())
    assert deviation <= 5 * np.sqrt(total * p * (1 - p)), counts


@pytest.mark.parametrize("name", SIZES)
def test_shapes_and_symbols(name):
    task = TASKS[name]
    assert (task.name, task.inputs, task.outputs, task.min_length) == (name, *SIZES[name][:2], MIN_LENGTHS.get(name, 1))
    for batch_size, length in (1, 5), (7, 40), (3, 41):
        batch = sample(name, batch_size, length)
        drawn = task.string_length(length)
        assert drawn == (39 if (name, length) == ("modular_arithmetic", 40) else length)
        answer = 1 if name in CLASSES else OUTPUT_LENGTHS[name](length)
        assert task.output_length(length) == answer
        assert batch.inputs.shape == (batch_size, drawn)
        assert batch.targets.shape == batch.mask.shape == (batch_size, answer)
        assert (batch.inputs.dtype, batch.targets.dtype, batch.mask.dtype) == (np.int64, np.int64, bool)
        for array in batch:
            assert array.flags.c_contiguous  # and writeable, as torch.from_numpy wants it
            assert array.flags.writeable


@pytest.mark.parametrize("name", SIZES)
def test_every_symbol_occurs(name):
    task, batch = TASKS[name], sample(name, 256, length=41)
    written = {task.symbols[i] for i in np.unique(batch.inputs)}
    assert written == set(task.symbols) - set(UNUSED.get(name, ""))
    assert len(np.unique(batch.targets)) == task.outputs


def test_ids_that_the_definitions_name():
    assert TASKS["missing_duplicate"].text([0, 1, 2, 3]) == "01_."
    assert TASKS["stack_manipulation"].text([0, 1, 2, 3, 4]) == "0 1 POP PUSH0 PUSH1"
    for name in "stack_manipulation", "binary_addition", "binary_multiplication":
        assert TASKS[name].answer_text([0, 1, 2]) == "01."
    for name in "modular_arithmetic", "modular_arithmetic_brackets", "solve_equation":
        assert TASKS[name].text(range(5)) == TASKS[name].answer_text(range(5)) == "01234"


@pytest.mark.parametrize("name", SIZES)
def test_the_generator_alone_decides(name):
    def same(a, b) -> bool:
        return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))

    np.random.seed(1)
    first = sample(name)
    np.random.seed(2)
    assert same(first, sample(name))
    assert not same(first, sample(name, seed=1))
    rng = np.random.default_rng(0)
    assert same(first, TASKS[name].sample(rng, 128, 40))
    assert not same(first, TASKS[name].sample(rng, 128, 40))


@pytest.mark.parametrize("name", SIZES)
def test_too_short(name):
    least = MIN_LENGTHS.get(name, 1)
    with pytest.raises(ValueError, match=f"^task {name}: length {least - 1} .* {least} or more$"):
        sample(name, 2, least - 1)
    sample(name, 2, least)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("length", [40, 500])
def test_classes_are_balanced(name, length):
    """About equally often, but for 0 where * makes it more likely."""
    classes = sample(name, 1000, length).targets[:, 0]
    share = np.bincount(classes, minlength=TASKS[name].outputs) / len(classes)
    least = 0.6 / len(share) if name.startswith("modular_arithmetic") else 0.8 / len(share)
    assert share.min() > least, share
    assert share.max() < 0.6, share


@pytest.mark.parametrize("name", ["binary_addition", "binary_multiplication"])
def test_operands_are_uniform(name):
    operator = TASKS[name].symbols[2]
    assert_uniform((s.index(operator) for s in strings(name, 4000, 12)), range(1, 11))
    split = [s.split(operator) for s in strings(name, 4000, 5)]
    assert_uniform([a for a, b in split if len(a) == 2], ["10", "01", "11"])
    assert_uniform([b for a, b in split if len(a) == 1], ["100", "010", "110", "001", "101", "011", "111"])


def test_numbers_to_take_the_root_of_are_uniform():
    assert_uniform(strings("compute_sqrt", 4000, 3), [f"{n:03b}" for n in range(1, 8)])


def test_the_stack_has_any_length():
    lengths = (sample("stack_manipulation", 4000, 12).inputs < 2).sum(1)
    assert_uniform(lengths.tolist(), range(1, 12))
    instructions = (word for s in strings("stack_manipulation", 1000, 12) for word in s.split()[1:])
    assert_uniform((word for word in instructions if word.startswith("P")), ["POP", "PUSH0", "PUSH1"])


@pytest.mark.parametrize("length", [12, 13])
def test_the_hole_is_anywhere(length):
    assert_uniform((s.index("_") for s in strings("missing_duplicate", 4000, length)), range(12))


def test_short_expressions():
    """All that there are of less than five symbols."""
    for length, pattern in enumerate(["d", "-d", "(d)", "(-d)"], 1):
        expected = [pattern.replace("d", digit) for digit in "01234"]
        assert_uniform(strings("modular_arithmetic_brackets", 1000, length), expected)
        assert_uniform(
            [s.split("=")[0] for s in strings("solve_equation", 1000, length + 2)], [pattern.replace("d", "x")]
        )


@pytest.mark.parametrize(
    ("name", "extra", "operators"), [("modular_arithmetic_brackets", 0, "+-*"), ("solve_equation", 2, "+-")]
)
def test_expressions_split_anywhere(name, extra, operators):
    """The left part of 20 symbols has 1 .. 16, all equally likely; so has any operator."""
    found = [outermost(s) for s in strings(name, 8000, 20 + extra)]
    assert_uniform((place - 1 for place, _ in found), range(1, 17))
    assert_uniform((operator for _, operator in found), operators)


def outermost(expression: str) -> tuple[int, str]:
    """Where the operator within the first bracket alone stands, and which it is."""
    depth = 0
    for place, symbol in enumerate(expression):
        depth += (symbol == "(") - (symbol == ")")
        if depth == 1 and symbol in "+-*" and expression[place - 1] != "(":
            return place, symbol
    raise AssertionError(expression)


def test_the_unknown_is_the_first_digit_from_a_random_place():
    """Of (d+d)=d: from places 4, 0, 1 the first, from 2, 3 the second."""
    first = [bool(re.match(r"\(x", s)) for s in strings("solve_equation", 4000, 7)]
    assert abs(np.mean(first) - 0.6) < 0.04


def test_slots():
    """Who must hold the whole string, and who its open brackets, of which there are about twenty at length 500."""
    whole = dict.fromkeys(["reverse_string", "odds_first", "duplicate_string", "stack_manipulation"], 500)
    brackets = {"modular_arithmetic_brackets": 21, "solve_equation": 21}
    needed = {name: task.needs_slots(500) for name, task in TASKS.items()}
    assert needed == dict.fromkeys(TASKS) | whole | brackets
    assert [TASKS["modular_arithmetic_brackets"].needs_slots(length) for length in (1, 4, 5, 9, 40)] == [0, 0, 1, 2, 9]
    signs = np.array([(s == "(") - (s == ")") for s in TASKS["modular_arithmetic_brackets"].symbols])
    deepest = signs[sample("modular_arithmetic_brackets", 1000, 500).inputs].cumsum(1).max()
    assert 15 < deepest < 25
