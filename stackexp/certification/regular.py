"""Certify a network on a regular task: tables of all short strings, random strings, loops, L*, exact repetition."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from aalpy.base import SUL, Oracle
from aalpy.learning_algs import run_Lstar
from torch import Tensor
from torch.nn import functional as F

from stackexp.certification.automata import (
    FORBIDDEN,
    NO_STRING,
    Automaton,
    Grammar,
    RegularTask,
    build_automaton,
    find_difference,
)
from stackexp.certification.machine import (
    NetworkMachine,
    ReadState,
    hash_rows,
    join_rows,
    list_prefixes,
    list_shapes,
    measure_gaps,
    select_rows,
    walk_prefixes,
)
from stackexp.inspection.states import find_centers, square_distances

DEAD = -1  # the transition by a symbol that may not follow, until all states are numbered
MAX_STATES = 8192  # of the search for exact repetition
MIN_QUERIES = 1000  # L* may ask at least this many prefixes,
QUERIES = 20  # and this many for each transition of the task's automaton; it needs about 5
BATCH_SIZE = 128  # rows of each batch for networks whose states are enumerated
MAX_LOOPS = 1024  # of more, as many are drawn at random
STRIDE = 101  # symbols between two answers of a long loop: prime, so that every symbol of a word has its turn
PERIOD = 100  # symbols between two states of a loop that are compared: a multiple of all words' lengths


@dataclass
class Answers:
    """The network's answers to strings, with the smallest gap between its two largest logits."""

    strings: list[np.ndarray]  # [B, L] for each length
    answers: list[np.ndarray]  # [B] for each length; NO_STRING for prefixes that are no strings of the task
    gap: float = float("inf")

    @property
    def count(self) -> int:
        """The number of strings."""
        return sum(int((answers != NO_STRING).sum()) for answers in self.answers)

    def compare(
        self, automaton: Automaton, contains: Callable[[tuple[int, ...]], bool] = lambda string: True
    ) -> tuple[int, tuple[int, ...] | None]:
        """Return on how many strings the automaton differs, and the first of these that the task has (`contains`).

        The empty string does not count.
        """
        differing, first = 0, None
        for strings, answers in zip(self.strings, self.answers, strict=True):
            if not strings.shape[1]:
                continue
            wrong = np.flatnonzero(automaton.outputs[automaton.run(strings)[:, -1]] != answers)
            differing += len(wrong)
            if first is None:
                shown = (tuple(map(int, strings[row])) for row in wrong)
                first = next(filter(contains, shown), None)
        return differing, first


