"""Collect runs on formal languages as the cells of the paper's Table 1: for each task and model its best recipe."""

import json
import math
import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stackexp.config.affects import FlatConfig, changes_scores, get_effect, is_default
from stackexp.config.data import get_model_label
from stackexp.config.layers import split_overrides
from stackexp.config.registry import import_plugin
from stackexp.config.yaml_files import Leaf
from stackexp.errors import ConfigError, RunError
from stackexp.evaluation.accuracy import Lengths, average_accuracy, parse_accuracy
from stackexp.files import read_json
from stackexp.frame import Row, find_runs, get_options, list_rows, list_tests, load_runs
from stackexp.runs import RunFolder
from stackexp.tasks import CHOMSKY_TASKS, TASKS

# The paper's table

MODELS = ("LSTM", "StackRNN", "StackAttn", "Transformer", "StackTrans")
DEPTH = "StackTrans depth"
COLUMNS = {
    "LSTM": "lstm",
    "StackRNN": "stack_rnn",
    "StackAttn": "stack_attention",
    "Transformer": "transformer",
    "StackTrans": "stacktrans",
    DEPTH: "stacktrans-depth",
}
"""Column of our table -> model label: the paper's models, and a separate column for StackTrans on the depth axis.

The shipped config of a column is `formal/<label>`. StackTrans has one for each task in a folder of that name.
"""

TABLE_1: dict[str, tuple[float | None, ...]] = {
    "even_pairs": (1.00, 1.00, None, 0.49, 1.00),
    "parity_check": (1.00, 1.00, None, 0.50, 1.00),
    "cycle_navigation": (0.89, 1.00, None, 0.20, 1.00),
    "stack_manipulation": (0.66, 0.85, 0.93, 0.53, 0.92),
    "reverse_string": (0.71, 0.80, 1.00, 0.55, 1.00),
    "modular_arithmetic_brackets": (0.43, 0.42, 0.30, 0.30, 0.60),
    "missing_duplicate": (0.68, 0.67, None, 0.53, 1.00),
    "odds_first": (0.60, 0.55, None, 0.51, 0.53),
    "binary_addition": (0.56, 0.51, None, 0.48, 0.48),
    "binary_multiplication": (0.56, 0.53, None, 0.50, 0.48),
    "compute_sqrt": (0.64, 0.63, None, 0.51, 0.57),
    "bucket_sort": (0.79, 0.75, None, 0.79, 0.89),
}
"""Table 1 of arXiv 2507.15343: task -> accuracy of each of MODELS, best seed, on strings longer than in training.

It has two decimals, lacks modular_arithmetic, solve_equation and duplicate_string, and has StackAttn on three tasks.
"""
NOT_LOADED = "tasks of plugins that are not loaded"
ENOUGH_SEEDS = 3
"""Recipes with this many seeds are compared by their median."""


def get_printed_score(task: str, column: str) -> float | None:
    """Return the paper's score, or None. The depth axis is compared with the paper's StackTrans."""
    model = "StackTrans" if column == DEPTH else column
    return dict(zip(MODELS, TABLE_1.get(task, ()), strict=False)).get(model)


# Runs


