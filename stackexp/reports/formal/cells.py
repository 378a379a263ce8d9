"""Collect runs on formal languages as the cells of the paper's Table 1: for each task and model its best recipe."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from stackexp.errors import ConfigError, RunError
from stackexp.reports.formal.paper import COLUMNS, find_column, get_printed_score
from stackexp.reports.formal.runs import Evaluation, FormalRun, Lengths, read_run
from stackexp.reports.summaries import find_runs
from stackexp.tasks import TASKS

ENOUGH_SEEDS = 3
"""Recipes with this many seeds are compared by their median."""


@dataclass(frozen=True)
class Cell:
    """The scored runs of one recipe, one for each seed.

    `pending` are runs of the recipe that are unfinished or not tested over the lengths, `duplicates` repeat a seed, and
    `other_recipes` were not chosen.
    """

    task: str
    column: str
    runs: list[FormalRun] = field(default_factory=list)
    pending: list[FormalRun] = field(default_factory=list)
    duplicates: list[FormalRun] = field(default_factory=list)
    other_recipes: list[list[FormalRun]] = field(default_factory=list)

    @property
    def scores(self) -> list[float]:
        """The scores of the runs."""
        return [run.score for run in self.runs if run.score is not None]

    @property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations of the runs."""
        return [run.evaluation for run in self.runs if run.evaluation]

    @property
    def paper(self) -> float | None:
        """The paper's score."""
        return get_printed_score(self.task, self.column)

    @property
    def reaches_paper(self) -> bool | None:
        """True if our best score, rounded to two decimals, is at least the paper's; None if one is missing."""
        return round(max(self.scores), 2) >= self.paper if self.scores and self.paper is not None else None

    @property
    def is_unfinished(self) -> bool:
        """True if runs of the recipe are unfinished or not tested."""
        return bool(self.pending) or any(not run.is_finished for run in self.runs)


@dataclass(frozen=True)
class Results:
    """The cells by (task, column), all runs that were found, and notes about skipped folders and files."""

    lengths: Lengths
    runs: list[FormalRun]
    cells: dict[tuple[str, str], Cell]
    skipped: list[str]

    @cached_property
    def finest(self) -> Evaluation:
        """The most thorough evaluation in the table."""
        evaluations = [evaluation for cell in self.cells.values() for evaluation in cell.evaluations]
        return max(evaluations, key=lambda evaluation: evaluation.count_strings(self.lengths))

    def find_coarse(self, cell: Cell) -> list[Evaluation]:
        """Return the evaluations of a cell that are less thorough than others in the table."""
        most = self.finest.count_strings(self.lengths)
        return [evaluation for evaluation in cell.evaluations if evaluation.count_strings(self.lengths) < most]


def collect_results(paths: Sequence[Path | str], lengths: Lengths) -> Results:
    """Build the table of the runs in these folders.

    Raises RunError for a folder without runs, and if no run is finished and tested over the lengths.
    """
    runs, skipped = [], defaultdict(list)
    folders = find_runs(paths)
    for path in paths:
        if not any(folder.path.resolve().is_relative_to(Path(path).resolve()) for folder in folders):
            raise RunError(f"{path}: no run folder in it or below; give runs/<name>/<id>, or a folder of run folders")
    for folder in folders:
        try:
            config = folder.read_options()
        except (ConfigError, RunError) as error:
            skipped[str(error)].append(folder.path)
            continue
        if config.get("data.kind") != "formal_language":
            skipped["not a formal language"].append(folder.path)
        elif column := find_column(config):
            runs.append(read_run(folder, config, column, lengths))
        else:
            skipped["the table has no column for this model"].append(folder.path)
    unused = [path for run in runs for path in run.unused]
    if unused:
        skipped["test of another checkpoint, or with overrides that change more than the test"] = unused
    notes = [f"skipped, {reason}: {_join_paths(found)}" for reason, found in skipped.items()]
    groups = defaultdict(list)
    for run in runs:
        groups[run.task, run.column].append(run)
    keys = [(task, column) for task in TASKS for column in COLUMNS]
    cells = {(task, column): build_cell(task, column, groups[task, column]) for task, column in keys}
    if not any(cell.scores for cell in cells.values()):
        unscored = f"{len(runs)} runs are unfinished or not tested over {lengths[0]}..{lengths[1]}"
        raise RunError(
            f"{_join_paths(paths)}: no finished run on a formal language ({'; '.join([unscored, *notes])}); finish or "
            "test one"
        )
    return Results(lengths, runs, cells, notes)


def build_cell(task: str, column: str, runs: list[FormalRun]) -> Cell:
    """Choose the recipe of a cell by its results on validation strings, never by its test score.

    The criteria, in this order: at least three seeds, the best median validation accuracy, the lowest median validation
    loss (which separates recipes without errors), more seeds, fewer steps. If a seed has several runs, the more
    thoroughly tested one counts, then the later one.
    """
    recipes: dict[str, list[FormalRun]] = defaultdict(list)
    for run in runs:
        recipes[json.dumps(run.recipe, sort_keys=True, default=str)].append(run)
    if not recipes:
        return Cell(task, column)
    order = sorted(recipes, key=lambda recipe: (*_rank(recipes[recipe]), recipe))
    chosen = recipes[order[0]]
    scored = [run for run in chosen if run.score is not None]
    by_seed: dict[int, FormalRun] = {}
    for run in sorted(scored, key=lambda run: (run.seed, run.is_finished, run.num_strings)):
        by_seed[run.seed] = run
    return Cell(
        task,
        column,
        runs=list(by_seed.values()),
        pending=[run for run in chosen if run.score is None and run.seed not in by_seed],
        duplicates=[run for run in scored if run is not by_seed[run.seed]],
        other_recipes=[recipes[recipe] for recipe in order[1:]],
    )


def _rank(runs: list[FormalRun]) -> tuple[int, float, float, int, int]:
    """Return the sort key of a recipe, the lowest for the best."""
    scored = [run for run in runs if run.score is not None]
    seeds = len({run.seed for run in scored})
    accuracy, loss = compute_medians(scored)
    return (
        -min(seeds, ENOUGH_SEEDS),
        1.0 if accuracy is None else -accuracy,
        math.inf if loss is None else loss,
        -seeds,
        max(run.step for run in runs),
    )


def compute_medians(runs: list[FormalRun]) -> tuple[float | None, float | None]:
    """Return the median validation accuracy and loss of the runs, None if no run has one."""
    accuracies = [run.validation_accuracy for run in runs if run.validation_accuracy is not None]
    losses = [run.validation_loss for run in runs if run.validation_loss is not None]
    return statistics.median(accuracies) if accuracies else None, statistics.median(losses) if losses else None


def _join_paths(paths: Sequence[Path | str]) -> str:
    """Return the first three paths and how many more there are."""
    shown = ", ".join(map(str, paths[:3]))
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"