def ask(machine: NetworkMachine, cache: ReadState, is_string: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the answers [B] to the prefixes read so far, and the smallest gap. `is_string` [B]: which are strings."""
    if not is_string.any():
        return np.full(len(is_string), NO_STRING), float("inf")
    logits = machine.answer(cache, len(is_string))[:, 0]
    answers = np.where(is_string, logits.argmax(-1).numpy(), NO_STRING)
    return answers, float(measure_gaps(logits)[is_string].min())


def tabulate(machine: NetworkMachine, length: int, grammar: Grammar) -> Answers:
    """Return the answers to all strings of 1 .. `length` symbols, each length in lexicographic order."""
    levels = list_prefixes(grammar, length)
    table = Answers([strings for strings, _ in levels], [np.full(len(strings), NO_STRING) for strings, _ in levels])
    for depth, prefixes, cache in walk_prefixes(machine, levels):
        is_string = grammar.are_strings(table.strings[depth][prefixes])
        table.answers[depth][prefixes], gap = ask(machine, cache, is_string)
        table.gap = min(table.gap, gap)
    return table


def sample(
    machine: NetworkMachine, streams: np.ndarray, lengths: Sequence[int], grammar: Grammar
) -> tuple[Answers, list[dict[int, Any]]]:
    """Return the answers to prefixes of random strings [B, L] at some lengths, and the slots [B, H, S, D] there.

    A length at which no prefix is a string is reduced by 1.
    """
    found, contents, cache, read = Answers([], []), [], ReadState(), 0
    for wanted in lengths:
        length = wanted - (not grammar.are_strings(streams[:, :wanted]).any())
        if length <= read:
            continue
        cache, read = machine.read(cache, streams[:, read:length]), length
        answers, gap = ask(machine, cache, grammar.are_strings(streams[:, :length]))
        found.strings.append(streams[:, :length])
        found.answers.append(answers)
        found.gap = min(found.gap, gap)
        contents.append({layer: state.slots for layer, state in cache.states.items()})
    return found, contents


def repeat_loops(
    machine: NetworkMachine, task: RegularTask, length: int, dense_length: int
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None, int, int]:
    """Repeat every word of one or two symbols after a shortest string to each state of the automaton.

    The network answers after every symbol, up to `dense_length` symbols, then after every STRIDE.

    Returns:
        The shortest string of the task with an answer that differs from the automaton's, up to `length` symbols. After
        `dense_length` symbols, it is the shortest one within the STRIDE symbols before a wrong answer.
        The shortest such string before it that the task does not have.
        The number of loops.
        The number of loops in which the states of network and automaton repeat bit for bit after PERIOD symbols, so
        that all later answers are known; 0 without `machine.batch_size`.
    """
    strings = list_loops(task, length)
    states, cache, repeated, count = task.automaton.run(strings), ReadState(), 0, len(strings)
    expected, previous = task.automaton.outputs[states], [(b"", -1)] * count
    outside: tuple[int, ...] | None = None
    end, size = 0, max(1, (machine.batch_size or 0) // count)  # symbols whose answers are asked in one batch
    while end < length and repeated < count:
        start, end = end, min(end + size, dense_length) if end < dense_length else min(end + STRIDE, length)
        if end > dense_length:
            before, cache = cache, machine.read(cache, strings[:, start:end])
            if (_ask_strings(machine, cache, expected[:, end - 1]) == expected[:, end - 1]).all():
                continue
            cache = before
        after = []
        for i in range(start, end):
            cache = machine.read(cache, strings[:, i : i + 1])
            after.append(cache)
        wrong = ask_each(machine, after, expected[:, start:end].T) != expected[:, start:end].T
        for i, row in np.argwhere(wrong):  # the shortest strings first
            string = tuple(map(int, strings[row, : start + i + 1]))
            if task.contains(string):
                return string, outside, count, repeated
            outside = outside or string
        for i in range(start, end):
            if machine.batch_size and (i + 1) % PERIOD == 0:
                current = list(zip(hash_rows(after[i - start]), states[:, i], strict=True))
                repeated = sum(a == b for a, b in zip(current, previous, strict=True))
                previous = current
    return None, outside, count, repeated


def list_loops(task: RegularTask, length: int) -> np.ndarray:
    """Return every word of one or two symbols repeated after a shortest string to each state: [loops, length].

    Of more than MAX_LOOPS, as many are drawn at random. Words that the grammar does not allow are left out.
    """
    automaton, num_symbols = task.automaton, task.grammar.num_symbols
    words: list[tuple[int, ...]] = [(symbol,) * 2 for symbol in range(num_symbols)]
    words += [word for word in product(range(num_symbols), repeat=2) if word[0] != word[1]]
    access: dict[int, tuple[int, ...]] = {0: ()}
    for state in (reached := [0]):  # grows within the loop
        for symbol in range(num_symbols):
            if (target := int(automaton.transitions[state, symbol])) not in access:
                access[target] = (*access[state], symbol)
                reached.append(target)
    shown = min(length, max(map(len, access.values())) + 4)  # the grammar allows what follows if it allows this
    starts = [(access[state], word) for state in reached for word in words]
    states = task.grammar.run(np.array([[*start, *word * shown][:shown] for start, word in starts]))
    kept = np.flatnonzero(states != FORBIDDEN)
    if len(kept) > MAX_LOOPS:
        kept = np.sort(np.random.default_rng(0).choice(kept, MAX_LOOPS, replace=False))
    return np.array([[*starts[i][0], *starts[i][1] * length][:length] for i in kept])


def ask_each(machine: NetworkMachine, caches: list[ReadState], expected: np.ndarray) -> np.ndarray:
    """Return the answers [N, B] in each of N states, asked together if `machine.batch_size` and the shapes allow it.

    `expected` [N, B] are those of the automaton, which has NO_STRING for prefixes that are no strings.
    """
    if machine.batch_size and all(list_shapes(cache) == list_shapes(caches[0]) for cache in caches):
        return _ask_strings(machine, join_rows(caches), expected.ravel()).reshape(expected.shape)
    return np.stack([_ask_strings(machine, *pair) for pair in zip(caches, expected, strict=True)])


def _ask_strings(machine: NetworkMachine, cache: ReadState, expected: np.ndarray) -> np.ndarray:
    return ask(machine, cache, expected != NO_STRING)[0]


class _QueryLimitError(Exception):
    """Raised when L* asks too many strings, so that there is no small automaton."""


class _Network(SUL):
    """The network as aalpy's system under learning: the outputs are its answers after each symbol.

    The empty string is no input of a task. Its output is that of the task's automaton, so that both have one form.
    Words that are no strings of the task have the output NO_STRING.
    """

    def __init__(self, machine: NetworkMachine, task: RegularTask, max_queries: int) -> None:
        super().__init__()
        self.machine, self.grammar, self.max_queries = machine, task.grammar, max_queries
        empty_answer = int(task.automaton.outputs[0])
        # (state of the network, of the grammar, answer) by word
        self.known: dict[tuple[int, ...], tuple[ReadState, int, int]] = {(): (ReadState(), 0, empty_answer)}

    def pre(self) -> None:
        self.word: tuple[int, ...] = ()

    def post(self) -> None:
        if len(self.known) > self.max_queries:
            raise _QueryLimitError

    def step(self, letter: int | None) -> int:
        before, self.word = self.word, self.word if letter is None else (*self.word, letter)
        if self.word not in self.known:
            cache, state, answer = *self.known[before][:2], NO_STRING
            state = FORBIDDEN if state == FORBIDDEN else int(self.grammar.follow[state, letter])
            if state != FORBIDDEN:
                cache = self.machine.read(cache, np.array([[letter]]))
                answer = int(ask(self.machine, cache, self.grammar.is_string[[state]])[0][0])
            self.known[self.word] = cache, state, answer
        return self.known[self.word][2]


class _Tables(Oracle):
    """An equivalence oracle of strings whose answers are known, and of all that are no strings of the task."""

    def __init__(self, alphabet: list[int], sul: SUL, tables: list[Answers], grammar: Grammar) -> None:
        super().__init__(alphabet, sul)
        self.tables, self.grammar = tables, grammar.build_automaton()

    def find_cex(self, hypothesis: Any) -> tuple[int, ...] | None:
        automaton = convert(hypothesis, len(self.alphabet))
        for table in self.tables:
            if first := table.compare(automaton)[1]:
                return first
        has_answer = np.where(automaton.outputs == NO_STRING, NO_STRING, 0)
        return find_difference(Automaton(automaton.transitions, has_answer), self.grammar)


def convert(hypothesis: Any, num_symbols: int) -> Automaton:
    """Return a Moore machine of aalpy as an automaton."""
    return build_automaton(
        hypothesis.initial_state, lambda s, symbol: s.transitions[symbol], lambda s: s.output, num_symbols
    )


def limit_queries(task: RegularTask) -> int:
    """Return how many prefixes L* may ask."""
    return max(MIN_QUERIES, QUERIES * task.automaton.transitions.size)


def learn(machine: NetworkMachine, tables: list[Answers], task: RegularTask) -> Automaton | None:
    """Learn the network's automaton by L*: the smallest one that agrees with all tables; None if there is no small one.

    Each counterexample of the tables adds at least one state (Angluin 1987; Rivest & Schapire 1993).
    """
    sul, symbols = _Network(machine, task, limit_queries(task)), list(range(task.grammar.num_symbols))
    try:
        oracle = _Tables(symbols, sul, tables, task.grammar)
        found = run_Lstar(symbols, sul, oracle, automaton_type="moore", print_level=0)
    except _QueryLimitError:
        return None
    return convert(found, len(symbols))


def close_states(machine: NetworkMachine, grammar: Grammar) -> tuple[Automaton, int] | None:
    """Return the automaton of all states that the network reaches, and their number; None if they are too many.

    Symbols that may not follow lead to one more state, without an answer. It is not counted.

    States are equal if their bits are. If the search ends, it is a proof by enumeration: every string of any length
    leads to one of these states, if it is read symbol by symbol, in any row of a batch of `machine.batch_size` rows. A
    product may depend on this row, so each transition and answer is computed in all rows, and must be the same.
    """
    assert machine.batch_size is not None
    numbers: dict[tuple[int, bytes], int] = {(0, b""): 0}  # (state of the grammar, bits of the network)
    transitions, answers = [], [NO_STRING]
    levels: list[tuple[ReadState, np.ndarray | None, list]] = []
    frontier, states = ReadState(), np.zeros(1, np.int64)
    while len(states):
        parents, symbols = np.nonzero(grammar.follow[states] != FORBIDDEN)
        if not len(parents):  # nothing may follow
            transitions.append(np.full((len(states), grammar.num_symbols), DEAD))
            break
        before, tokens = select_rows(frontier, parents), symbols[:, None]
        after = machine.read(before, tokens)
        bits, targets = hash_rows(after), grammar.follow[states[parents], symbols]
        levels.append((before, tokens, bits))
        keys = list(zip(targets.tolist(), bits, strict=True))
        new = [i for i, key in enumerate(keys) if numbers.setdefault(key, len(numbers)) >= len(answers)]
        first = {numbers[keys[i]]: i for i in reversed(new)}
        table = np.full((len(states), grammar.num_symbols), DEAD)
        table[parents, symbols] = [numbers[key] for key in keys]
        transitions.append(table)
        if len(numbers) > MAX_STATES:
            return None
        rows = [first[number] for number in sorted(first)]
        states, frontier = targets[rows], select_rows(after, rows)
        is_string = grammar.is_string[states]
        answers += list(ask(machine, frontier, is_string)[0])
        if is_string.any():
            levels.append((select_rows(frontier, is_string), None, list(np.array(answers[-len(rows) :])[is_string])))
    if not all(_is_equal_in_all_rows(machine, *level) for level in levels):
        return None
    table = np.concatenate([*transitions, np.full((1, grammar.num_symbols), DEAD)])
    return Automaton(np.where(table == DEAD, len(numbers), table), np.array([*answers, NO_STRING])), len(numbers)


def _is_equal_in_all_rows(machine: NetworkMachine, cache: ReadState, tokens: np.ndarray | None, expected: list) -> bool:
    """Return True if the hashed states after tokens [B, 1], or without tokens the answers, are equal in all rows."""
    assert machine.batch_size is not None
    for start in range(0, len(expected), machine.batch_size):
        part = np.arange(start, min(start + machine.batch_size, len(expected)))
        for shift in range(len(part)):
            rows = np.resize(np.roll(part, shift), machine.batch_size)  # each one is once in each row
            before = select_rows(cache, rows)
            if tokens is None:
                found = list(ask(machine, before, np.ones(len(rows), bool))[0])
            else:
                found = hash_rows(machine.read(before, tokens[rows]))
            if found != [expected[row] for row in rows]:
                return False
    return True


def separate_states(contents: list[dict[int, Tensor]], states: np.ndarray) -> dict[int, float]:
    """Measure for each layer how far apart the contents of its stack are in two states of the automaton.

    Args:
        contents: {layer: slots [B, H, S, D]} at several lengths. Slots that are not allocated yet count as zeros.
        states: The state of the automaton of each string at each length, [lengths, B].

    Returns:
        {layer: `within_between` of `compare_states`}, without layers whose contents are all equal.
    """
    found = {}
    for layer, last in contents[-1].items():
        slots = [at_length[layer] for at_length in contents]
        slots = [F.pad(x, (0, 0, 0, last.shape[2] - x.shape[2])).flatten(1) for x in slots]
        centers, variance = find_centers(torch.cat(slots).numpy(), states.ravel())
        if len(centers) > 1 and (between := 2 * variance + square_distances(centers)) > 0:
            found[layer] = math.sqrt(2 * variance / between)
    return found
