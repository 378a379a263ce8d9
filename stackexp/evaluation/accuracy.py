"""Accuracy by string length: mean scores and a table. Imports no torch."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from stackexp.config.data import FormalLanguageConfig
from stackexp.tables import format_table

Accuracy = Mapping[int, float]
"""Accuracy by string length."""
Lengths = tuple[int, int]
"""First and last string length of a range."""

NEAR_END = 100
"""The end of the shorter of the two ranges that scores are averaged over."""
TABLE_LENGTHS = (20, 40, 60, 100, 200, 300, 500)  # more columns would not fit 80 characters


def get_ranges(data: FormalLanguageConfig) -> list[Lengths]:
    """Return the ranges of lengths that scores are averaged over: 41..100 and 41..500 by default."""
    first, last = data.first_unseen_length, data.eval_max_length
    return [(first, end) for end in dict.fromkeys([NEAR_END, last]) if first <= end <= last]


def average_accuracy(accuracy: Accuracy, lengths: Lengths) -> float:
    """Return the mean accuracy over all lengths of a range.

    Lengths that were not tested are interpolated linearly. The plain mean over tested lengths 41, 68, ..., 500 would
    weight the shortest ones too much, and overestimate an accuracy that falls with the length.
    """
    tested = sorted(accuracy)
    all_lengths = np.arange(lengths[0], lengths[1] + 1)
    return float(np.interp(all_lengths, tested, [accuracy[n] for n in tested]).mean())


def compute_scores(data: FormalLanguageConfig, accuracy: Accuracy) -> dict[str, float]:
    """Return the mean accuracy over each range, as `score_41_100` and so on."""
    return {f"score_{first}_{end}": average_accuracy(accuracy, (first, end)) for first, end in get_ranges(data)}


def parse_accuracy(record: Mapping[str, Any]) -> dict[int, float]:
    """Return the accuracy by length of a result.json or test.json."""
    return {int(length): value for length, value in record["accuracy"].items()}


def format_accuracy(data: FormalLanguageConfig, runs: Mapping[str, Accuracy]) -> str:
    """Return a table of runs on one task, with one line per run: its scores, then its accuracy at selected lengths."""
    tested = sorted(set().union(*runs.values()))
    nearest = [min(tested, key=lambda n, length=length: abs(n - length)) for length in TABLE_LENGTHS]  # type: ignore[misc]
    lengths = list(dict.fromkeys([*nearest, tested[-1]]))
    header = ["", *(f"{first}..{end}" for first, end in get_ranges(data)), *map(str, lengths)]
    rows = []
    for name, accuracy in runs.items():
        scores = [f"{value:.3f}" for value in compute_scores(data, accuracy).values()]
        rows.append([name, *scores, *(f"{accuracy[n]:.2f}" if n in accuracy else "" for n in lengths)])
    title = f"{data.task}, {data.eval_sequences} test strings of each length"
    return f"{title}\n\n{format_table(rows, header=header, align='<' + '>' * (len(header) - 1))}"
