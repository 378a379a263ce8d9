"""Language-modeling tasks: strings, targets and entropies compared with enumeration, regular expressions and Python."""

import contextlib
import io
import math
import re
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from stackexp.config.compose import compose
from stackexp.modules.transduction import Transduction
from stackexp.tasks import NO_TARGET, TASKS
from stackexp.tasks.generation import LANGUAGES, compute_source_entropy, find_source
from stackexp.training.objectives.formal_language import FormalLanguageObjective


def enumerate_strings(grammar: dict, length: int) -> dict[str, float]:
    """Return the probability of each string of this length, by expanding the leftmost nonterminal in all ways."""
    shortest = dict.fromkeys(grammar, 99)
    for _ in range(20):
        for symbol, rules in grammar.items():
            shortest[symbol] = min(sum(shortest.get(x, 1) for x in right) for right, _ in rules)
    found: dict[str, float] = defaultdict(float)
    pending = [("S", 1.0)]
    while pending:
        form, probability = pending.pop()
        if sum(shortest.get(x, 1) for x in form) > length:
            continue
        position = next((i for i, x in enumerate(form) if x in grammar), None)
        if position is None:
            found[form] += probability * (len(form) == length)
            continue
        for right, p in grammar[form[position]]:
            pending.append((form[:position] + right + form[position + 1 :], probability * p))
    return {form: probability for form, probability in found.items() if probability}


@pytest.mark.parametrize("name", LANGUAGES)
def test_sources_agree_with_enumeration(name):
    language, rng = LANGUAGES[name], np.random.default_rng(0)
    for length in range(1, 8 if name == "generate_hardest" else 11):
        strings = enumerate_strings(language.grammar, length)
        source, total = find_source(name, length), sum(strings.values())
        assert source.total["S"][length] == pytest.approx(total)
        assert bool(strings) == (length >= language.min_length and language.fit(length) == length)
        if not strings:
            continue
        counts = Counter(source.draw(rng, length) for _ in range(300))
        assert counts.keys() <= strings.keys()
        for text in sorted(strings, key=strings.get)[-3:]:
            p = strings[text] / total
            assert abs(counts[text] - 300 * p) <= 4.5 * math.sqrt(300 * p * (1 - p)) + 1e-9
        if name != "generate_hardest":
            entropy = -sum(p / total * math.log(p / total) for p in strings.values())
            assert compute_source_entropy(name, length) == pytest.approx(entropy, abs=1e-9)


def test_grammars_have_the_published_probabilities():
    """DuSell & Chiang 2020, Section 5.1: a geometric number of repetitions with mean m continues with m / (1 + m)."""
    grammars = {name.removeprefix("generate_"): language.grammar for name, language in LANGUAGES.items()}
    for name, symbol, expected in (
        ("marked_reversal", "S", [30 / 61, 30 / 61, 1 / 61]),
        ("unmarked_reversal", "S", [30 / 61, 30 / 61, 1 / 61]),
        ("padded_reversal", "S", [30 / 61, 30 / 61, 0.5 / 61, 0.5 / 61]),
        ("padded_reversal", "A", [30 / 31, 1 / 31]),
        ("dyck_2", "S", [1 / 2, 1 / 2]),
        ("dyck_2", "T", [39 / 80, 39 / 80, 1 / 80, 1 / 80]),
        ("hardest", "K", [1 / 3, 2 / 3]),
        ("hardest", "U", [1 / 3, 2 / 3]),
        ("hardest", "V", [1 / 2, 1 / 2]),
        ("hardest", "Q", [1 / 4, 3 / 4]),
        ("hardest", "D", [3 / 5, 2 / 5]),
        ("hardest", "T", [3 / 8, 3 / 8, 1 / 8, 1 / 8]),
    ):
        assert [p for _, p in grammars[name][symbol]] == pytest.approx(expected), (name, symbol)