@dataclass(frozen=True)
class Evaluation:
    """The accuracy at each tested length: `sequences` strings of every `stride`-th length.

    Raises RunError for a damaged file.
    """

    path: Path
    accuracy: dict[int, float]
    sequences: int
    stride: int

    @classmethod
    def read(cls, path: Path, record: Mapping[str, Any]) -> "Evaluation":
        """Build the evaluation from a result.json or a file of `test`."""
        try:
            accuracy = {length: float(value) for length, value in sorted(parse_accuracy(record).items())}
            return cls(path, accuracy, record["sequences_per_length"], record["length_stride"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else f"not a file of `test` ({error})"
            command = f"python -m stackexp test --run {shlex.quote(str(path.parent))}"
            raise RunError(f"{path}: {reason}; test the run again: {command}") from error

    def select_lengths(self, lengths: Lengths) -> list[int]:
        """Return the tested lengths in a range."""
        return [length for length in self.accuracy if lengths[0] <= length <= lengths[1]]

    def covers(self, lengths: Lengths) -> bool:
        """Return True if every length of the range is near a tested one: less than a stride, and half of the range."""
        tested, limit = self.select_lengths(lengths), min(self.stride, (lengths[1] - lengths[0]) // 2 + 1)
        return bool(tested) and min(tested) - lengths[0] < limit and lengths[1] - max(tested) < limit

    def count_strings(self, lengths: Lengths) -> int:
        """Return how many strings were tested in a range."""
        return len(self.select_lengths(lengths)) * self.sequences


@dataclass(frozen=True)
class FormalRun:
    """A run on a formal language. `row` is its row in the DataFrame of runs, `recipe` the options that seeds share.

    `evaluations` are read from result.json, test.json and test-to-*.json. `evaluation` is the one over the lengths of
    the table, or None.
    """

    column: str
    row: Row
    recipe: FlatConfig
    evaluations: list[Evaluation]
    evaluation: Evaluation | None

    @property
    def is_finished(self) -> bool:
        """True if the run has a result."""
        return self.row["state"] == "finished"

    def compute_score(self, lengths: Lengths) -> float | None:
        """Return the mean accuracy over a range of lengths, or None if it was not tested."""
        evaluation = find_evaluation(self.evaluations, lengths)
        return average_accuracy(evaluation.accuracy, lengths) if evaluation else None


def find_evaluation(evaluations: Sequence[Evaluation], lengths: Lengths) -> Evaluation | None:
    """Return the most thorough evaluation that covers the range; result.json wins a tie."""
    covering = [evaluation for evaluation in evaluations if evaluation.covers(lengths)]
    return max(covering, key=lambda evaluation: evaluation.count_strings(lengths), default=None)


def is_in_recipe(options: FlatConfig, key: str) -> bool:
    """Return True if runs of one recipe must have equal values of `key`, unlike their seed and options of the test."""
    return key != "seed" and (get_effect(options, key) in ("training", "continuation") or changes_scores(options, key))


def select_recipe(options: FlatConfig) -> FlatConfig:
    """Return the options that runs of one recipe share, without defaults: runs may be older than an option."""
    return {k: value for k, value in options.items() if is_in_recipe(options, k) and not is_default(options, k)}


def _read_tests(row: Row) -> tuple[list[Evaluation], list[str]]:
    """Return the evaluations of a run, and its files of tests of another checkpoint or of another config.

    Raises RunError for a damaged result.json or file of `test`.
    """
    folder = RunFolder(Path(row["path"]))
    evaluations = [Evaluation.read(folder.result, row)] if row["state"] == "finished" else []
    unused = []
    for path in list_tests(folder):
        test = read_json(path)
        if not isinstance(test, dict):
            raise RunError(f"{path}: not a file of `test`; move it elsewhere")
        if _is_same_run(test, row):
            evaluations.append(Evaluation.read(path, test))
        else:
            unused.append(str(path))
    return evaluations, unused


def _is_same_run(test: Mapping[str, Any], row: Row) -> bool:
    """Return True if a test used the checkpoint that the run itself tested, and overrides only options of the test."""
    keys = [key for key, *_ in split_overrides(test.get("overrides", []))]
    tested_step = row.get("tested_step", row["step"]) if row["state"] == "finished" else test.get("step")
    return not any(is_in_recipe(row, key) for key in keys) and test.get("step", tested_step) == tested_step


# Cells


@dataclass(frozen=True)
class Cell:
    """The scored runs of one recipe, one for each seed, their scores over `lengths`, and the paper's score.

    `unfinished` are runs of the recipe that are unfinished or not tested over the lengths, `duplicates` repeat a seed,
    and `other_recipes` were not chosen.
    """

    paper: float | None
    lengths: Lengths
    recipe: FlatConfig = field(default_factory=dict)
    runs: list[FormalRun] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    unfinished: list[FormalRun] = field(default_factory=list)
    duplicates: list[FormalRun] = field(default_factory=list)
    other_recipes: list[list[FormalRun]] = field(default_factory=list)

    @property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations that the scores come from."""
        return [run.evaluation for run in self.runs if run.evaluation]

    @property
    def reaches_paper(self) -> bool | None:
        """True if our best score, rounded to two decimals, is at least the paper's; None if one is missing."""
        return round(max(self.scores), 2) >= self.paper if self.scores and self.paper is not None else None


@dataclass(frozen=True)
class Results:
    """The cells by (task, column), all runs that were found, and notes about skipped folders and files.

    `families` are the rows of the table: family -> its tasks, those of Table 1 first, then all others with runs.
    """

    lengths: Lengths
    runs: list[FormalRun]
    cells: dict[tuple[str, str], Cell]
    families: dict[str, list[str]]
    skipped: list[str]

    @property
    def tasks(self) -> list[str]:
        """The tasks of the table in its order."""
        return [task for tasks in self.families.values() for task in tasks]

    @cached_property
    def finest(self) -> dict[Lengths, Evaluation]:
        """The most thorough evaluation in the table for each range of lengths; that of `lengths` first, if any."""
        evaluations: dict[Lengths, list[Evaluation]] = {self.lengths: []}
        for cell in self.cells.values():
            evaluations.setdefault(cell.lengths, []).extend(cell.evaluations)
        return {
            lengths: max(found, key=lambda evaluation: evaluation.count_strings(lengths))
            for lengths, found in evaluations.items()
            if found
        }

    def find_coarse(self, cell: Cell) -> list[Evaluation]:
        """Return the evaluations of a cell that are less thorough than others of the same lengths in the table."""
        if cell.lengths not in self.finest:
            return []
        most = self.finest[cell.lengths].count_strings(cell.lengths)
        return [evaluation for evaluation in cell.evaluations if evaluation.count_strings(cell.lengths) < most]

    def guess_accuracy(self, task: str) -> float:
        """Return the accuracy of a uniform guess."""
        if task in TASKS:
            return 1 / len(TASKS[task].rivals or TASKS[task].answer_symbols)
        return 1 / next(run.row["data.output_vocab_size"] for run in self.runs if run.row["data.task"] == task)


def collect_results(paths: Sequence[Path | str], lengths: Lengths) -> Results:
    """Build the table of the runs in these folders.

    Raises RunError for a folder without runs, and if no run is finished and tested over the lengths.
    """
    for path in paths:
        if not find_runs([path]):
            raise RunError(f"{path}: no run folder in it or below; give runs/<name>/<id>, or a folder of run folders")
    runs = []
    groups: dict[tuple[str, str], list[FormalRun]] = defaultdict(list)
    ranges: dict[str, Lengths] = {}
    skipped: dict[str, list[str]] = defaultdict(list)
    columns = {label: column for column, label in COLUMNS.items()}
    for row in list_rows(load_runs(paths)):
        if row["state"] == "damaged":
            skipped[f"skipped, {row['problem']}"].append(row["path"])
        elif row.get("data.kind") != "formal_language" or not isinstance(row.get("data.task"), str):
            skipped["skipped, not a formal language"].append(row["path"])
        elif column := columns.get(get_model_label(row)):
            evaluations, unused = _read_tests(row)
            if problem := _load_task(row):
                skipped[problem].append(row["path"])
            recipe = select_recipe(get_options(row))
            tested = find_evaluation(evaluations, ranges.setdefault(row["data.task"], _choose_lengths(row, lengths)))
            runs.append(FormalRun(column, row, recipe, evaluations, tested))
            groups[row["data.task"], column].append(runs[-1])
            if unused:
                skipped["skipped, test of another checkpoint, or with overrides that change more than the test"] += (
                    unused
                )
        else:
            skipped["skipped, the table has no column for this model"].append(row["path"])
    notes = [f"{reason}: {_join_paths(found)}" for reason, found in skipped.items()]
    families = _sort_into_families(ranges)
    keys = [(task, column) for tasks in families.values() for task in tasks for column in COLUMNS]
    cells = {key: _build_cell(*key, ranges.get(key[0], lengths), groups[key]) for key in keys}
    if not any(cell.scores for cell in cells.values()):
        unscored = f"{len(runs)} runs are unfinished or not tested over {lengths[0]}..{lengths[1]}"
        raise RunError(
            f"{_join_paths(paths)}: no finished run on a formal language ({'; '.join([unscored, *notes])}); finish or "
            "test one"
        )
    return Results(lengths, runs, cells, families, notes)


def _choose_lengths(row: Row, lengths: Lengths) -> Lengths:
    """Return the lengths that a task is scored over: those of the table, or all tested ones for tasks of its own."""
    own = row["data.max_length"] + 1, row["data.eval_max_length"]
    usual = row["data.task"] in CHOMSKY_TASKS or own[0] <= lengths[0] <= lengths[1] <= own[1]
    return lengths if usual else own


def _load_task(row: Row) -> str:
    """Import the plugins of a run if they may have its task, under the rules of trust. Return the problem, or ""."""
    for name in row.get("plugins") or []:
        if row["data.task"] not in TASKS:
            try:
                import_plugin(Leaf(name, f"{row['path']}/config.yaml"), Path(row["path"]))
            except ConfigError as error:
                return f"plugin not loaded ({error})"
    return ""


def _sort_into_families(tasks: Iterable[str]) -> dict[str, list[str]]:
    """Return {family: tasks}: the tasks of Table 1, then these tasks in the order of TASKS, unknown ones last."""
    found, families = set(tasks), defaultdict[str, list[str]](list)
    for name in [*CHOMSKY_TASKS, *(name for name in TASKS if name in found - CHOMSKY_TASKS.keys())]:
        families[TASKS[name].family].append(name)
    if unknown := sorted(found - TASKS.keys()):
        families[NOT_LOADED] += unknown
    return dict(families)


def _build_cell(task: str, column: str, lengths: Lengths, found: list[FormalRun]) -> Cell:
    """Choose the recipe of a cell by its results on validation strings, never by its test score.

    The criteria, in this order: at least three seeds, the best median validation accuracy, the lowest median validation
    loss (which separates recipes without errors), more seeds, fewer steps. If a seed has several runs, the more
    thoroughly tested one counts, then the later one.
    """
    recipes: dict[str, list[FormalRun]] = defaultdict(list)
    for run in found:
        recipes[json.dumps(run.recipe, sort_keys=True, default=str)].append(run)
    paper = get_printed_score(task, column)
    if not recipes:
        return Cell(paper, lengths)
    chosen, *others = (recipes[name] for name in sorted(recipes, key=lambda name: (*_rank(recipes[name]), name)))

    def count_strings(run: FormalRun) -> int:
        return run.evaluation.count_strings(lengths) if run.evaluation else 0

    scored = [run for run in chosen if run.evaluation]
    by_seed = {
        run.row["seed"]: run
        for run in sorted(scored, key=lambda run: (run.row["seed"], run.is_finished, count_strings(run)))
    }
    runs = list(by_seed.values())
    pending = [run for run in chosen if not run.evaluation and run.row["seed"] not in by_seed]
    return Cell(
        paper,
        lengths,
        chosen[0].recipe,
        runs,
        scores=[score for run in runs if (score := run.compute_score(lengths)) is not None],
        unfinished=[*pending, *(run for run in runs if not run.is_finished)],
        duplicates=[run for run in scored if run not in runs],
        other_recipes=others,
    )


def _rank(runs: list[FormalRun]) -> tuple[int, float, float, int, int]:
    """Return the sort key of a recipe, the lowest for the best."""
    scored = [run for run in runs if run.evaluation]
    seeds = len({run.row["seed"] for run in scored})
    accuracies, losses = (
        [run.row[key] for run in scored if key in run.row] for key in ("validation_accuracy", "validation_loss")
    )
    return (
        -min(seeds, ENOUGH_SEEDS),
        -statistics.median(accuracies or [-1.0]),
        statistics.median(losses or [math.inf]),
        -seeds,
        max(run.row["step"] for run in runs),
    )


def _join_paths(paths: Sequence[Path | str]) -> str:
    shown = ", ".join(map(str, paths[:3]))
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"
