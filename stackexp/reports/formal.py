"""The report on formal languages: Table 1 of the paper with our scores, recipes and notes, and its figures.

The figures are bars like the paper's, and accuracy against length.
"""

import functools
import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stackexp.config.affects import FlatConfig, flatten_config
from stackexp.config.compose import compose
from stackexp.errors import ConfigError
from stackexp.evaluation.accuracy import Lengths
from stackexp.reports.formal_runs import (
    COLUMNS,
    DEPTH,
    Cell,
    Evaluation,
    FormalRun,
    Results,
    collect_results,
    select_recipe,
)
from stackexp.reports.report import Report, Table, new_figure, save_figure
from stackexp.sweeps.schema import format_value
from stackexp.tables import ABSENT
from stackexp.tasks import CHOMSKY_TASKS

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
TASK_OPTIONS = ("data.task", "data.vocab_size", "data.output_vocab_size", "model.vocab_size", "model.output_vocab_size")
MAX_OVERRIDES = 4
"""A recipe that differs in more options from the shipped config is named by its run folder."""
MAX_SHOWN_DIFFERENCES = 6
BY_LENGTH = ("accuracy", "loss_above_entropy")
"""Values of result.json that the CSV leaves out, because they have an entry for each length."""
RANGES = ((41, 100), (41, 500))
"""The CSV has scores over these lengths and over those of the table."""

COLORS = {
    "LSTM": "#8c8c8c",
    "StackRNN": "#e69f00",
    "StackAttn": "#009e73",
    "Transformer": "#56b4e9",
    "StackTrans": "#c0272d",
    DEPTH: "#e8a0a3",
}
"""Distinct for color-blind readers (Okabe and Ito) and in gray; StackTrans stands out."""
BAR_WIDTH = 0.84 / len(COLUMNS)

CellKey = tuple[str, str]
"""Task and column."""


def build_formal(paths: Sequence[Path], lengths: Lengths = (41, 500), curves: Path | None = None) -> Report:
    """Build the report of the runs at or below `paths`: the table of the paper with our scores, and the recipes.

    With `curves`, the accuracy against length is drawn to this file.
    """
    results = collect_results(paths, lengths)
    if curves:
        save_figure(draw_curves(results), curves)
    columns = [title for column in COLUMNS for title in ([column] if column == "StackTrans" else [column, "paper"])]
    title = TITLE.format(first=lengths[0], last=lengths[1], below=BELOW)
    recipe_header = ["model", "tasks", "steps", "recipe"]
    tables = [
        Table(title, ["task", *columns], _build_rows(results, len(columns))),
        Table("Recipes", recipe_header, _build_recipe_rows(results), num_labels=len(recipe_header)),
    ]
    legend = LEGEND.format(thoroughness=_format_thoroughness(next(iter(results.finest.values()))), absent=ABSENT)
    notes = [legend, *_describe_marks(results), *_describe_unused_runs(results), *results.skipped]
    if any(cell.unfinished or not cell.runs for cell in results.cells.values()):
        notes.append(FULL_TABLE)
    return Report(tables, notes, _build_records(results), lambda: draw_bars(results))


# Rows of the table


def _build_rows(results: Results, num_columns: int) -> list[list[str]]:
    """Return the rows in Markdown: the name of each class, then its tasks. Both StackTrans share the paper's score."""
    rows = []
    for name, tasks in results.families.items():
        rows.append([f"*{name}*", *[""] * num_columns])
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


def _format_cells(results: Results, keys: Iterable[CellKey]) -> str:
    """Return cells as `LSTM: even_pairs, parity_check; StackRNN: all tasks`."""
    columns: dict[str, list[str]] = defaultdict(list)
    for task, column in keys:
        columns[column].append(task)
    return "; ".join(f"{column}: {_format_tasks(results, tasks)}" for column, tasks in columns.items())


def _format_tasks(results: Results, tasks: list[str]) -> str:
    return "all tasks" if set(tasks) == set(results.tasks) else ", ".join(tasks)


# Recipes


def _build_recipe_rows(results: Results) -> list[list[str]]:
    """Return model, tasks, steps and name of each recipe of the table."""
    groups: dict[tuple[str, str], dict[str, Cell]] = defaultdict(dict)
    for column in COLUMNS:
        for task in results.tasks:
            if (cell := results.cells[task, column]).runs:
                groups[column, name_recipe(cell.runs[0])][task] = cell
    rows = []
    for (column, recipe), cells in groups.items():
        steps = {run.row["step"] for cell in cells.values() for run in cell.runs}
        shown = " to ".join(f"{step:,}" for step in dict.fromkeys([min(steps), max(steps)]))
        rows.append([column, _format_tasks(results, list(cells)), shown, f"`{recipe}`"])
    return rows


def name_recipe(run: FormalRun) -> str:
    """Return the shipped config with the overrides that reproduce a run, or the run's config if that is shorter."""
    task = run.row["data.task"]
    has_own = run.column == "StackTrans" and task in CHOMSKY_TASKS
    name = f"formal/{COLUMNS[run.column]}" + f"/{task}" * has_own
    shipped = _compose_recipe(name)
    changes = find_changes(run, shipped) if shipped else {}
    if shipped is None or len(changes) > MAX_OVERRIDES:
        return f"{run.row['path']}/config.yaml"
    return f"{name} {_format_overrides(changes)}".strip()