@pytest.mark.parametrize(("max_length", "num_lengths"), [(80, 40), (39, 20)])
def test_the_bound_is_the_cross_entropy_of_the_source(max_length, num_lengths):
    """Marked reversal of 2 n + 1 symbols is one of 2^n strings and of the lengths trained on, over 2 n + 2 symbols."""
    task = TASKS["generate_marked_reversal"]
    expected = (40 * math.log(2) + math.log(num_lengths)) / 82
    assert task.entropy(81, max_length) == task.entropy(82, max_length) == pytest.approx(expected)
    pairs = TASKS["generate_unmarked_reversal"]  # of 2 to 80 symbols: 2 and 3 give 2, only 80 gives 80
    entropies = [pairs.entropy(length, 80) * (length + 1) - length / 2 * math.log(2) for length in (2, 80, 82)]
    assert entropies == pytest.approx([math.log(79 / 2), math.log(79), math.log(40)])
    assert TASKS["generate_hardest"].entropy is None
    objective = FormalLanguageObjective.__new__(FormalLanguageObjective)
    options = ["data.task=generate_marked_reversal", f"data.max_length={max_length}"]
    objective.config = compose(["formal/lstm"], options)
    record = objective._summarize_lengths({"length_081": {"accuracy": 0.5, "loss": 1.0}})
    assert record["loss_above_entropy"] == {"81": pytest.approx(1 - expected)}
    batch = task.sample(np.random.default_rng(0), 4, 20)
    assert (batch.inputs[:, 0] == 3).all()
    assert (batch.targets[:, -1] == 3).all()
    assert (batch.inputs[:, 1:] == batch.targets[:, :-1]).all()
    assert (batch.inputs[:, 1:10] == batch.inputs[:, :10:-1]).all()


@pytest.mark.parametrize(("types", "depth"), [(2, 3), (8, 5), (128, 3)])
def test_dyck_strings_are_balanced_and_reach_the_depth(types, depth):
    task = TASKS[f"dyck_{types}_{depth}"]
    for length in (2, 3, 40, 41):
        batch, deepest = task.sample(np.random.default_rng(length), 64, length), 0
        assert batch.inputs.shape[1] == batch.targets.shape[1] == length - length % 2
        for string, target, mask in zip(*batch, strict=True):
            stack, closing = [], [x >= types for x in string[1:]]
            for symbol in string:
                if symbol < types:
                    stack.append(symbol)
                else:
                    assert stack.pop() == symbol - types
                deepest = max(deepest, len(stack))
            assert not stack
            assert [*target] == [*string[1:], NO_TARGET]
            assert [*mask] == [*closing, False]
        assert deepest == min(depth, length // 2)


def test_closing_brackets_need_80_percent_of_the_probability_of_closing_brackets():
    """Opening brackets do not compete, as in Hewitt et al. 2020."""
    module = Transduction.__new__(Transduction)
    torch.nn.Module.__init__(module)
    module.config = type("Config", (), {"data": type("Data", (), {"task": "dyck_2_3"})})
    odds = torch.tensor([[[9.0, 9.0, math.log(4.1), 0.0], [0.0, 0.0, math.log(3.9), 0.0], [0.0, 0.0, -2.0, 1.0]]])
    assert module.predict(odds).tolist() == [[2, NO_TARGET, 3]]


@pytest.mark.parametrize("size", [3, 5])
def test_traces_print_what_python_prints(size):
    task = TASKS[f"repl_s{size}"]
    for length in (1, 2, 3, 20, 100):
        batch = task.sample(np.random.default_rng(length), 8, length)
        assert batch.inputs.shape[1] == task.count_tokens(length)
        for string, target, mask in zip(*batch, strict=True):
            text = "".join(task.symbols[i] for i in string)
            source = "\n".join(re.findall(r"^>>> (.*)$", text, re.M))
            assert len(source.splitlines()) == length + 1
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(source, {})
            assert [task.symbols[i] for i in target[mask]] == printed.getvalue().split()
            assert [*target] == [*string[1:], NO_TARGET]
    changed = re.findall(r"([a-e]), ([a-e]) = ([a-e]), ([a-e])\n", text)
    assert len(changed) == 66
    assert {(a, b) for a, b, *_ in changed} >= {("a", "b"), ("b", "a"), ("c", "a")}


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("mqar")])
def test_recalled_values_follow_the_keys(name):
    task = TASKS[name]
    half, most = task.num_symbols // 2, int(name.split("_")[1])
    for length in (3, 4, task.max_length):
        batch, pairs = task.sample(np.random.default_rng(length), 8, length), min(most, length // 3)
        for string, target, mask in zip(*batch, strict=True):
            memory = dict(zip(string[: 2 * pairs : 2], string[1 : 2 * pairs : 2] - half, strict=True))
            assert len(memory) == mask.sum() == pairs
            assert max(memory) < half
            assert {string[i]: target[i] for i in np.flatnonzero(mask)} == memory
            assert (target[~mask] == NO_TARGET).all()
            assert not mask[: 2 * pairs].any()
    assert task.num_symbols == 8192 or name.endswith("small")


def test_gaps_before_repeated_keys_follow_the_published_power_law():
    batch = TASKS["mqar_4_small"].sample(np.random.default_rng(0), 4000, 5)  # one pair, then three symbols
    shares = batch.mask.mean(0)[2:]
    expected = np.arange(1, 4) ** -0.99
    assert shares == pytest.approx(expected / expected.sum(), abs=0.03)
