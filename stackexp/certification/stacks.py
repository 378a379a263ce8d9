"""Compare a network on a stack task with the pushdown automaton, on all short strings and on random ones."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stackexp.certification.automata import NO_STRING, StackTask
from stackexp.certification.machine import (
    NetworkMachine,
    ReadState,
    list_prefixes,
    measure_gaps,
    select_rows,
    walk_prefixes,
)


@dataclass
class AnswerComparison:
    """The comparison of a network's answers with those of a pushdown automaton."""

    count: int = 0
    differing: int = 0
    first: tuple[int, ...] | None = None  # a shortest string that differs
    gap: float = float("inf")  # the smallest difference between the two largest logits of a counted answer

    def add(self, machine: NetworkMachine, cache: ReadState, strings: np.ndarray, expected: np.ndarray) -> None:
        """Compare the answers to strings [B, L] in state `cache` with the expected ones [B, O]."""
        counted = expected != NO_STRING
        columns = int(counted.any(0).sum())
        logits = machine.answer(cache, len(strings), columns)
        wrong = ((logits.argmax(-1).numpy() != expected[:, :columns]) & counted[:, :columns]).any(1)
        self.gap = min(self.gap, float(measure_gaps(logits)[counted[:, :columns]].min()))
        self.count += len(strings)
        self.differing += int(wrong.sum())
        if wrong.any() and (self.first is None or strings.shape[1] < len(self.first)):
            self.first = tuple(map(int, strings[np.flatnonzero(wrong)[0]]))


def compare_all(machine: NetworkMachine, task: StackTask, num_empty: Any, length: int) -> AnswerComparison:
    """Compare all strings of 1 .. `length` symbols; `num_empty` is the answer's length by string length."""
    found, levels = AnswerComparison(), list_prefixes(task.grammar, length)
    for depth, numbers, cache in walk_prefixes(machine, levels):
        prefixes = levels[depth][0][numbers]
        rows = np.flatnonzero(task.grammar.are_strings(prefixes))
        if len(rows):
            expected = task.pushdown.run(prefixes[rows], num_empty(depth))
            found.add(machine, select_rows(cache, rows), prefixes[rows], expected)
    return found


def compare_random(
    machine: NetworkMachine, task: StackTask, num_empty: Any, streams: list[np.ndarray]
) -> AnswerComparison:
    """Compare random strings, a batch [B, L] for each length."""
    found = AnswerComparison()
    for strings in streams:
        cache = machine.read(ReadState(), strings)
        found.add(machine, cache, strings, task.pushdown.run(strings, num_empty(strings.shape[1])))
    return found
