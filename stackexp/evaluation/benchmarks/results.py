"""Scores of benchmarks, and benchmarks.json. Imports no torch."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stackexp.errors import RunError
from stackexp.files import hold_lock, read_hashed_json, write_hashed_json
from stackexp.modules.scores import estimate_sampling_error
from stackexp.tables import ABSENT, RULE, format_table

BENCHMARKS_VERSION = 1
FILE = "benchmarks.json"


@dataclass(frozen=True)
class TaskScores:
    """The scores of a model on one task. Standard errors are over the documents."""

    accuracy: float | None
    """Mean of `metric`; None for tasks that measure only the likelihood of texts."""
    accuracy_stderr: float | None
    bits_per_byte: float | None
    """Bits per byte of the right answer: all bits over all bytes."""
    bits_per_byte_stderr: float | None
    random_guess: float | None
    """Expected accuracy of a random guess."""
    metric: str | None
    """Name of the metric in lm-eval, such as acc_norm."""
    num_documents: int
    num_fewshot: int
    num_cut: int = 0
    """Documents whose prompt and answer are longer than the model's context, so that the prompt is cut at its start."""
    num_excluded: int = 0
    """Documents that do not fit into the model's context, and are not in the scores."""

    def flatten(self) -> dict[str, float]:
        """Return the scores that are logged during training."""
        scores = {"accuracy": self.accuracy, "bits_per_byte": self.bits_per_byte}
        return {name: value for name, value in scores.items() if value is not None}


@dataclass(frozen=True)
class BenchmarkEvaluation:
    """The scores of one checkpoint under one set of options."""

    checkpoint: str
    step: int | None
    tokens: int | None
    time: str
    limit: int | None
    """The number of documents that each task was limited to; None for all."""
    num_fewshot: int | None
    """Shots given on the command line; None for those of each task."""
    lm_eval: str
    tasks: dict[str, TaskScores]
    model: str = ""
    """A hash of the weights' identity: another model may be written to the same path."""
    exclude_long: bool = False
    """True if documents that do not fit into the model's context are not in the scores."""

    @property
    def chosen(self) -> tuple[Any, ...]:
        """The options of the command line that change the scores."""
        return self.limit, self.num_fewshot, self.exclude_long

    @property
    def options(self) -> tuple[Any, ...]:
        """The identity of an evaluation; evaluations with the same identity share an entry of the file."""
        return Path(self.checkpoint).resolve(), self.step, *self.chosen, self.lm_eval, self.model


def read_evaluations(path: Path) -> list[BenchmarkEvaluation]:
    """Return the evaluations in a benchmarks.json; [] if it is missing. Raises RunError for a damaged file."""
    if not path.exists():
        return []
    remedy = "delete it and run `evaluate` again"
    record = read_hashed_json(path, remedy)
    if record.get("version") != BENCHMARKS_VERSION:
        raise RunError(f"{path}: not a file of this version; {remedy}")
    return [
        BenchmarkEvaluation(
            **entry | {"tasks": {name: TaskScores(**scores) for name, scores in entry["tasks"].items()}}
        )
        for entry in record["evaluations"]
    ]


def add_evaluation(path: Path, new: BenchmarkEvaluation) -> None:
    """Add an evaluation to a benchmarks.json, atomically; tasks scored with the same options are merged."""
    with hold_lock(path.with_name(f".{path.name}.lock"), f"writing {path}"):
        evaluations = read_evaluations(path)
        same = next((old for old in evaluations if old.options == new.options), None)
        if same is not None:
            evaluations.remove(same)
            new = dataclasses.replace(new, tasks=dict(sorted((same.tasks | new.tasks).items())))
        entries = [dataclasses.asdict(entry) for entry in [*evaluations, new]]
        write_hashed_json(path, {"version": BENCHMARKS_VERSION, "evaluations": entries})


def compute_mean(values: list[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error; None for a single value."""
    return compute_ratio(values, [1.0] * len(values))


def compute_ratio(numerators: list[float], denominators: list[float]) -> tuple[float, float | None]:
    """Return sum / sum and its standard error by the delta method; None for a single pair."""
    error = estimate_sampling_error(np.array(numerators), np.array(denominators), is_independent=True)
    return math.fsum(numerators) / math.fsum(denominators), error and error.standard_error


def average_tasks(tasks: Mapping[str, TaskScores], name: str) -> tuple[float, float | None] | None:
    """Return the mean of a score over the tasks that have it, and its standard error; None without any."""
    chosen = [scores for scores in tasks.values() if getattr(scores, name) is not None]
    if not chosen:
        return None
    return average_scores([(getattr(scores, name), getattr(scores, f"{name}_stderr", None)) for scores in chosen])


def average_scores(scores: Sequence[tuple[float, float | None]]) -> tuple[float, float | None]:
    """Return the mean of independent scores, and its standard error; None if one has none."""
    errors = [error for _, error in scores if error is not None]
    error = math.sqrt(math.fsum(error**2 for error in errors)) / len(scores) if len(errors) == len(scores) else None
    return math.fsum(mean for mean, _ in scores) / len(scores), error


def format_tasks(tasks: Mapping[str, TaskScores]) -> str:
    """Return a table of the tasks and their unweighted average."""
    rows: list[Sequence[str]] = [
        [
            name,
            str(scores.num_fewshot),
            f"{scores.num_documents:,}",
            format_score(scores.accuracy, scores.accuracy_stderr),
            format_score(scores.random_guess),
            format_score(scores.bits_per_byte, scores.bits_per_byte_stderr),
        ]
        for name, scores in tasks.items()
    ]
    if len(tasks) > 1:
        keys = ("accuracy", "random_guess", "bits_per_byte")
        averages = [format_score(*(average_tasks(tasks, key) or (None,))) for key in keys]
        rows += [RULE, ["average", "", "", *averages]]
    header = ("task", "shots", "documents", "accuracy", "random", "bits/byte")
    return format_table(rows, header=header, align="<>>>>>")


def format_score(value: float | None, error: float | None = None) -> str:
    """Return a score with its standard error."""
    if value is None:
        return ABSENT
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"
