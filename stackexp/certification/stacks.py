"""Certify a network on a stack task: find the heads that are the stack, and compare all short and random strings."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stackexp.certification.automata import NO_OP, NO_STRING, POP, PUSH, Pushdown, StackTask
from stackexp.certification.machine import (
    Machine,
    identify_labels,
    list_prefixes,
    measure_gaps,
    select_rows,
    walk_prefixes,
)
from stackexp.models.memories.stack import StackMemory
from stackexp.models.stack_recording import wrap_method
from stackexp.models.transformer import Cache
from stackexp.stack import use_implementation


@dataclass
class Comparison:
    """The comparison of a network's answers with those of a pushdown automaton."""

    count: int = 0
    differing: int = 0
    first: tuple[int, ...] | None = None  # a shortest string that differs
    gap: float = float("inf")  # the smallest difference between the two largest logits of a counted answer

    def add(self, machine: Machine, cache: Cache, strings: np.ndarray, expected: np.ndarray) -> None:
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


def choose_length(task: StackTask, max_tokens: int) -> int:
    """Return the longest length, up to 19, for which `compare_all` reads fewer tokens than `max_tokens`, or 1."""
    counts, tokens = task.may_follow[-1].astype(np.int64), 0  # prefixes by their last symbol
    for length in range(1, 20):
        tokens += int(counts.sum()) * (length + 2)
        if tokens >= max_tokens:
            return max(1, length - 1)
        counts = counts @ task.may_follow[:-1]
    return 19


def compare_all(machine: Machine, task: StackTask, num_empty: Any, length: int) -> Comparison:
    """Compare all strings of 1 .. `length` symbols; `num_empty` is the answer's length by string length."""
    found, levels = Comparison(), list_prefixes(task.may_follow, length)
    for depth, numbers, cache in walk_prefixes(machine, levels):
        prefixes = levels[depth][0][numbers]
        rows = np.flatnonzero(task.are_strings(prefixes))
        if len(rows):
            expected = task.pushdown.run(prefixes[rows], num_empty(depth))
            found.add(machine, select_rows(cache, rows), prefixes[rows], expected)
    return found


def compare_random(machine: Machine, task: StackTask, num_empty: Any, streams: list[np.ndarray]) -> Comparison:
    """Compare random strings, a batch [B, L] for each length."""
    found = Comparison()
    for strings in streams:
        cache = machine.read(Cache(), strings)
        found.add(machine, cache, strings, task.pushdown.run(strings, num_empty(strings.shape[1])))
    return found


def record_heads(model: Any, tokens: Tensor) -> dict[StackMemory, list[Tensor]]:
    """Run the model on tokens [B, T]; return pushes x, action probabilities and reads [B, T, H, ...] of each stack."""
    records: dict[StackMemory, list[Tensor]] = {}

    def record(memory: StackMemory, update: Any, state: Any, x: Tensor, logits: Tensor, h: Tensor) -> Any:
        output, state = update(state, x, logits, h)
        records[memory] = [x, output.action, output.read]
        return output, state

    wrappers = {memory: record for memory in model.memories if isinstance(memory, StackMemory)}
    with wrap_method("update", wrappers), torch.no_grad():
        model(tokens)
    return records


def find_stack_heads(
    model: Any, task: StackTask, num_symbols: int, strings: np.ndarray, num_empty: int
) -> list[dict[str, Any]]:
    """Return the heads that are the task's stack on strings [B, L], with their measurements.

    A head is the stack if its most probable action depends on the token only (symbol, first empty, later empty), and a
    stack of symbols with these actions has the answer on its top at every empty token.
    """
    empty = np.full((len(strings), num_empty), num_symbols)
    tokens = np.concatenate([strings, empty], 1)
    kinds = tokens.copy()  # symbols, then num_symbols for the first empty token and num_symbols + 1 for later ones
    kinds[:, strings.shape[1] + 1 :] += 1
    expected, heads = task.pushdown.run(strings, num_empty), []
    with use_implementation("auto"):
        records = record_heads(model, torch.from_numpy(tokens))
    for memory, tensors in records.items():
        pushes, actions, reads = (tensor.numpy() for tensor in tensors)
        for head in range(actions.shape[2]):
            chosen = actions[:, :, head].argmax(-1)
            table = [np.unique(chosen[kinds == kind]) for kind in range(num_symbols + 2)]
            if any(len(values) != 1 for values in table):
                continue
            extracted = Pushdown(
                tuple(int(values[0]) for values in table), task.pushdown.answers, task.pushdown.empty_answer
            )
            if (extracted.run(strings, num_empty) != expected).any():
                continue
            tops = _stack_tops(chosen, kinds)
            counted = np.arange(kinds.shape[1]) < strings.shape[1] + (expected != NO_STRING).sum(1)[:, None]
            probabilities = np.sort(actions[:, :, head], -1)[counted]
            with np.errstate(divide="ignore"):
                gaps = np.log(probabilities[:, 2]) - np.log(probabilities[:, 1])
            identified = _identify(reads[:, :, head], tops, kinds, counted & (tops >= 0))
            heads.append(
                {
                    "layer": memory.layer,
                    "head": head,
                    "pushdown": extracted,
                    "smallest_action_probability": float(probabilities[:, 2].min()),
                    "smallest_action_gap": float(min(gaps.min(), 1e3)),
                    "largest_leak_of_a_string": float(
                        ((1 - actions[:, :, head].max(-1).astype(np.float64)) * counted).sum(1).max()
                    ),
                    "read_identifies_the_top_symbol": identified,
                    "read_error": _measure_leak(pushes[:, :, head], reads[:, :, head], tops, counted),
                }
            )
    return heads


def _stack_tops(chosen: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Return the position of the token on top of the stack after each of the actions [B, T]; -1 if it is empty."""
    rows, length = chosen.shape
    stack, height, every = np.full((rows, length + 1), -1), np.zeros(rows, np.int64), np.arange(rows)
    tops = np.empty((rows, length), np.int64)
    for t in range(length):
        height = np.maximum(height + (chosen[:, t] == PUSH) - (chosen[:, t] == POP), 0)
        stack[every, height] = np.where(chosen[:, t] == PUSH, t, stack[every, height])
        tops[:, t] = stack[every, height]
    return tops


def _identify(reads: np.ndarray, tops: np.ndarray, kinds: np.ndarray, counted: np.ndarray) -> float:
    """Return the share of reads [B, T, D] in one half of the strings that identify the symbol on top."""
    symbols = np.take_along_axis(kinds, np.maximum(tops, 0), 1)
    is_known = np.arange(len(reads))[:, None] < len(reads) // 2
    is_known = np.broadcast_to(is_known, counted.shape)[counted]
    return identify_labels(torch.from_numpy(reads[counted]), symbols[counted], is_known)[0]


def _measure_leak(pushes: np.ndarray, reads: np.ndarray, tops: np.ndarray, counted: np.ndarray) -> float:
    """Return the largest distance between a read and that of a hard stack, over the mean norm of the pushes."""
    hard = np.take_along_axis(pushes, np.maximum(tops, 0)[..., None], 1) * (tops >= 0)[..., None]
    return float(np.linalg.norm(reads - hard, axis=-1)[counted].max() / np.linalg.norm(pushes, axis=-1).mean())


def describe_actions(pushdown: Pushdown) -> str:
    """Return the actions as one letter for each token: + push, - pop, . no-op."""
    return "".join({PUSH: "+", POP: "-", NO_OP: "."}[action] for action in pushdown.actions)