@functools.cache
def _compose_recipe(name: str) -> FlatConfig | None:
    """Return the recipe of a shipped config, or None if this version does not ship it."""
    try:
        return select_recipe(flatten_config(compose([name])))
    except ConfigError:
        return None


def find_changes(run: FormalRun, recipe: FlatConfig) -> dict[str, Any]:
    """Return the options in which a run differs from a recipe, except those of the task; None for missing ones."""
    keys = [key for key in {**recipe, **run.recipe} if key not in TASK_OPTIONS]
    absent = object()
    return {key: run.row.get(key) for key in keys if run.recipe.get(key, absent) != recipe.get(key, absent)}


def _format_overrides(options: Mapping[str, Any]) -> str:
    return " ".join(shlex.quote(f"{key}={format_value(value)}") for key, value in options.items())


# Notes


def _describe_unused_runs(results: Results) -> list[str]:
    notes = []
    for (task, column), cell in results.cells.items():
        for runs in cell.other_recipes:
            changes = list(find_changes(runs[0], cell.recipe).items())
            differences = _format_overrides(dict(changes[:MAX_SHOWN_DIFFERENCES]))
            shown = f"`{differences}{' ...' * (len(changes) > MAX_SHOWN_DIFFERENCES)}`"
            seeds = len({run.row["seed"] for run in runs})
            reason = "recipe not chosen by validation accuracy and seeds"
            notes.append(f"{column}, {task}: {reason}: {shown} ({seeds} seeds; {runs[0].row['path']})")
        if cell.duplicates:
            paths = ", ".join(f"{run.row['path']} (seed {run.row['seed']})" for run in cell.duplicates)
            notes.append(f"{column}, {task}: duplicate seeds, not counted: {paths}")
    return notes


def _describe_marks(results: Results) -> list[str]:
    """Return lines for coarse tests, other lengths, runs trained on the tested lengths, and unfinished runs."""
    coarse: dict[str, list[CellKey]] = defaultdict(list)
    for key, cell in results.cells.items():
        for thoroughness in dict.fromkeys(map(_format_thoroughness, results.find_coarse(cell))):
            coarse[thoroughness].append(key)
    notes = [
        f"{COARSE} tested less than others: {how} ({_format_cells(results, keys)})"
        for how, keys in sorted(coarse.items())
    ]
    ranges: dict[Lengths, list[str]] = defaultdict(list)
    for (task, _), cell in results.cells.items():
        if cell.scores and cell.lengths != results.lengths and task not in ranges[cell.lengths]:
            ranges[cell.lengths].append(task)
    notes += [
        f"scored on lengths {first} to {last}: {', '.join(tasks)}" for (first, last), tasks in ranges.items() if tasks
    ]
    first = results.lengths[0]
    trained = [
        key
        for key, cell in results.cells.items()
        if any(run.row["data.max_length"] >= cell.lengths[0] for run in cell.runs)
    ]
    if trained:
        notes.append(f"trained on lengths that the score includes, {first} and more: {_format_cells(results, trained)}")
    unfinished = [run for cell in results.cells.values() for run in cell.unfinished]
    if unfinished:
        runs = "; ".join(f"{run.row['path']} ({_describe_state(run)})" for run in unfinished)
        notes.append(f"{UNFINISHED} some runs are not finished and tested: {runs}")
    return notes


def _describe_state(run: FormalRun) -> str:
    if run.is_finished:
        return "not tested over these lengths"
    return f"at step {run.row['step']:,} of {run.row['trainer.max_steps']:,}"


# CSV


def _build_records(results: Results) -> list[dict[str, Any]]:
    """Return scores and row of each run found, also without scores; `in_table` is True if it counts in a cell."""
    records = []
    cells = list(results.cells)
    families = {task: family for family, tasks in results.families.items() for task in tasks}
    keys = [(run.row["data.task"], run.column) for run in results.runs]
    for (task, column), run in sorted(
        zip(keys, results.runs, strict=True), key=lambda item: (cells.index(item[0]), item[1].row["seed"])
    ):
        cell, tested = results.cells[task, column], run.evaluation
        record: dict[str, Any] = {"task": task, "class": families[task], "model": column}
        record |= {f"score_{a}_{b}": run.compute_score((a, b)) for a, b in dict.fromkeys((*RANGES, results.lengths))}
        record |= {"paper": cell.paper, "in_table": run in cell.runs, "recipe": name_recipe(run)}
        record["sequences_per_length"] = tested and tested.sequences
        record["length_stride"] = tested and tested.stride
        record["tested_in"] = tested and tested.path.name
        records.append(record | {key: value for key, value in run.row.items() if key not in (*record, *BY_LENGTH)})
    return records


# Figures


