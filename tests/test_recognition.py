"""Recognition of languages: labels compared with regular expressions and enumeration, and the share of positives."""

import itertools
import re

import numpy as np
import pytest

from stackexp.tasks import TASKS
from stackexp.tasks.recognition import LANGUAGES, edit

FORM = {
    "parity": r"0*1(0*10*1)*0*",
    "repeat_01": r"(01)*",
    "first": r"1[01]*",
    "even_pairs": r"|0|1|0[01]*0|1[01]*1",
    "dyck_2_3": None,
}
D1 = r"(?:\(\)|\[\])*"
D2 = rf"(?:\({D1}\)|\[{D1}\])*"
FORM["dyck_2_3"] = rf"(?:\({D2}\)|\[{D2}\])*"


def solve_stack(text: str) -> bool:
    match = re.fullmatch(r"([01]*)((?:\+[01]|-)*)#([01]*)", text)
    if not match:
        return False
    stack = match[1]
    for word in re.findall(r"\+[01]|-", match[2]):
        if word == "-" and not stack:
            return False
        stack = stack[:-1] if word == "-" else stack + word[1]
    return stack[::-1] == match[3]


def solve_modular(text: str) -> bool:
    if not re.fullmatch(r"[0-4]([-+*][0-4])*=[0-4]", text):
        return False
    result = text[0]
    for i in range(1, len(text) - 2, 2):
        result = str(eval(f"({result}){text[i : i + 2]}"))
    return int(result) % 5 == int(text[-1])


def solve_pair(pattern: str, relation) -> object:
    def solve(text: str) -> bool:
        match = re.fullmatch(pattern, text)
        return bool(match) and relation(*match.groups())

    return solve


def value(bits: str) -> int:
    return sum(2**i for i, bit in enumerate(bits) if bit == "1")


