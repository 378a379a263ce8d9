"""The formal-language table in Markdown, and the rows and notes that it shares with LaTeX."""

import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterable

from stackexp.reports.formal.cells import Cell, Report, compute_medians
from stackexp.reports.formal.paper import CLASSES, COLUMNS
from stackexp.reports.formal.recipes import find_differences, format_overrides, name_recipe
from stackexp.reports.formal.runs import Evaluation, FormalRun
from stackexp.runs import RunFolder, format_resume_command
from stackexp.tables import ABSENT, format_table
from stackexp.tasks import TASKS

BELOW, COARSE, UNFINISHED = "↓", "†", "‡"
LEGEND = (
    "Ours: best / median over the seeds (number of seeds) of the mean accuracy on lengths {first}..{last} "
    "({thoroughness}). Bold: at least the paper's score at two decimals; {below}: below it. paper: Table 1 of arXiv "
    "2507.15343, best seed; {absent}: not printed. StackTrans: any axis except depth."
)
FULL_TABLE = "python -m stackexp sweep run formal_table"
"""The shipped sweep that fills every cell."""
RECIPE_HEADER = ("model", "tasks", "steps", "recipe")
MAX_SHOWN_DIFFERENCES = 6

CellKey = tuple[str, str]
"""Task and column."""


