"""Runs on formal languages, from their folders alone, as the cells of the paper's Table 1: one per task and model."""

import dataclasses
import functools
import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stackexp.config.affects import affects, changes_scores
from stackexp.config.formal_language import model_label
from stackexp.config.layers import split_overrides
from stackexp.config.registry import SECTIONS, kinds, lookup
from stackexp.config.trainer import TrainerConfig
from stackexp.config.yaml_files import flatten, read_file
from stackexp.errors import RunError
from stackexp.reports.formal import paper
from stackexp.runs import RunFolder
from stackexp.sweeps.status import read_tail

DEPTH = "StackTrans depth"
COLUMNS = (*paper.MODELS, DEPTH)
"""The paper's models; of StackTrans any axis but depth, which has a column of its own."""

LABELS = ("lstm", "stack_rnn", "stack_attention", "transformer", "stacktrans", "stacktrans-depth")
COLUMN_OF = dict(zip(LABELS, COLUMNS, strict=True))
"""`model_label` -> column."""

ENOUGH = 3  # seeds, to choose a recipe by its median

Range = tuple[int, int]  # of lengths, both included
Recipe = dict[str, Any]  # key of the config -> value


@dataclass(frozen=True)
class Tested:
    """Accuracy at each length tested, as one file of a run folder has it."""

    file: str
    accuracy: dict[int, float]
    sequences: int  # of each length
    stride: int

    def lengths(self, among: Range) -> list[int]:
        return [length for length in self.accuracy if among[0] <= length <= among[1]]

    def covers(self, among: Range) -> bool:
        """Whether no length of the range is a stride or more away from those tested in it."""
        found = self.lengths(among)
        return bool(found) and min(found) - among[0] < self.stride and among[1] - max(found) < self.stride

    def score(self, among: Range) -> float:
        """Mean accuracy over the lengths tested in the range."""
        return statistics.fmean(self.accuracy[length] for length in self.lengths(among))

    def strings(self, among: Range) -> int:
        """How many were tested: how thorough it is."""
        return len(self.lengths(among)) * self.sequences


@dataclass(frozen=True)
class FormalRun:
    """A run folder on a formal language. `config`: full key -> value; `tests`: of result.json and test.json.

    unused: a test.json that is not of this run as it was trained.
    """

    path: Path
    config: dict[str, Any]
    column: str
    result: dict[str, Any]  # {} if unfinished
    tests: tuple[Tested, ...]
    unused: Path | None = None

    @property
    def task(self) -> str:
        return self.config["data.task"]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def finished(self) -> bool:
        return bool(self.result)

    @cached_property
    def last_line(self) -> dict[str, Any]:
        """What the last lines of the metrics say, each tag as it stood last."""
        return {key: value for line in read_tail(self.path / "metrics.jsonl") for key, value in line.items()}

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.result["steps"] if self.finished else self.last_line.get("step", 0)

    @property
    def validation(self) -> float | None:
        """Mean accuracy on the validation strings; of an unfinished run, the last known."""
        if self.finished:
            return self.result.get("validation_accuracy")
        return self.last_line.get("validation/accuracy/average")

    @property
    def validation_loss(self) -> float | None:
        """Mean loss on the validation strings, in nats per symbol; None of an unfinished run."""
        return self.result.get("validation_loss")

    @cached_property
    def recipe(self) -> Recipe:
        return recipe_of(self.config)

    def tested(self, among: Range) -> Tested | None:
        """The most thorough test that covers the range; on a tie that of result.json."""
        found = [tested for tested in self.tests if tested.covers(among)]
        return max(found, key=lambda tested: tested.strings(among), default=None)

    def score(self, among: Range) -> float | None:
        tested = self.tested(among)
        return tested.score(among) if tested else None


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """A run's config with the defaults of options that are younger than the run."""
    found = _defaults("trainer", TrainerConfig)
    for section, group in SECTIONS.items():
        kind = config.get(f"{section}.kind")
        if kind in kinds(group):
            found = found | _defaults(section, lookup(group, kind).config)
    return {key: value for key, value in found.items() if f"{key}.kind" not in config} | config


@functools.cache
def _defaults(section: str, cls: type) -> dict[str, Any]:
    found = {f"{section}.{field.name}": field.default for field in dataclasses.fields(cls)}
    return {k: v for k, v in found.items() if v is not dataclasses.MISSING and not str(v).startswith("${")}