SOLVERS = {
    **{name: lambda text, form=form: bool(re.fullmatch(form, text)) for name, form in FORM.items()},
    "cycle_navigation": solve_pair(
        r"([<=>]*)([0-4])", lambda moves, end: (sum(map("<=>".index, moves)) - len(moves)) % 5 == int(end)
    ),
    "modular_arithmetic_simple": solve_modular,
    "majority": lambda text: sorted(text)[(len(text) - 1) // 2] == "1" if text else False,
    "stack_manipulation": solve_stack,
    "marked_reversal": solve_pair(r"([01]*)#([01]*)", lambda a, b: [*a] == [*reversed(b)]),
    "unmarked_reversal": lambda text: len(text) % 2 == 0 and all(a == b for a, b in zip(text, text[::-1], strict=True)),
    "marked_copy": lambda text: bool(re.fullmatch(r"([01]*)#\1", text)),
    "missing_duplicate": lambda text: bool(
        re.fullmatch(r"(?P<a>[01]*)_(?P<b>[01]*)(?P=a)1(?P=b)|(?P<c>[01]*)1(?P<d>[01]*)(?P=c)_(?P=d)", text)
    ),
    "odds_first": solve_pair(r"([01]*)#([01]*)", lambda a, b: len(a) == len(b) and interleave(b) == a),
    "binary_addition": solve_pair(r"([01]+)\+([01]+)=([01]+)", lambda x, y, z: value(x) + value(y) == value(z)),
    "binary_multiplication": solve_pair(r"([01]+)\*([01]+)=([01]+)", lambda x, y, z: value(x) * value(y) == value(z)),
    "compute_sqrt": solve_pair(r"([01]+)=([01]+)", lambda x, z: value(z) ** 2 <= value(x) < (value(z) + 1) ** 2),
    "bucket_sort": solve_pair(
        r"([1-5]*)#([1-5]*)",
        lambda a, b: (
            [a.count(s) for s in "12345"] == [b.count(s) for s in "12345"]
            and all(x <= y for x, y in itertools.pairwise(b))
        ),
    ),
}


def interleave(text: str) -> str:
    half = (len(text) + 1) // 2
    return "".join(a + b for a, b in itertools.zip_longest(text[:half], text[half:], fillvalue=""))


@pytest.mark.parametrize("name", LANGUAGES)
def test_labels(name):
    task, shares = TASKS[f"recognize_{name}"], []
    for length in [*range(task.min_length, 9), 40, 41, 81, 500]:
        batch = task.sample(np.random.default_rng(length), 64 if length < 100 else 8, length)
        texts = ["".join(task.symbols[i] for i in row) for row in batch.inputs]
        assert [int(SOLVERS[name](text)) for text in texts] == batch.targets[:, 0].tolist()
        assert length - 1 <= batch.inputs.shape[1] <= length
        if length > 8:
            shares.append(batch.targets.mean())
    assert 0.35 < np.mean(shares) < 0.65


def test_lengths_begin_with_the_empty_string():
    labels = {}
    for name in LANGUAGES:
        task = TASKS[f"recognize_{name}"]
        empty, single = (task.sample(np.random.default_rng(0), 4, length) for length in (0, 1))
        assert empty.inputs.shape == (4, 0)
        assert single.inputs.shape[1] == (
            name not in ("repeat_01", "dyck_2_3", "unmarked_reversal", "missing_duplicate")
        )
        labels[name] = set(empty.targets[:, 0].tolist())
    positive = {"even_pairs", "repeat_01", "dyck_2_3", "unmarked_reversal"}
    assert labels == {name: {int(name in positive)} for name in LANGUAGES}
    assert TASKS["recognize_marked_copy"].find_unseen_length(40) == 41
    assert TASKS["recognize_dyck_2_3"].find_unseen_length(40) == 42
    assert TASKS["modular_arithmetic"].find_unseen_length(41) == 43


@pytest.mark.parametrize("name", LANGUAGES)
def test_membership_and_positive_strings_agree_with_enumeration(name):
    """Drawn positive strings are members, and all members of the short lengths are drawn."""
    language, rng = LANGUAGES[name], np.random.default_rng(0)
    longest = {2: 8, 3: 7, 4: 6, 5: 6}.get(len(language.alphabet), 4 if len(language.alphabet) < 9 else 3)
    for length in range(longest + 1):
        texts = list(map("".join, itertools.product(language.alphabet, repeat=length)))
        members = {text for text in texts if SOLVERS[name](text)}
        assert members == set(filter(language.contains, texts))
        if length >= language.min_length and (length - language.min_length) % language.step == 0:
            drawn = {language.draw(rng, length) for _ in range(20 * len(members) + 50)}
            assert drawn <= members
            assert len(drawn) > (0.2 if "=" in language.alphabet else 0.7) * len(
                members
            )  # parts of numbers vary little


def test_negatives_are_random_strings_or_near_positive_ones():
    rng = np.random.default_rng(0)
    distances = [sum(a != b for a, b in zip("0" * 50, edit(rng, "0" * 50, "01"), strict=True)) for _ in range(500)]
    assert 0.5 < np.mean(distances) < 2, "half of the insertions and no deletion of a zero can be seen"
    text = "01" * 25  # an insertion or a deletion shifts it, so only replacements are near: 1/3 of single edits
    near = [sum(a != b for a, b in zip(text, edit(rng, text, "01"), strict=True)) <= 1 for _ in range(2000)]
    assert 1 / 2 / 3 <= np.mean(near) < 0.24, "half of the strings have one edit"
    task = TASKS["recognize_marked_copy"]
    batch = task.sample(rng, 2000, 41)
    negatives = batch.inputs[batch.targets[:, 0] == 0]
    near = [(row[:20] == row[21:]).sum() + (row[20] == 2) >= 17 for row in negatives]
    assert 0.12 < np.mean(near) < 0.4, "edited at few positions, if no insertion has shifted the copy"