def format_markdown(report: Report) -> str:
    """Return the table, the recipes, the commands for missing cells and notes as Markdown."""
    sections = {
        "Commands for missing cells": describe_commands(report),
        "Notes": [*describe_marks(report), *_describe_unused_runs(report), *report.skipped],
    }
    parts = [format_table(build_rows(report), header=build_header(), style="markdown"), format_legend(report)]
    parts += ["**Recipes**", format_table(build_recipe_rows(report), header=RECIPE_HEADER, style="markdown")]
    for title, lines in sections.items():
        if lines:
            parts += [f"**{title}**", "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join(parts) + "\n"


# Rows of the table


def build_header() -> list[str]:
    """Return the titles: the task, then each model and the paper's score, which both StackTrans columns share."""
    header = ["task"]
    for column in COLUMNS:
        header += [column] if column == "StackTrans" else [column, "paper"]
    return header


def build_rows(report: Report) -> list[list[str]]:
    """Return the rows below the header in Markdown: the name of each class, then its tasks."""
    rows = []
    for name, tasks in CLASSES.items():
        rows.append([f"*{name}*", *[""] * (len(build_header()) - 1)])
        for task in tasks:
            row = [task]
            for column in COLUMNS:
                cell = report.cells[task, column]
                row.append(_format_cell(report, cell))
                if column != "StackTrans":
                    row.append(ABSENT if cell.paper is None else f"{cell.paper:.2f}")
            rows.append(row)
    return rows


def _format_cell(report: Report, cell: Cell) -> str:
    if not cell.scores:
        return "missing" + UNFINISHED * cell.is_unfinished
    best = f"{max(cell.scores):.2f}"
    marks = COARSE * bool(report.find_coarse(cell)) + UNFINISHED * cell.is_unfinished
    rest = f"{BELOW * (cell.reaches_paper is False)} / {statistics.median(cell.scores):.2f} ({len(cell.scores)}){marks}"
    return (f"**{best}**" if cell.reaches_paper else best) + rest


def format_legend(report: Report) -> str:
    """Explain the scores of the table."""
    first, last = report.lengths
    how = _format_thoroughness(report.finest)
    return LEGEND.format(first=first, last=last, thoroughness=how, below=BELOW, absent=ABSENT)


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


def build_recipe_rows(report: Report) -> list[list[str]]:
    """Return a row of RECIPE_HEADER for each recipe of the table and the tasks that it is used for."""
    cells: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for column in COLUMNS:
        for cell in (report.cells[task, column] for task in TASKS):
            if cell.runs:
                cells[column, name_recipe(cell.runs[0])].append(cell)
    return [
        [column, _format_tasks([cell.task for cell in group]), _format_steps(group), f"`{recipe}`"]
        for (column, recipe), group in cells.items()
    ]


def _format_steps(cells: list[Cell]) -> str:
    steps = [run.step for cell in cells for run in cell.runs]
    return f"{min(steps):,}" if min(steps) == max(steps) else f"{min(steps):,} to {max(steps):,}"


# Notes


def describe_commands(report: Report) -> list[str]:
    """Return a line for each command that fills missing cells or finishes their runs."""
    cells: dict[str, list[CellKey]] = defaultdict(list)
    for key, cell in report.cells.items():
        if cell.pending:
            cells["; ".join(map(_resume_run, cell.pending))].append(key)
        elif not cell.runs:
            cells[FULL_TABLE].append(key)
    return [f"`{command}` ({_format_cells(keys)})" for command, keys in cells.items()]


def _resume_run(run: FormalRun) -> str:
    if run.is_finished:
        return f"python -m stackexp test --run {shlex.quote(str(run.path))} data.eval_max_length={run.lengths[1]}"
    return format_resume_command(RunFolder(run.path))


def _describe_unused_runs(report: Report) -> list[str]:
    notes = []
    for cell in report.cells.values():
        name = f"{cell.column}, {cell.task}"
        notes += [f"{name}: recipe not chosen: {_describe_other_recipe(cell, runs)}" for runs in cell.other_recipes]
        if cell.duplicates:
            paths = ", ".join(f"{run.path} (seed {run.seed})" for run in cell.duplicates)
            notes.append(f"{name}: duplicate seeds, not counted: {paths}")
    return notes


def describe_marks(report: Report) -> list[str]:
    """Return a line for each kind of coarse test, and one for unfinished runs."""
    coarse: dict[str, list[CellKey]] = defaultdict(list)
    for key, cell in report.cells.items():
        for thoroughness in dict.fromkeys(map(_format_thoroughness, report.find_coarse(cell))):
            coarse[thoroughness].append(key)
    notes = [f"{COARSE} tested less than others: {how} ({_format_cells(keys)})" for how, keys in sorted(coarse.items())]
    unfinished = [cell for cell in report.cells.values() if cell.is_unfinished]
    if unfinished:
        runs = "; ".join(map(_describe_unfinished, unfinished))
        notes.append(f"{UNFINISHED} some runs are not finished and tested: {runs}")
    return notes


def _describe_unfinished(cell: Cell) -> str:
    runs = [*cell.pending, *(run for run in cell.runs if not run.is_finished)]
    return f"{cell.column} {cell.task}: " + ", ".join(f"{run.path} ({_describe_state(run)})" for run in runs)


def _describe_state(run: FormalRun) -> str:
    if run.is_finished:
        return "not tested over these lengths"
    return f"at step {run.step:,} of {run.config['trainer.max_steps']:,}"


def _describe_other_recipe(cell: Cell, runs: list[FormalRun]) -> str:
    """Describe a recipe that was not chosen: its differences, its seeds and the validation scores that decided."""
    chosen = [*cell.runs, *cell.pending][0]
    changes = find_differences(runs[0].recipe, chosen.recipe)
    shown = format_overrides(dict(list(changes.items())[:MAX_SHOWN_DIFFERENCES]))
    shown += " ..." * (len(changes) > MAX_SHOWN_DIFFERENCES)
    finished = [run for run in runs if run.score is not None]
    if not finished:
        return f"`{shown}` ({_describe_state(runs[0])}; {runs[0].path})"
    seeds = len({run.seed for run in finished})
    validation = f"validation {_format_validation(finished)}, chosen {_format_validation(cell.runs)}"
    return f"`{shown}` ({seeds} seed{'s' * (seeds != 1)}, {validation}; {runs[0].path})"


def _format_validation(runs: list[FormalRun]) -> str:
    accuracy, loss = (ABSENT if value is None else f"{value:.3g}" for value in compute_medians(runs))
    return f"accuracy {accuracy} and loss {loss}"
