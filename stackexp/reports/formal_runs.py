"""Collect runs on formal languages as the cells of tables: for each task and model its best recipe."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stackexp.config.affects import FlatConfig, changes_scores, get_effect, is_default
from stackexp.config.data import get_model_label
from stackexp.config.layers import read_overrides
from stackexp.config.registry import import_plugin
from stackexp.config.yaml_files import Leaf
from stackexp.errors import ConfigError, RunError
from stackexp.evaluation.accuracy import Lengths, average_accuracy, parse_accuracy
from stackexp.frame import Row, find_runs, get_options, list_tests, read_evaluation, read_rows, read_start
from stackexp.runs import RunFolder
from stackexp.sweeps.trials import has_failed
from stackexp.tables import ABSENT
from stackexp.tasks import CHOMSKY_TASKS, TASKS

# The paper's table

MODELS = ("LSTM", "StackRNN", "StackAttn", "Transformer", "StackTrans")
DEPTH = "StackTrans depth"
COLUMNS = (*MODELS, DEPTH)
"""The columns of Table 1: the paper's models, and a separate column for StackTrans on the depth axis."""
NAMES = {
    "lstm": "LSTM",
    "stack_rnn": "StackRNN",
    "stack_attention": "StackAttn",
    "transformer": "Transformer",
    "stacktrans": "StackTrans",
    "delta_net": "DeltaNet",
    "delta_product": "DeltaProduct",
}
"""Model label -> name of its column. Other labels are names, too."""

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
SOLVED = 0.99
"""Mean accuracy from which a run counts as a solution."""


def get_printed_score(task: str, column: str) -> float | None:
    """Return the paper's score, or None. The depth axis is compared with the paper's StackTrans."""
    model = "StackTrans" if column == DEPTH else column
    return dict(zip(MODELS, TABLE_1.get(task, ()), strict=False)).get(model)


def name_column(row: Row) -> str:
    """Return the column of a run. In Table 1, a stack over the tokens is StackTrans, with and without feedback."""
    label, details = get_model_label(row), []
    if row.get("model.memory.kind") == "stack":
        label, *details = label.split("-")
        if row["data.task"] not in CHOMSKY_TASKS:
            details += [row["model.memory.axis"]] * ("depth" not in details)
            details += ["+ feedback"] * bool(row.get("model.memory.feedback"))
    elif row["model.kind"] == "delta_net":
        details = ["[-1, 1]" if row.get("model.allow_negative_eigenvalues", True) else "[0, 1]"]
    return " ".join([NAMES.get(label, label.replace("_", " ")), *details])


# Runs


