"""The report on formal languages: Table 1 of the paper with our scores, recipes and notes."""

import functools
import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from stackexp.config.affects import FlatConfig, flatten_config
from stackexp.config.compose import compose
from stackexp.errors import ConfigError
from stackexp.reports.formal.figures import draw_bars
from stackexp.reports.formal.records import (
    CLASSES,
    COLUMNS,
    Cell,
    Evaluation,
    FormalRun,
    Results,
    select_recipe,
)
from stackexp.reports.report import Report, Table
from stackexp.sweeps.grid import format_value
from stackexp.tables import ABSENT
from stackexp.tasks import TASKS

BELOW, COARSE, UNFINISHED = "↓", "†", "‡"
TITLE = (
    "Table 1 of the paper. Best / median over the seeds (number of seeds) of the mean accuracy on lengths {first} to "
    "{last}. Bold or *: at least the paper's score at two decimals; {below}: below it"
)
LEGEND = (
    "Tested on {thoroughness}. paper: the best seed in Table 1 of arXiv 2507.15343; {absent}: not printed. StackTrans: "
    "any axis except depth."
)
FULL_TABLE = "`python -m stackexp sweep run formal_table` fills missing cells and finishes its runs"
RECIPE_HEADER = ["model", "tasks", "steps", "recipe"]
TASK_OPTIONS = ("data.task", "data.vocab_size", "data.output_vocab_size", "model.vocab_size", "model.output_vocab_size")
MAX_OVERRIDES = 4
"""A recipe that differs in more options from the shipped config is named by its run folder."""
MAX_SHOWN_DIFFERENCES = 6
RANGES = ((41, 100), (41, 500))
"""The CSV has scores over these lengths and over those of the table."""

CellKey = tuple[str, str]
"""Task and column."""


def build_formal(results: Results) -> Report:
    """Build the report: the table of the paper with our scores, and the recipes."""
    first, last = results.lengths
    title = TITLE.format(first=first, last=last, below=BELOW)
    tables = [
        Table(title, _build_header(), _build_rows(results)),
        Table("Recipes", RECIPE_HEADER, _build_recipe_rows(results), num_labels=len(RECIPE_HEADER)),
    ]
    legend = LEGEND.format(thoroughness=_format_thoroughness(results.finest), absent=ABSENT)
    notes = [legend, *_describe_marks(results), *_describe_unused_runs(results), *results.skipped]
    if any(cell.unfinished or not cell.runs for cell in results.cells.values()):
        notes.append(FULL_TABLE)
    return Report(tables, notes, _build_records(results), lambda: draw_bars(results))


# Rows of the table


def _build_header() -> list[str]:
    """Return the titles: the task, then each model and the paper's score, which both StackTrans columns share."""
    header = ["task"]
    for column in COLUMNS:
        header += [column] if column == "StackTrans" else [column, "paper"]
    return header


def _build_rows(results: Results) -> list[list[str]]:
    """Return the rows below the header in Markdown: the name of each class, then its tasks."""
    rows = []
    for name, tasks in CLASSES.items():
        rows.append([f"*{name}*", *[""] * (len(_build_header()) - 1)])
        for task in tasks:
            row = [task]
            for column in COLUMNS:
                cell = results.cells[task, column]
                row.append(_format_cell(results, cell))
                if column != "StackTrans":
                    row.append(ABSENT if cell.paper is None else f"{cell.paper:.2f}")
            rows.append(row)
    return rows


def _format_cell(results: Results, cell: Cell) -> str:
    if not cell.scores:
        return "missing" + UNFINISHED * bool(cell.unfinished)
    best = f"{max(cell.scores):.2f}"
    marks = COARSE * bool(results.find_coarse(cell)) + UNFINISHED * bool(cell.unfinished)
    rest = f"{BELOW * (cell.reaches_paper is False)} / {statistics.median(cell.scores):.2f} ({len(cell.scores)}){marks}"
    return (f"**{best}**" if cell.reaches_paper else best) + rest


def _format_thoroughness(evaluation: Evaluation) -> str:
    lengths = "every length" if evaluation.stride == 1 else f"one length in {evaluation.stride}"
    return f"{lengths}, {evaluation.sequences} strings each"


def _format_cells(keys: Iterable[CellKey]) -> str:
    """Return cells as `LSTM: even_pairs, parity_check; StackRNN: all tasks`."""
    columns: dict[str, list[str]] = defaultdict(list)
    for task, column in keys:
        columns[column].append(task)
    return "; ".join(f"{column}: {_format_tasks(tasks)}" for column, tasks in columns.items())


def _format_tasks(tasks: list[str]) -> str:
    return "all tasks" if set(tasks) == set(TASKS) else ", ".join(tasks)


# Recipes


def _build_recipe_rows(results: Results) -> list[list[str]]:
    """Return a row of RECIPE_HEADER for each recipe of the table and the tasks that it is used for."""
    cells: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for column in COLUMNS:
        for cell in (results.cells[task, column] for task in TASKS):
            if cell.runs:
                cells[column, name_recipe(cell.runs[0])].append(cell)
    rows = []
    for (column, recipe), group in cells.items():
        steps = {run.row["step"] for cell in group for run in cell.runs}
        shown = " to ".join(f"{step:,}" for step in dict.fromkeys([min(steps), max(steps)]))
        rows.append([column, _format_tasks([cell.task for cell in group]), shown, f"`{recipe}`"])
    return rows