def in_recipe(options: dict[str, Any], key: str) -> bool:
    """Return True if runs of one recipe must agree in `key`. The seed and the thoroughness of tests may differ."""
    return key != "seed" and (affects(options, key) in ("training", "continuation") or changes_scores(options, key))


def recipe_of(options: dict[str, Any]) -> Recipe:
    """Return the options that make up a recipe."""
    return {key: value for key, value in options.items() if in_recipe(options, key)}


def column_of(config: dict[str, Any]) -> str | None:
    """The table's model of a config, or None if it is in no column."""
    return COLUMN_OF.get(model_label(config))


# Cells


@dataclass(frozen=True)
class Cell:
    """The runs of a task and a model by one recipe, that of the best validation (see `_cell`), one a seed.

    pending: runs of the recipe that are not finished, or not tested over the range. others: recipes not taken.
    again: runs of a seed that is there already.
    """

    task: str
    column: str
    among: Range
    runs: list[FormalRun] = dataclasses.field(default_factory=list)
    pending: list[FormalRun] = dataclasses.field(default_factory=list)
    again: list[FormalRun] = dataclasses.field(default_factory=list)
    others: list[list[FormalRun]] = dataclasses.field(default_factory=list)

    @cached_property
    def scores(self) -> list[float]:
        return [score for run in self.runs if (score := run.score(self.among)) is not None]

    @property
    def best_run(self) -> FormalRun:
        """The run of the best score, the paper's figure."""
        return max(self.runs, key=lambda run: run.score(self.among) or 0.0)

    @property
    def paper(self) -> float | None:
        return printed(self.task, self.column)

    @property
    def short(self) -> bool:
        """Whether our best is below the paper's, at the two decimals that it prints."""
        return bool(self.scores) and self.paper is not None and round(max(self.scores), 2) < self.paper

    @property
    def reached(self) -> bool:
        return bool(self.scores) and self.paper is not None and not self.short

    @property
    def unfinished(self) -> bool:
        """Whether seeds are missing that were begun, or stand there before their end."""
        return bool(self.pending) or any(not run.finished for run in self.runs)


def printed(task: str, column: str) -> float | None:
    """The paper's figure for a column; the depth axis, as the paper prints its equations, is held to its StackTrans."""
    return paper.TABLE_1.get(task, {}).get("StackTrans" if column == DEPTH else column)


@dataclass(frozen=True)
class Report:
    among: Range
    runs: list[FormalRun]  # all, as found
    cells: dict[tuple[str, str], Cell]
    left_out: list[str]  # lines

    @cached_property
    def finest(self) -> Tested:
        """The most thorough test of the table."""
        found = [run.tested(self.among) for cell in self.cells.values() for run in cell.runs]
        return max((tested for tested in found if tested), key=lambda tested: tested.strings(self.among))

    def coarse(self, cell: Cell) -> list[Tested]:
        """The tests of a cell that are less thorough than others in the table."""
        found, most = [run.tested(self.among) for run in cell.runs], self.finest.strings(self.among)
        return [tested for tested in found if tested and tested.strings(self.among) < most]


def collect(paths: Iterable[Path | str], among: Range) -> Report:
    """The table of the runs in these folders. Raises RunError for a folder without runs, and if none can be shown."""
    runs, left_out = [], defaultdict(list)
    for path in find(paths):
        config = flatten(read_file(path / "config.yaml")[1])
        column = column_of(config) if config.get("data.kind") == "formal_language" else ""
        if column:
            runs.append(_read(path, completed(config), column))
        else:
            left_out["no formal language" if column == "" else "a model that the table has no column for"].append(path)
    for run in runs:
        if run.unused:
            left_out["of another checkpoint, or with overrides that change more than the test"].append(run.unused)
    lines = [f"left out, {why}: {_some(found)}" for why, found in left_out.items()]
    groups = defaultdict(list)
    for run in runs:
        groups[run.task, run.column].append(run)
    cells = {key: _cell(*key, groups.get(key, []), among) for key in ((t, c) for t in paper.TASKS for c in COLUMNS)}
    if not any(cell.scores for cell in cells.values()):
        about = f"{len(runs)} of formal languages unfinished or not tested over {among[0]}..{among[1]}"
        raise RunError(f"{_some(list(paths))}: no finished run of a formal language ({'; '.join([about, *lines])})")
    return Report(among, runs, cells, lines)


