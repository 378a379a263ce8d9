"""The cells of the formal-language table: for each task and model the runs of its best recipe."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from stackexp.reports.formal.paper import get_printed_score
from stackexp.reports.formal.runs import FormalRun, Lengths

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
    lengths: Lengths
    runs: list[FormalRun] = field(default_factory=list)
    pending: list[FormalRun] = field(default_factory=list)
    duplicates: list[FormalRun] = field(default_factory=list)
    other_recipes: list[list[FormalRun]] = field(default_factory=list)

    @cached_property
    def scores(self) -> list[float]:
        """The scores of the runs."""
        return [score for run in self.runs if (score := run.compute_score(self.lengths)) is not None]

    @property
    def best_run(self) -> FormalRun:
        """The run with the best score, which is what the paper prints."""
        return max(self.runs, key=lambda run: run.compute_score(self.lengths) or 0.0)

    @property
    def paper(self) -> float | None:
        """The paper's score."""
        return get_printed_score(self.task, self.column)

    @property
    def is_below_paper(self) -> bool:
        """True if our best score, rounded to two decimals, is below the paper's."""
        return bool(self.scores) and self.paper is not None and round(max(self.scores), 2) < self.paper

    @property
    def reaches_paper(self) -> bool:
        """True if our best score, rounded to two decimals, is at least the paper's."""
        return bool(self.scores) and self.paper is not None and not self.is_below_paper

    @property
    def is_unfinished(self) -> bool:
        """True if runs of the recipe are unfinished or not tested."""
        return bool(self.pending) or any(not run.is_finished for run in self.runs)


def build_cell(task: str, column: str, runs: list[FormalRun], lengths: Lengths) -> Cell:
    """Choose the recipe of a cell on the validation strings, never by the score.

    The order is: three seeds before fewer, the best median validation accuracy, the lowest median validation loss
    (which separates recipes without errors), more seeds, fewer steps. Of several runs of a seed the more thoroughly
    tested one counts, then the later one.
    """
    recipes: dict[str, list[FormalRun]] = defaultdict(list)
    for run in runs:
        recipes[json.dumps(run.recipe, sort_keys=True, default=str)].append(run)
    if not recipes:
        return Cell(task, column, lengths)
    order = sorted(recipes, key=lambda recipe: (*_rank(recipes[recipe], lengths), recipe))
    chosen = recipes[order[0]]
    scored = [run for run in chosen if run.compute_score(lengths) is not None]
    by_seed: dict[int, FormalRun] = {}
    for run in scored:
        if run.seed not in by_seed or _weigh(run, lengths) >= _weigh(by_seed[run.seed], lengths):
            by_seed[run.seed] = run
    return Cell(
        task,
        column,
        lengths,
        runs=[by_seed[seed] for seed in sorted(by_seed)],
        pending=[run for run in chosen if run.compute_score(lengths) is None and run.seed not in by_seed],
        duplicates=[run for run in scored if run is not by_seed[run.seed]],
        other_recipes=[recipes[recipe] for recipe in order[1:]],
    )


def _weigh(run: FormalRun, lengths: Lengths) -> tuple[bool, int]:
    evaluation = run.find_evaluation(lengths)
    return run.is_finished, evaluation.count_strings(lengths) if evaluation else 0


def _rank(runs: list[FormalRun], lengths: Lengths) -> tuple[int, float, float, int, int]:
    """Return the sort key of a recipe, the lowest for the best."""
    scored = [run for run in runs if run.compute_score(lengths) is not None]
    seeds = len({run.seed for run in scored})
    accuracy, loss = get_median_accuracy(scored), get_median_loss(scored)
    return (
        -min(seeds, ENOUGH_SEEDS),
        1.0 if accuracy is None else -accuracy,
        math.inf if loss is None else loss,
        -seeds,
        max(run.step for run in runs),
    )


def get_median_accuracy(runs: list[FormalRun]) -> float | None:
    """Return the median validation accuracy of the runs, or None if none has one."""
    return _get_median(runs, lambda run: run.validation_accuracy)


def get_median_loss(runs: list[FormalRun]) -> float | None:
    """Return the median validation loss of the runs, or None if none has one."""
    return _get_median(runs, lambda run: run.validation_loss)


def _get_median(runs: list[FormalRun], read: Callable[[FormalRun], float | None]) -> float | None:
    known = [value for run in runs if (value := read(run)) is not None]
    return statistics.median(known) if known else None