def name_recipe(run: FormalRun) -> str:
    """Return the shipped config with the overrides that reproduce a run, or the run's config if that is shorter."""
    name = f"formal/{COLUMNS[run.column]}" + f"/{run.task}" * (run.column == "StackTrans")
    shipped = _compose_recipe(name)
    changes = find_differences(run, shipped) if shipped else {}
    if shipped is None or len(changes) > MAX_OVERRIDES:
        return f"{run.path}/config.yaml"
    return f"{name} {_format_overrides(changes)}".strip()


@functools.cache
def _compose_recipe(name: str) -> FlatConfig | None:
    """Return the recipe of a shipped config, or None if this version does not ship it."""
    try:
        return select_recipe(flatten_config(compose([name])))
    except ConfigError:
        return None


def find_differences(run: FormalRun, recipe: FlatConfig) -> dict[str, Any]:
    """Return the options in which a run differs from a recipe, except those of the task; None for missing ones."""
    keys = [key for key in {**recipe, **run.recipe} if key not in TASK_OPTIONS]
    absent = object()
    return {key: run.config.get(key) for key in keys if run.recipe.get(key, absent) != recipe.get(key, absent)}


def _format_overrides(options: dict[str, Any]) -> str:
    """Return options as overrides for the command line."""
    return " ".join(shlex.quote(f"{key}={format_value(value)}") for key, value in options.items())


# Notes


def _describe_unused_runs(results: Results) -> list[str]:
    notes = []
    for cell in results.cells.values():
        name = f"{cell.column}, {cell.task}"
        reason = "recipe not chosen by validation accuracy and seeds"
        notes += [f"{name}: {reason}: {_describe_other_recipe(cell, runs)}" for runs in cell.other_recipes]
        if cell.duplicates:
            paths = ", ".join(f"{run.path} (seed {run.seed})" for run in cell.duplicates)
            notes.append(f"{name}: duplicate seeds, not counted: {paths}")
    return notes


def _describe_marks(results: Results) -> list[str]:
    """Return a line for each kind of coarse test, one for runs trained on these lengths, one for unfinished runs."""
    coarse: dict[str, list[CellKey]] = defaultdict(list)
    for key, cell in results.cells.items():
        for thoroughness in dict.fromkeys(map(_format_thoroughness, results.find_coarse(cell))):
            coarse[thoroughness].append(key)
    notes = [f"{COARSE} tested less than others: {how} ({_format_cells(keys)})" for how, keys in sorted(coarse.items())]
    first, items = results.lengths[0], results.cells.items()
    trained = [key for key, cell in items if any(run.config["data.max_length"] >= first for run in cell.runs)]
    if trained:
        notes.append(f"trained on lengths that the score includes, {first} and more: {_format_cells(trained)}")
    unfinished = [run for cell in results.cells.values() for run in cell.unfinished]
    if unfinished:
        runs = "; ".join(f"{run.path} ({_describe_state(run)})" for run in unfinished)
        notes.append(f"{UNFINISHED} some runs are not finished and tested: {runs}")
    return notes


def _describe_state(run: FormalRun) -> str:
    if run.is_finished:
        return "not tested over these lengths"
    return f"at step {run.row['step']:,} of {run.config['trainer.max_steps']:,}"


def _describe_other_recipe(cell: Cell, runs: list[FormalRun]) -> str:
    """Describe a recipe that was not chosen: its differences from the chosen one, and its first run."""
    changes = list(find_differences(runs[0], [*cell.runs, *cell.pending][0].recipe).items())
    shown = _format_overrides(dict(changes[:MAX_SHOWN_DIFFERENCES])) + " ..." * (len(changes) > MAX_SHOWN_DIFFERENCES)
    return f"`{shown}` ({len({run.seed for run in runs})} seeds; {runs[0].path})"


# CSV


def _build_records(results: Results) -> list[dict[str, Any]]:
    """Return scores and row of each run found, also without scores; `in_table` is True if it counts in a cell."""
    cells = list(results.cells)
    runs = sorted(results.runs, key=lambda run: (cells.index((run.task, run.column)), run.seed, str(run.path)))
    return [_build_record(results, run) for run in runs]


def _build_record(results: Results, run: FormalRun) -> dict[str, Any]:
    cell, evaluation = results.cells[run.task, run.column], run.find_evaluation(results.lengths)
    record: dict[str, Any] = {"task": run.task, "class": TASKS[run.task].chomsky_class, "model": run.column}
    record |= {f"score_{a}_{b}": run.compute_score((a, b)) for a, b in dict.fromkeys((*RANGES, results.lengths))}
    record |= {"paper": cell.paper, "in_table": run in cell.runs, "recipe": name_recipe(run)}
    record["sequences_per_length"] = evaluation and evaluation.sequences
    record["length_stride"] = evaluation and evaluation.stride
    record["tested_in"] = evaluation and evaluation.path.name
    return record | {key: value for key, value in run.row.items() if key not in (*record, "accuracy")}