def find(paths: Iterable[Path | str]) -> list[Path]:
    """The run folders at or below these paths, each once, sorted below each path. Raises RunError where is none."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        below = _below(path)
        if not below:
            raise RunError(
                f"{path}: no run folder there (no config.yaml in it or below); give runs/<name>/<id>, "
                "or a folder of run folders such as runs/formal_table"
            )
        for folder in below:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _below(path: Path) -> list[Path]:
    found = []
    for folder, folders, files in os.walk(path):
        if "config.yaml" in files:
            found.append(Path(folder))
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    return found


def _read(path: Path, config: dict[str, Any], column: str) -> FormalRun:
    folder = RunFolder(path)
    result = _figures(folder.result) if folder.finished else {}
    tests = [_tested(folder.result, result)] if result else []
    test, unused = path / "test.json", None
    if test.exists():
        figures = _figures(test)
        if _is_of_the_run(figures, result, config):
            tests.append(_tested(test, figures))
        else:
            unused = test
    return FormalRun(path, config, column, result, tuple(tests), unused)


def _is_of_the_run(test: dict[str, Any], result: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether a test is of the checkpoint that the run itself tested, with nothing that changes what is tested."""
    keys = [key for key, *_ in split_overrides(test.get("overrides", []))]
    tested = result.get("tested_step", result["steps"]) if result else test.get("step")
    return not any(in_recipe(config, key) for key in keys) and test.get("step", tested) == tested


def _figures(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path}: not valid JSON; remove it, and test the run again") from error


def _tested(path: Path, figures: dict[str, Any]) -> Tested:
    try:
        accuracy = {int(length): float(value) for length, value in figures["accuracy"].items()}
        return Tested(
            path.name, dict(sorted(accuracy.items())), figures["sequences_per_length"], figures["length_stride"]
        )
    except KeyError as error:
        raise RunError(
            f"{path}: has no {error}; test the run again: python -m stackexp test --run {path.parent}"
        ) from error


def _cell(task: str, column: str, runs: list[FormalRun], among: Range) -> Cell:
    """The recipe taken: of three seeds rather than fewer, then of the best median validation accuracy, of the lowest
    median validation loss (it tells those apart that make no mistakes yet), of more seeds, of fewer steps."""
    recipes: dict[str, list[FormalRun]] = defaultdict(list)
    for run in runs:
        recipes[json.dumps(run.recipe, sort_keys=True, default=str)].append(run)
    order = sorted(recipes, key=lambda recipe: (*_rank(recipes[recipe], among), recipe))
    if not order:
        return Cell(task, column, among)
    taken = recipes[order[0]]
    scored = [run for run in taken if run.score(among) is not None]
    seeds: dict[int, FormalRun] = {}
    for run in scored:  # the more thoroughly tested, then the later
        if run.seed not in seeds or _weight(run, among) >= _weight(seeds[run.seed], among):
            seeds[run.seed] = run
    kept = [seeds[seed] for seed in sorted(seeds)]
    again = [run for run in scored if run is not seeds[run.seed]]
    pending = [run for run in taken if run.score(among) is None and run.seed not in seeds]
    return Cell(task, column, among, kept, pending, again, [recipes[recipe] for recipe in order[1:]])


def _weight(run: FormalRun, among: Range) -> tuple[bool, int]:
    tested = run.tested(among)
    return run.finished, tested.strings(among) if tested else 0


def _rank(runs: list[FormalRun], among: Range) -> tuple[int, float, float, int, int]:
    """What recipes are sorted by, the best first. The score takes no part in it."""
    scored = [run for run in runs if run.score(among) is not None]
    seeds, median = len({run.seed for run in scored}), median_validation(scored)
    loss = median_validation_loss(scored)
    accuracy = -1.0 if median is None else -median
    return -min(seeds, ENOUGH), accuracy, math.inf if loss is None else loss, -seeds, max(run.step for run in runs)


def median_validation(runs: list[FormalRun]) -> float | None:
    """Median over the runs of their validation accuracy; None if none has one."""
    known = [run.validation for run in runs if run.validation is not None]
    return statistics.median(known) if known else None


def median_validation_loss(runs: list[FormalRun]) -> float | None:
    """Median over the runs of their validation loss; None if none has one."""
    known = [run.validation_loss for run in runs if run.validation_loss is not None]
    return statistics.median(known) if known else None


def _some(paths: list[Path | str], most: int = 3) -> str:
    shown = ", ".join(map(str, paths[:most]))
    return shown if len(paths) <= most else f"{shown} and {len(paths) - most} more"
