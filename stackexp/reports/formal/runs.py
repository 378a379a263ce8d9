"""Read runs on formal languages from their folders."""

import dataclasses
import functools
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stackexp.config.affects import changes_scores, get_default, get_effect
from stackexp.config.experiment import InitConfig
from stackexp.config.layers import split_overrides
from stackexp.config.registry import SECTIONS, get_entry, list_kinds
from stackexp.config.trainer import TrainerConfig
from stackexp.config.yaml_files import flatten
from stackexp.errors import RunError
from stackexp.files import read_json
from stackexp.metric_tags import AVERAGE_ACCURACY
from stackexp.reports.summaries import list_tests
from stackexp.runs import RunFolder
from stackexp.sweeps.trials import read_tail

Lengths = tuple[int, int]
"""First and last string length of a range."""
Options = dict[str, Any]
"""Full config key -> value."""


@dataclass(frozen=True)
class Evaluation:
    """The accuracy at each tested length, from one file of a run folder.

    `sequences` strings of every `stride`-th length were tested.
    """

    file: str
    accuracy: dict[int, float]
    sequences: int
    stride: int

    def select_lengths(self, lengths: Lengths) -> list[int]:
        """Return the tested lengths in a range."""
        return [length for length in self.accuracy if lengths[0] <= length <= lengths[1]]

    def covers(self, lengths: Lengths) -> bool:
        """Return True if every length of the range is near a tested one: less than a stride, and half of the range."""
        tested, limit = self.select_lengths(lengths), min(self.stride, (lengths[1] - lengths[0]) // 2 + 1)
        return bool(tested) and min(tested) - lengths[0] < limit and lengths[1] - max(tested) < limit

    def compute_score(self, lengths: Lengths) -> float:
        """Return the mean accuracy over all lengths in a range, interpolated between tested ones, as in result.json."""
        all_lengths = np.arange(lengths[0], lengths[1] + 1)
        return float(np.interp(all_lengths, list(self.accuracy), list(self.accuracy.values())).mean())

    def count_strings(self, lengths: Lengths) -> int:
        """Return how many strings were tested in a range."""
        return len(self.select_lengths(lengths)) * self.sequences


@dataclass(frozen=True)
class FormalRun:
    """A run on a formal language, scored over `lengths`.

    `result` is empty for an unfinished run. `evaluations` come from result.json, test.json and test-to-*.json; `unused`
    are such files of another checkpoint, or made with overrides that change more than the test.
    """

    path: Path
    config: Options
    column: str
    lengths: Lengths
    result: dict[str, Any]
    evaluations: tuple[Evaluation, ...]
    unused: tuple[Path, ...] = ()

    @property
    def task(self) -> str:
        """The name of the task."""
        return self.config["data.task"]

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.config["seed"]

    @property
    def is_finished(self) -> bool:
        """True if the run has a result."""
        return bool(self.result)

    @cached_property
    def _last_metrics(self) -> dict[str, Any]:
        """The last value of each metric near the end of metrics.jsonl."""
        return {key: value for line in read_tail(self.path / "metrics.jsonl") for key, value in line.items()}

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.result["steps"] if self.is_finished else self._last_metrics.get("step", 0)

    @property
    def validation_accuracy(self) -> float | None:
        """Mean accuracy on the validation strings, the last known one for an unfinished run."""
        if self.is_finished:
            return self.result.get("validation_accuracy")
        return self._last_metrics.get(AVERAGE_ACCURACY)

    @property
    def validation_loss(self) -> float | None:
        """Mean loss on the validation strings in nats per symbol, None for an unfinished run."""
        return self.result.get("validation_loss")

    @cached_property
    def recipe(self) -> Options:
        """The options that runs of one recipe share."""
        return select_recipe(self.config)

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """The evaluation that counts, or None if the lengths were not tested."""
        return self.find_evaluation(self.lengths)

    @cached_property
    def score(self) -> float | None:
        """The mean accuracy over the lengths, or None if they were not tested."""
        return self.compute_score(self.lengths)

    @property
    def num_strings(self) -> int:
        """The number of strings tested in the lengths."""
        return self.evaluation.count_strings(self.lengths) if self.evaluation else 0

    def find_evaluation(self, lengths: Lengths) -> Evaluation | None:
        """Return the most thorough evaluation that covers the range; result.json wins a tie."""
        covering = [evaluation for evaluation in self.evaluations if evaluation.covers(lengths)]
        return max(covering, key=lambda evaluation: evaluation.count_strings(lengths), default=None)

    def compute_score(self, lengths: Lengths) -> float | None:
        """Return the mean accuracy over a range of lengths, or None if it was not tested."""
        evaluation = self.find_evaluation(lengths)
        return evaluation.compute_score(lengths) if evaluation else None


def is_in_recipe(options: Options, key: str) -> bool:
    """Return True if runs of one recipe must have equal values of `key`, unlike their seed and options of the test."""
    return key != "seed" and (get_effect(options, key) in ("training", "continuation") or changes_scores(options, key))


def select_recipe(options: Options) -> Options:
    """Return the options that runs of one recipe share."""
    return {key: value for key, value in options.items() if is_in_recipe(options, key)}


def read_run(folder: RunFolder, config: Options, column: str, lengths: Lengths) -> FormalRun:
    """Read a run folder. Raises RunError for a damaged result.json or file of `test`."""
    config = _add_new_options(config)
    result = folder.read_result().to_dict() if folder.is_finished else {}
    evaluations = [_read_evaluation(folder.result, result)] if result else []
    unused = []
    for test in list_tests(folder):
        record = read_json(test)
        if not isinstance(record, dict):
            raise RunError(f"{test}: not a file of `test`; move it elsewhere")
        if _is_same_run(record, result, config):
            evaluations.append(_read_evaluation(test, record))
        else:
            unused.append(test)
    return FormalRun(folder.path, config, column, lengths, result, tuple(evaluations), tuple(unused))


def _read_evaluation(path: Path, record: dict[str, Any]) -> Evaluation:
    try:
        accuracy = {int(length): float(value) for length, value in record["accuracy"].items()}
        accuracy = dict(sorted(accuracy.items()))
        return Evaluation(path.name, accuracy, record["sequences_per_length"], record["length_stride"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else f"not a file of `test` ({error})"
        command = f"python -m stackexp test --run {shlex.quote(str(path.parent))}"
        raise RunError(f"{path}: {reason}; test the run again: {command}") from error


def _is_same_run(test: dict[str, Any], result: dict[str, Any], config: Options) -> bool:
    """Return True if a test used the checkpoint that the run itself tested, and overrides only options of the test."""
    keys = [key for key, *_ in split_overrides(test.get("overrides", []))]
    tested_step = result.get("tested_step", result["steps"]) if result else test.get("step")
    return not any(is_in_recipe(config, key) for key in keys) and test.get("step", tested_step) == tested_step


def _add_new_options(config: Options) -> Options:
    """Return a run's config with the defaults of options that are newer than the run."""
    defaults = _get_defaults("trainer", TrainerConfig) | _get_defaults("init", InitConfig)
    for section, group in SECTIONS.items():
        kind = config.get(f"{section}.kind")
        if kind in list_kinds(group):
            defaults = defaults | _get_defaults(section, get_entry(group, kind).config)
    return {key: value for key, value in defaults.items() if f"{key}.kind" not in config} | config


@functools.cache
def _get_defaults(section: str, cls: type) -> Options:
    defaults = flatten({field.name: get_default(field) for field in dataclasses.fields(cls)}, f"{section}.")
    return {k: v for k, v in defaults.items() if v is not dataclasses.MISSING and not str(v).startswith("${")}