def draw_bars(results: Results) -> Any:
    """Draw the best score of each model and task, a dot for the median over seeds, a line for the paper's score."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    num_rows = len(results.families) - 1  # the first two families share a row
    figure: Any = Figure(figsize=(11, 3.2 * num_rows), layout="constrained")
    top, *others = figure.subfigures(num_rows, 1, hspace=0.04)
    panels = [*top.subplots(1, 2, sharey=True), *(other.subplots() for other in others)]
    handles: dict[str, Any] = {}
    for axes, (name, tasks) in zip(panels, results.families.items(), strict=True):
        for i, task in enumerate(tasks):
            for j, column in enumerate(COLUMNS):
                if (cell := results.cells[task, column]).scores:
                    x = i + (j - (len(COLUMNS) - 1) / 2) * BAR_WIDTH
                    handles.setdefault(column, _draw_bar(axes, cell, x, column))
            axes.hlines(results.guess_accuracy(task), i - 0.46, i + 0.46, color="black", linestyle=":", linewidth=0.9)
        labels = [task.replace("_", "\n", 1).replace("_", " ") for task in tasks]
        axes.set_xticks(range(len(tasks)), labels, fontsize=8.5)
        axes.set(xlim=(-0.5, len(tasks) - 0.5), ylim=(0, 1.04))
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(name.capitalize(), fontsize=10)
    first, last = results.lengths
    for axes in (panels[0], *panels[2:]):
        axes.set_ylabel(f"Accuracy on lengths {first} to {last}")
    handles = {column: handles[column] for column in COLUMNS if column in handles}
    handles["median over seeds"] = Line2D([], [], marker=".", linestyle="", color="black")
    handles["paper"] = Line2D([], [], color="black", linewidth=1.4)
    handles["uniform guess"] = Line2D([], [], color="black", linestyle=":", linewidth=0.9)
    legend = {"loc": "outside lower center", "ncols": len(handles), "fontsize": 8, "frameon": False}
    figure.legend(handles.values(), handles.keys(), **legend)
    return figure


def _draw_bar(axes: Any, cell: Cell, x: float, column: str) -> Any:
    """Draw the scores of a cell, and the paper's if it prints one. Return the bar for the legend."""
    bar = axes.bar(x, max(cell.scores), BAR_WIDTH * 0.92, color=COLORS[column])
    axes.plot(x, statistics.median(cell.scores), ".", color="black", markersize=4)
    if cell.paper is not None:
        axes.hlines(cell.paper, x - BAR_WIDTH * 0.42, x + BAR_WIDTH * 0.42, color="black", linewidth=1.4)
    return bar


def draw_curves(results: Results) -> Any:
    """Draw accuracy against length for each task with runs: median over seeds, and the range of the seeds."""
    from matplotlib.lines import Line2D

    tasks = [task for task in results.tasks if any(results.cells[task, column].runs for column in COLUMNS)]
    width = 5 if len(tasks) == len(results.tasks) else min(4, len(tasks))
    height = -(-len(tasks) // width)
    size = max(2.7 * width, 6.5), 2.1 * height + 1.1
    figure, _ = new_figure(*size, height, width, sharex=True, sharey=True)
    figure.get_layout_engine().set(w_pad=0.09)  # inches, between the tick labels of neighboring panels
    for axes, task in zip(figure.axes, tasks, strict=False):
        _draw_task(results, axes, task)
    for axes in figure.axes[len(tasks) :]:
        axes.set_visible(False)
    for i in range(len(tasks), height * width):  # the last panel of each column has the tick labels
        figure.axes[i - width].xaxis.set_tick_params(labelbottom=True)
    figure.supxlabel(
        "Length (gray: training lengths)\nline: median over seeds; band: lowest to highest; dotted: uniform guess",
        fontsize=9,
    )
    figure.supylabel("Accuracy", fontsize=10)
    shown = [column for column in COLUMNS if any(results.cells[task, column].runs for task in tasks)]
    handles = [Line2D([], [], color=COLORS[column], linewidth=2) for column in shown]
    figure.legend(handles, shown, loc="outside upper center", ncols=min(len(shown), 2 * width), frameon=False)
    return figure


def _draw_task(results: Results, axes: Any, task: str) -> None:
    max_length = 0
    for column in COLUMNS:
        cell = results.cells[task, column]
        if cell.runs:
            lengths, low, median, high = build_curve(cell)
            axes.fill_between(lengths, low, high, color=COLORS[column], alpha=0.2, linewidth=0)
            axes.plot(lengths, median, color=COLORS[column], linewidth=1.3, zorder=3 if column == "StackTrans" else 2)
            max_length = max(max_length, *(run.row["data.max_length"] for run in cell.runs))
    axes.axhline(results.guess_accuracy(task), color="black", linestyle=":", linewidth=0.9)
    axes.axvspan(0, max_length, color="black", alpha=0.07, linewidth=0)
    axes.set_title(task, fontsize=9)
    axes.set(ylim=(0, 1.04), xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)


def build_curve(cell: Cell) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return the lengths that all seeds were tested at, and the lowest, median and highest accuracy at each."""
    curves = [evaluation.accuracy for evaluation in cell.evaluations]
    lengths = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[length] for curve in curves] for length in lengths]
    return lengths, [min(v) for v in values], [statistics.median(v) for v in values], [max(v) for v in values]
