"""The methods of `certify` for regular tasks: automata, grammars, tables, L*, loops and the closure of states."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from known_networks import Exact, Forgetful

from stackexp.certification import regular
from stackexp.certification.automata import FORBIDDEN, NO_STRING, REGULAR, Automaton, Grammar, find_difference
from stackexp.certification.certify import Certificate, add_loops, add_task_strings
from stackexp.config.compose import compose
from stackexp.tasks import TASKS


@pytest.mark.parametrize("task", REGULAR)
def test_automata_of_regular_tasks_have_the_labels(task):
    known, rng = REGULAR[task](), np.random.default_rng(0)
    automaton = known.automaton
    for length in (*range(TASKS[task].min_length, 13), 200):
        batch = TASKS[task].sample(rng, 100, length)
        states = automaton.run(batch.inputs)
        if not TASKS[task].answers_every_token:
            states = states[:, -1:]
        assert (automaton.outputs[states] == batch.targets).all()
        assert known.grammar.are_strings(batch.inputs).all()
        assert all(known.contains(tuple(row)) for row in batch.inputs.tolist())
    num_states = {
        "parity_check": 2,
        "missing_duplicate": 11,
        "modular_arithmetic": 51,
        "word_problem_s3": 6,
        "word_problem_s5": 120,
    }
    assert automaton.num_states == num_states.get(task, 60 if task.startswith("word_problem") else 5)


def test_strings_that_a_grammar_forbids_have_no_output():
    known, rng = REGULAR["modular_arithmetic"](), np.random.default_rng(0)
    strings = rng.integers(0, 9, (5000, 3))
    is_string = known.grammar.are_strings(strings)
    assert set(map(tuple, strings[is_string])) <= {(a, o, b) for a in range(5) for o in (5, 6, 7) for b in range(5)}
    assert is_string.sum() == pytest.approx(5000 * 75 / 729, abs=100)
    assert ((known.automaton.outputs[known.automaton.run(strings)[:, -1]] != NO_STRING) == is_string).all()
    drawn = known.grammar.draw(rng, 2000, 4)
    assert (known.grammar.run(drawn) != FORBIDDEN).all()
    assert np.bincount(drawn[:, 2], minlength=9)[:5] / 2000 == pytest.approx(1 / 5, abs=0.05)


def test_a_difference_outside_of_the_task_rejects_no_network(monkeypatch):
    known, loaded = REGULAR["missing_duplicate"](), SimpleNamespace(config=compose(["formal/stacktrans"]))
    for string, is_of_task in (((0, 2, 0, 1), True), ((2, 0, 0, 0, 3), True), ((0, 2, 1, 1), False)):
        found = (string, None) if is_of_task else (None, string)
        monkeypatch.setattr(regular, "repeat_loops", lambda *_, found=found: (*found, 8, 0))
        result = Certificate("missing_duplicate")
        add_loops(result, loaded, None, known, 100)
        assert result.differs_at == [string] * is_of_task
        assert result.measured[0].endswith("symbols") == is_of_task


def test_a_difference_outside_of_the_task_hides_none_inside():
    """The first wrong string is no string of the task; a later one is."""
    known = REGULAR["missing_duplicate"]()
    outside, inside = ("01_.".index(symbol) for symbol in "00_1"), ("01_.".index(symbol) for symbol in "01_1")
    wrong = [tuple(outside), tuple(inside)]
    assert [known.contains(string) for string in wrong] == [False, True]
    strings = np.array(list(itertools.product(range(4), repeat=4)))
    answers = known.automaton.outputs[known.automaton.run(strings)[:, -1]]
    for string in wrong:
        answers[(strings == string).all(1)] ^= 1
    table = regular.Answers([strings], [answers])
    assert table.compare(known.automaton) == (2, wrong[0])
    assert table.compare(known.automaton, known.contains) == (2, wrong[1])


class LateMistakes:
    """A network for missing_duplicate whose state is the string. It errs late, first outside of the task."""

    batch_size = None

    def __init__(self, automaton):
        self.automaton = automaton

    def read(self, cache, tokens):
        return np.concatenate([cache, tokens], 1) if isinstance(cache, np.ndarray) else np.array(tokens)

    def answer(self, cache, rows):
        right = self.automaton.outputs[self.automaton.run(cache)[:, -1]].clip(0)
        outside = np.array([tuple(string[:3]) == (0, 2, 1) for string in cache]) & (cache.shape[1] >= 20)
        inside = (cache[:, 0] == 2) & (cache.shape[1] >= 24)
        return torch.eye(2)[right ^ (outside | inside)][:, None]


def test_loops_go_on_after_a_difference_outside_of_the_task():
    known = REGULAR["missing_duplicate"]()
    machine = LateMistakes(known.automaton)
    found, outside, _, _ = regular.repeat_loops(machine, known, 300, 100)
    assert (len(outside), outside[:3], known.contains(outside)) == (20, (0, 2, 1), False)
    assert (len(found), found[0], known.contains(found)) == (24, 2, True)
    found, _, _, _ = regular.repeat_loops(machine, known, 300, 10)  # answers every 101 symbols
    assert (len(found) > 24, found[0], known.contains(found)) == (True, 2, True)


@dataclass
class WrongAfterLateHoles:
    """A network for missing_duplicate that is wrong if the hole comes after symbol 40."""

    automaton: Automaton
    batch_size: int | None = None

    def read(self, cache, tokens):
        return tokens

    def answer(self, cache, rows):
        is_late = (cache == "01_.".index("_")).argmax(1) >= 40
        return torch.eye(2)[self.automaton.outputs[self.automaton.run(cache)[:, -1]] ^ is_late][:, None]


def test_random_strings_include_those_of_the_task():
    """Hardly any random string of the grammar of missing_duplicate is one of the task."""
    task, known, result = TASKS["missing_duplicate"], REGULAR["missing_duplicate"](), Certificate("missing_duplicate")
    machine = WrongAfterLateHoles(known.automaton)
    add_task_strings(result, machine, task, 1000, 40)
    assert result.measured == [
        "960 random strings of the task of up to 40 symbols, lengths in geometric steps: network and labels differ on 0"
    ]
    add_task_strings(result, machine, task, 1000, 400)
    assert not result.measured[1].endswith("differ on 0")
    assert all(known.contains(string) and string.index("01_.".index("_")) >= 40 for string in result.differs_at)
    assert result.verdict.startswith("differs at ")


def test_automata_are_compared_as_by_brute_force():
    rng = np.random.default_rng(1)
    strings = [s for n in range(1, 9) for s in itertools.product(range(2), repeat=n)]
    differing = 0
    for states in [3] * 30 + [8] * 60:
        first, second = (
            Automaton(rng.integers(0, states, (states, 2)), np.arange(states) // (states - 1)) for _ in "ab"
        )
        outputs = [[a.outputs[a.run(np.array([s]))[0, -1]] for s in strings] for a in (first, second)]
        expected = next((s for s, a, b in zip(strings, *outputs, strict=True) if a != b), None)
        found = find_difference(first, second)
        assert (found and len(found)) == (expected and len(expected))
        differing += found is not None
    assert 20 < differing < 90


@pytest.mark.parametrize("name", ["even_pairs", "missing_duplicate", "modular_arithmetic", "word_problem_s3"])
def test_each_method_accepts_the_automaton_and_rejects_a_wrong_state(name):
    known, rng = REGULAR[name](), np.random.default_rng(0)
    automaton, grammar = known.automaton, known.grammar
    last = 0 if name == "missing_duplicate" else -1  # nothing follows its last states
    wrong = int(np.flatnonzero(automaton.outputs != NO_STRING)[last])
    streams = grammar.draw(rng, 40, 60)
    for machine, is_right in ((Exact(automaton), True), (Exact(automaton, wrong), False)):
        table = regular.tabulate(machine, 5, grammar)
        drawn, _ = regular.sample(machine, streams, [7, 30, 31, 32], grammar)
        counts = {"even_pairs": 62, "missing_duplicate": 2 * (4 + 32), "modular_arithmetic": 5 + 75 + 1125}
        assert table.count == (counts | {"word_problem_s3": 9330})[name]
        lengths = {"missing_duplicate": (6, 30, 32), "modular_arithmetic": (7, 29, 31)}.get(name, (7, 30, 31, 32))
        assert drawn.count == sum(grammar.are_strings(streams[:, :length]).sum() for length in lengths)
        learned = regular.learn(machine, [table, drawn], known)
        closed, count = regular.close_states(machine, grammar)
        assert count in (automaton.num_states, automaton.num_states + 1)
        found = [find_difference(learned, automaton), find_difference(closed, automaton)]
        found += [table.compare(automaton)[1], drawn.compare(automaton)[1]]
        found += [regular.repeat_loops(machine, known, 300, 300)[0]]
        for string in found:
            assert is_right == (string is None)
            assert is_right or automaton.run(np.array([string]))[0, -1] == wrong


def test_states_after_which_nothing_may_follow_are_closed():
    grammar = Grammar(np.array([[1], [FORBIDDEN]]), np.array([False, True]))
    closed, count = regular.close_states(Exact(Automaton(np.array([[1], [1]]), np.array([0, 1]))), grammar)
    assert (closed.outputs.tolist(), count) == ([NO_STRING, 1, NO_STRING], 2)


@pytest.mark.parametrize("dense_length", [500, 61, 60, 20])
def test_a_wrong_answer_in_one_phase_of_a_loop_is_found(dense_length):
    found, _, loops, _ = regular.repeat_loops(Forgetful(), REGULAR["parity_check"](), 500, dense_length)
    assert (found, loops) == ((1,) * 61, 8)
