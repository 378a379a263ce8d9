"""The report on formal languages: Table 1 of the paper with our scores, recipes and notes."""

import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterable

from stackexp.reports.formal.cells import Cell, Results, compute_medians
from stackexp.reports.formal.figures import draw_bars
from stackexp.reports.formal.paper import CLASSES, COLUMNS
from stackexp.reports.formal.recipes import find_differences, format_overrides, name_recipe
from stackexp.reports.formal.records import build_records
from stackexp.reports.formal.runs import Evaluation, FormalRun
from stackexp.reports.report import Report, Table
from stackexp.runs import RunFolder, format_resume_command
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
FULL_TABLE = "python -m stackexp sweep run formal_table"
"""The shipped sweep that fills every cell."""
RECIPE_HEADER = ["model", "tasks", "steps", "recipe"]
MAX_SHOWN_DIFFERENCES = 6

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
    notes += _describe_commands(results)
    return Report(tables, notes, build_records(results), lambda: draw_bars(results))


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
        return "missing" + UNFINISHED * cell.is_unfinished
    best = f"{max(cell.scores):.2f}"
    marks = COARSE * bool(results.find_coarse(cell)) + UNFINISHED * cell.is_unfinished
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
    return [
        [column, _format_tasks([cell.task for cell in group]), _format_steps(group), f"`{recipe}`"]
        for (column, recipe), group in cells.items()
    ]


def _format_steps(cells: list[Cell]) -> str:
    steps = [run.step for cell in cells for run in cell.runs]
    return f"{min(steps):,}" if min(steps) == max(steps) else f"{min(steps):,} to {max(steps):,}"


# Notes


def _describe_commands(results: Results) -> list[str]:
    """Return a line for each command that finishes runs, and one for the cells without runs."""
    cells = results.cells.values()
    lines = [
        f"`{'; '.join(map(_resume_run, cell.pending))}` finishes {cell.column}: {cell.task}"
        for cell in cells
        if cell.pending
    ]
    if not all(cell.runs or cell.pending for cell in cells):
        lines.append(f"`{FULL_TABLE}` fills the missing cells")
    return lines


def _resume_run(run: FormalRun) -> str:
    if run.is_finished:
        return f"python -m stackexp test --run {shlex.quote(str(run.path))} data.eval_max_length={run.lengths[1]}"
    return format_resume_command(RunFolder(run.path))


def _describe_unused_runs(results: Results) -> list[str]:
    notes = []
    for cell in results.cells.values():
        name = f"{cell.column}, {cell.task}"
        notes += [f"{name}: recipe not chosen: {_describe_other_recipe(cell, runs)}" for runs in cell.other_recipes]
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
    unfinished = [cell for cell in results.cells.values() if cell.is_unfinished]
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