@dataclass(frozen=True)
class LengthTest:
    """The accuracy at each tested length: `sequences` strings of every `stride`-th length.

    `excess` is the loss above the entropy of the source, in nats per symbol; empty for most tasks.
    """

    path: Path
    accuracy: dict[int, float]
    sequences: int
    stride: int
    excess: dict[int, float]

    @classmethod
    def read(cls, path: Path, record: Mapping[str, Any]) -> "LengthTest":
        """Build the evaluation from the contents of a result.json or of a file of `test`."""
        accuracy = dict(sorted(parse_accuracy(record).items()))
        losses = record.get("loss_above_entropy", {}).items()
        excess = {int(length): math.inf if value is None else value for length, value in losses}
        return cls(path, accuracy, record["sequences_per_length"], record["length_stride"], excess)

    def select_lengths(self, lengths: Lengths) -> list[int]:
        """Return the tested lengths in a range."""
        return [length for length in self.accuracy if lengths[0] <= length <= lengths[1]]

    def covers(self, lengths: Lengths, longest: int) -> bool:
        """Return True if every length of the range is near a tested one: less than a stride, and half of the range.

        The range may not end after `longest`, the last length of the run's own test, nor after the last tested one.
        Tests of earlier versions omit the last length.
        """
        tested, limit = self.select_lengths(lengths), min(self.stride, (lengths[1] - lengths[0]) // 2 + 1)
        if not tested or lengths[1] > max(longest, *self.accuracy):
            return False
        return min(tested) - lengths[0] < limit and lengths[1] - max(tested) < limit

    def count_strings(self, lengths: Lengths) -> int:
        """Return how many strings were tested in a range."""
        return len(self.select_lengths(lengths)) * self.sequences


@dataclass(frozen=True)
class FormalRun:
    """A run on a formal language. `row` is its row in the DataFrame of runs, `lengths` the range that is scored.

    `evaluations` are read from result.json, test.json and test-to-*.json.
    """

    column: str
    row: Row
    evaluations: list[LengthTest]
    lengths: Lengths

    @property
    def task(self) -> str:
        """The name of the task."""
        return self.row["data.task"]

    @property
    def key(self) -> tuple[str, str]:
        """The key of its cell."""
        return self.task, self.column

    @property
    def is_finished(self) -> bool:
        """True if the run has a result."""
        return self.row["state"] == "finished"

    @cached_property
    def has_failed(self) -> bool:
        """True if the run is a trial that failed."""
        return has_failed(RunFolder(Path(self.row["path"])))

    @property
    def num_strings(self) -> int:
        """The number of test strings over `lengths`."""
        return self.evaluation.count_strings(self.lengths) if self.evaluation else 0

    @cached_property
    def recipe(self) -> FlatConfig:
        """The options that seeds share."""
        return select_recipe(get_options(self.row))

    @cached_property
    def evaluation(self) -> LengthTest | None:
        """The evaluation over `lengths`, or None."""
        return self.find_evaluation(self.lengths)

    def find_evaluation(self, lengths: Lengths) -> LengthTest | None:
        """Return the most thorough evaluation that covers the range; result.json wins a tie."""
        longest = self.row["data.eval_max_length"]
        covering = [evaluation for evaluation in self.evaluations if evaluation.covers(lengths, longest)]
        return max(covering, key=lambda evaluation: evaluation.count_strings(lengths), default=None)

    def compute_score(self, lengths: Lengths) -> float | None:
        """Return the mean accuracy over a range of lengths, or None if it was not tested."""
        evaluation = self.find_evaluation(lengths)
        return average_accuracy(evaluation.accuracy, lengths) if evaluation else None

    def compute_excess(self) -> float | None:
        """Return the mean loss above the entropy over `lengths`, or None without an entropy."""
        excess = self.evaluation and self.evaluation.excess
        return average_accuracy(excess, self.lengths) if excess else None


def is_in_recipe(options: FlatConfig, key: str) -> bool:
    """Return True if runs of one recipe must have equal values of `key`, unlike their seed and options of the test."""
    return key != "seed" and (get_effect(options, key) in ("training", "continuation") or changes_scores(options, key))


def select_recipe(options: FlatConfig) -> FlatConfig:
    """Return the options that runs of one recipe share, without defaults: runs may be older than an option."""
    return {k: value for k, value in options.items() if is_in_recipe(options, k) and not is_default(options, k)}


def _read_tests(row: Row) -> tuple[list[LengthTest], list[str]]:
    """Return the evaluations of a run, and its files of tests of another checkpoint or of another config.

    Raises RunError for a damaged result.json or file of `test`.
    """
    folder = RunFolder(Path(row["path"]))
    evaluations = [LengthTest.read(folder.result, row)] if row["state"] == "finished" else []
    unused = []
    for path in list_tests(folder):
        test = read_evaluation(path)
        if _is_same_run(test, row):
            evaluations.append(LengthTest.read(path, test))
        else:
            unused.append(str(path))
    return evaluations, unused


def _is_same_run(test: Mapping[str, Any], row: Row) -> bool:
    """Return True if a test used the checkpoint that the run itself tested, and overrides only options of the test."""
    keys = [key for key, *_ in read_overrides(test.get("overrides", []))]
    tested_step = row.get("tested_step", row["step"]) if row["state"] == "finished" else test.get("step")
    return not any(is_in_recipe(row, key) for key in keys) and test.get("step", tested_step) == tested_step


def read_runs(paths: Sequence[Path | str], lengths: Lengths) -> tuple[list[FormalRun], list[str]]:
    """Return the runs in these folders, scored over `lengths` or those of their task, and notes about skipped files.

    Raises RunError for a folder without runs.
    """
    for path in paths:
        if not find_runs([path]):
            raise RunError(f"{path}: no run folder in it or below; give runs/<name>/<id>, or a folder of run folders")
    found: dict[str, list[tuple[Row, list[LengthTest]]]] = defaultdict(list)
    skipped: dict[str, list[str]] = defaultdict(list)
    for row in read_rows(paths):
        if row["state"] == "damaged":
            skipped[f"skipped, {row['problem']}"].append(row["path"])
        elif row.get("data.kind") != "formal_language" or not isinstance(row.get("data.task"), str):
            skipped["skipped, not a formal language"].append(row["path"])
        else:
            evaluations, unused = _read_tests(row)
            if problem := _load_task(row):
                skipped[problem].append(row["path"])
            found[row["data.task"]].append((row, evaluations))
            skipped["skipped, test of another checkpoint or config"] += unused
    runs = []
    for task, pairs in found.items():
        chosen = _choose_lengths(task, [row for row, _ in pairs], lengths)
        runs += [FormalRun(name_column(row), row, evaluations, chosen) for row, evaluations in pairs]
    return runs, [f"{reason}: {join_paths(paths)}" for reason, paths in skipped.items() if paths]


def _choose_lengths(task: str, rows: Sequence[Row], lengths: Lengths) -> Lengths:
    """Return the lengths that a task is scored over: those of the table, or else all that no run was trained on."""
    longest = max(row["data.max_length"] for row in rows)
    first = TASKS[task].find_unseen_length(longest) if task in TASKS else longest + 1
    own = first, max(row["data.eval_max_length"] for row in rows)
    return lengths if task in CHOMSKY_TASKS or own[0] <= lengths[0] <= lengths[1] <= own[1] else own


def _load_task(row: Row) -> str:
    """Import the plugins of a run if they may have its task, under the rules of trust. Return the problem, or ""."""
    for name in row.get("plugins") or []:
        if row["data.task"] not in TASKS:
            try:
                import_plugin(Leaf(name, f"{row['path']}/config.yaml"), Path(row["path"]))
            except ConfigError as error:
                return f"plugin not loaded ({error})"
    return ""


def get_family(task: str) -> str:
    """Return the class of a task."""
    return TASKS[task].family if task in TASKS else NOT_LOADED


def sort_tasks(tasks: Collection[str]) -> list[str]:
    """Return tasks by family in the order of TASKS, unknown ones last."""
    order = [*TASKS, *sorted(set(tasks) - TASKS.keys())]
    families = list(dict.fromkeys(map(get_family, order)))
    return sorted(set(tasks), key=lambda task: (families.index(get_family(task)), order.index(task)))


def label_task(task: str, own: Lengths, lengths: Lengths) -> str:
    """Return the name of a task, with the lengths that it is scored over unless they are those of the table."""
    return task if own == lengths else f"{task} ({own[0]} to {own[1]})"


def count_solved(scores: Sequence[float], failed: int = 0) -> str:
    """Return the number of solved runs of all, such as 2/3; `failed` runs have no score."""
    count = len(scores) + failed
    return f"{sum(score >= SOLVED for score in scores)}/{count}" if count else ABSENT


def join_paths(paths: Sequence[Path | str]) -> str:
    """Return the first three paths, and the number of the others."""
    shown = ", ".join(map(str, paths[:3]))
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"


# Cells


@dataclass(frozen=True)
class Cell:
    """The scored runs of one recipe, one for each seed, their scores over `lengths`, and the paper's score.

    `unfinished` are runs of the recipe that are unfinished or not tested over the lengths, `failed` have failed,
    `duplicates` repeat a seed, and `other_recipes` were not chosen.
    """

    paper: float | None
    lengths: Lengths
    recipe: FlatConfig = field(default_factory=dict)
    runs: list[FormalRun] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    unfinished: list[FormalRun] = field(default_factory=list)
    failed: list[FormalRun] = field(default_factory=list)
    duplicates: list[FormalRun] = field(default_factory=list)
    other_recipes: list[list[FormalRun]] = field(default_factory=list)

    @property
    def reaches_paper(self) -> bool | None:
        """True if our best score, rounded to two decimals, is at least the paper's; None if one is missing."""
        return round(max(self.scores), 2) >= self.paper if self.scores and self.paper is not None else None

    @property
    def excesses(self) -> list[float]:
        """The losses above the entropy, for tasks that are scored by it."""
        return [excess for run in self.runs if (excess := run.compute_excess()) is not None]


@dataclass(frozen=True)
class Results:
    """The cells by (task, column), all runs that were found, and notes about skipped folders and files."""

    lengths: Lengths
    runs: list[FormalRun]
    cells: dict[tuple[str, str], Cell]
    skipped: list[str]

    @cached_property
    def tables(self) -> list[list[str]]:
        """The tasks of Table 1, if one of them has a run, and all other tasks with runs."""
        tasks = sort_tasks({task for task, _ in self.cells})
        tables = [[task for task in tasks if (task in CHOMSKY_TASKS) == is_table_1] for is_table_1 in (True, False)]
        return [table for table in tables if table]

    def list_columns(self, tasks: Collection[str] | None = None) -> list[str]:
        """Return the columns of these tasks, by default of all, in the order of NAMES; other columns are last."""
        columns = {column for task, column in self.cells if tasks is None or task in tasks}
        return sorted(columns, key=lambda c: (*(not c.startswith(name) for name in NAMES.values()), c))

    @cached_property
    def finest(self) -> dict[tuple[bool, Lengths], FormalRun]:
        """The most thoroughly tested run of Table 1 (True) and of the other one, for each range of lengths."""
        found: dict[tuple[bool, Lengths], list[FormalRun]] = defaultdict(list)
        for (task, _), cell in self.cells.items():
            found[task in CHOMSKY_TASKS, cell.lengths] += cell.runs
        return {key: max(runs, key=lambda run: run.num_strings) for key, runs in found.items() if runs}

    def find_coarse(self, task: str, column: str) -> list[FormalRun]:
        """Return the runs of a cell that were tested less than others of the table over the same lengths."""
        cell = self.cells[task, column]
        finest = self.finest.get((task in CHOMSKY_TASKS, cell.lengths))
        return [run for run in cell.runs if finest and run.num_strings < finest.num_strings]

    def guess_accuracy(self, task: str) -> float:
        """Return the accuracy of a uniform guess; 0 where a prediction needs most of the probability of its rivals."""
        if task in TASKS:
            return 0.0 if TASKS[task].rivals else 1 / len(TASKS[task].answer_symbols)
        return 1 / next(run.row["data.output_vocab_size"] for run in self.runs if run.task == task)


def collect_cells(paths: Sequence[Path | str], lengths: Lengths) -> Results:
    """Build the cells of the runs in these folders.

    Raises RunError for a folder without runs, and if no run is finished and tested over the lengths.
    """
    runs, notes = read_runs(paths, lengths)
    groups: dict[tuple[str, str], list[FormalRun]] = defaultdict(list)
    for run in runs:
        groups[run.key].append(run)
    cells, ranges = {}, {run.task: run.lengths for run in runs}
    for task in sort_tasks({*ranges, *(CHOMSKY_TASKS if CHOMSKY_TASKS.keys() & ranges else ())}):
        is_in_table_1 = task in CHOMSKY_TASKS
        others = [column for other, column in groups if (other in CHOMSKY_TASKS) == is_in_table_1]
        for column in dict.fromkeys([*(COLUMNS if is_in_table_1 else ()), *others]):
            cells[task, column] = _build_cell(task, column, ranges.get(task, lengths), groups.get((task, column), []))
    if not any(cell.scores for cell in cells.values()):
        unscored = f"{len(runs)} runs are unfinished or not tested over {lengths[0]}..{lengths[1]}"
        raise RunError(
            f"{join_paths(paths)}: no finished run on a formal language ({'; '.join([unscored, *notes])}); finish or "
            "test one"
        )
    return Results(lengths, runs, cells, notes)


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

    scored = [run for run in chosen if run.evaluation]
    ordered = sorted(scored, key=lambda run: (run.row["seed"], run.is_finished, run.num_strings, read_start(run.row)))
    by_seed = {run.row["seed"]: run for run in ordered}
    runs = list(by_seed.values())
    pending = [run for run in chosen if not run.evaluation and run.row["seed"] not in by_seed]
    failed = list({run.row["seed"]: run for run in pending if run.has_failed}.values())
    return Cell(
        paper,
        lengths,
        chosen[0].recipe,
        runs,
        scores=[score for run in runs if (score := run.compute_score(lengths)) is not None],
        unfinished=[run for run in (*pending, *runs) if run not in failed and not (run.is_finished and run.evaluation)],
        failed=failed,
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
    if any(run.evaluation and run.evaluation.excess for run in scored):
        accuracies = []  # the loss is the score
    return (
        -min(seeds, ENOUGH_SEEDS),
        -statistics.median(accuracies or [-1.0]),
        statistics.median(losses or [math.inf]),
        -seeds,
        max(run.row["step"] for run in runs),
    )
