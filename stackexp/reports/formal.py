"""The report on formal languages: Table 1 of the paper with our scores, recipes and notes, and its figures.

The figures are bars like the paper's, and accuracy against length.
"""

import functools
import itertools
import math
import shlex
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stackexp.config.affects import FlatConfig, flatten_config, get_value
from stackexp.config.compose import compose
from stackexp.config.data import get_model_label
from stackexp.errors import ConfigError
from stackexp.evaluation.accuracy import Lengths
from stackexp.reports.formal_arms import build_arms
from stackexp.reports.formal_runs import (
    COLUMNS,
    DEPTH,
    SOLVED,
    Cell,
    FormalRun,
    Results,
    collect_cells,
    count_solved,
    get_family,
    join_paths,
    label_task,
    select_recipe,
)
from stackexp.reports.report import Report, Table, new_figure, save_figure
from stackexp.sweeps.schema import format_value
from stackexp.tables import ABSENT
from stackexp.tasks import CHOMSKY_TASKS

BELOW, COARSE, UNFINISHED = "↓", "†", "‡"
CELLS = "Best / median over the seeds (solved / all seeds) of the mean accuracy on lengths {} to {}"
TITLES = (
    "Table 1 of the paper. {cells}. Bold or *: at least the paper's score at two decimals; {below}: below it",
    "Tasks outside the paper's table. {cells}, or those stated",
)
LEGEND = "Tested on {}. Solved: a mean accuracy of at least {}. {}: no runs, or not printed in the paper"
PAPER_LEGEND = "paper: the best seed in Table 1 of arXiv 2507.15343. StackTrans in Table 1: any axis except depth"
EXCESS_LEGEND = "nats: loss per symbol above the entropy of the source, lowest / median over the seeds (seeds)"
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
OTHER_COLORS = ("#0072b2", "#d55e00", "#cc79a7", "#7b5ea7", "#8a8a00", "#004d40", "#8b5a2b", "#9ad0c2")
"""Colors of columns that are not in COLORS, repeated if they are more."""
DASH = 5.0
"""Length of a dash, relative to the width of the line."""
MAX_TASKS = 8
"""Most tasks in a row of the bars."""

CellKey = tuple[str, str]
"""Task and column."""


def build_formal(
    paths: Sequence[Path],
    lengths: Lengths = (41, 500),
    curves: Path | None = None,
    arms: bool = False,
    one_setting: bool = False,
) -> Report:
    """Build the report of the runs at or below `paths`: the table of the paper with our scores, and the recipes.

    With `curves`, the accuracy against length is drawn to this file. With `arms`, returns `build_arms` instead, for
    one setting of each arm with `one_setting`.
    """
    if arms:
        return build_arms(paths, lengths, one_setting)
    results = collect_cells(paths, lengths)
    if curves:
        save_figure(draw_curves(results), curves)
    tables = [_build_table(results, tasks) for tasks in results.tables]
    header = ["model", "tasks", "steps", "recipe"]
    tables.append(Table("Recipes", header, _build_recipe_rows(results), num_labels=len(header)))
    notes = [*_describe_marks(results), *_describe_unused_runs(results), *results.skipped]
    if any(cell.unfinished or not cell.runs for key, cell in results.cells.items() if _is_of_paper(*key)):
        notes.append(FULL_TABLE)
    return Report(tables, notes, _build_records(results), lambda: draw_bars(results))


# Rows of the tables


def _is_of_paper(task: str, column: str) -> bool:
    return task in CHOMSKY_TASKS and column in COLUMNS


def _build_table(results: Results, tasks: list[str]) -> Table:
    """Return Table 1 or that of the other tasks, in Markdown. Both StackTrans columns share the paper's score."""
    is_table_1, columns = tasks[0] in CHOMSKY_TASKS, results.list_columns(tasks)
    with_paper = [column for column in COLUMNS if is_table_1 and column != "StackTrans"]
    header = ["class", "task", *(name for column in columns for name in [column, *["paper"] * (column in with_paper)])]
    rows = []
    for family, members in itertools.groupby(tasks, get_family):
        for i, task in enumerate(members):
            row = ["" if i else family, label_task(task, results.cells[task, columns[0]].lengths, results.lengths)]
            for column in columns:
                row.append(_format_cell(results, task, column))
                if column in with_paper:
                    paper = results.cells[task, column].paper
                    row.append(ABSENT if paper is None else f"{paper:.2f}")
            rows.append(row)
    return Table(
        TITLES[not is_table_1].format(cells=CELLS.format(*results.lengths), below=BELOW), header, rows, num_labels=2
    )


def _format_cell(results: Results, task: str, column: str) -> str:
    cell = results.cells[task, column]
    if not cell.scores and cell.failed:
        return f"failed ({count_solved([], len(cell.failed))}){UNFINISHED * bool(cell.unfinished)}"
    if not cell.scores:
        is_missing = cell.unfinished or _is_of_paper(task, column)
        return "missing" + UNFINISHED * bool(cell.unfinished) if is_missing else ABSENT
    marks = COARSE * bool(results.find_coarse(task, column)) + UNFINISHED * bool(cell.unfinished)
    if excesses := cell.excesses:
        return f"{min(excesses):.3f} / {statistics.median(excesses):.3f} nats ({len(excesses)}){marks}"
    best = f"{max(cell.scores):.2f}"
    seeds = count_solved(cell.scores, len(cell.failed))
    rest = f"{BELOW * (cell.reaches_paper is False)} / {statistics.median(cell.scores):.2f} ({seeds}){marks}"
    return (f"**{best}**" if cell.reaches_paper else best) + rest


def _format_thoroughness(run: FormalRun) -> str:
    test = run.evaluation
    assert test, "cells have no other runs"
    lengths = "every length" if test.stride == 1 else f"one length in {test.stride}"
    return f"{lengths}, {test.sequences} strings each"


def _format_cells(keys: Iterable[CellKey]) -> str:
    """Return cells as `LSTM: even_pairs, parity_check; StackRNN: all of Table 1`."""
    columns: dict[str, list[str]] = defaultdict(list)
    for task, column in keys:
        columns[column].append(task)
    return "; ".join(f"{column}: {_format_tasks(tasks)}" for column, tasks in columns.items())


def _format_tasks(tasks: Iterable[str]) -> str:
    names = dict.fromkeys(tasks)
    if CHOMSKY_TASKS.keys() <= names.keys():
        names = {"all of Table 1": None} | {name: None for name in names if name not in CHOMSKY_TASKS}
    return ", ".join(names)


# Recipes


def _build_recipe_rows(results: Results) -> list[list[str]]:
    """Return model, tasks, steps and name of each recipe of the table."""
    groups: dict[tuple[str, str], dict[str, Cell]] = defaultdict(dict)
    columns = results.list_columns()
    for task, column in sorted(results.cells, key=lambda key: columns.index(key[1])):
        if (cell := results.cells[task, column]).runs:
            groups[column, name_recipe(cell.runs[0])][task] = cell
    rows = []
    for (column, recipe), cells in groups.items():
        steps = {run.row["step"] for cell in cells.values() for run in cell.runs}
        shown = " to ".join(f"{step:,}" for step in dict.fromkeys([min(steps), max(steps)]))
        rows.append([column, _format_tasks(cells), shown, f"`{recipe}`"])
    return rows


def name_recipe(run: FormalRun) -> str:
    """Return the shipped config with the overrides that reproduce a run, or the run's config if that is shorter."""
    has_own = run.column == "StackTrans"  # the column of Table 1
    name = f"formal/{get_model_label(run.row)}" + f"/{run.task}" * has_own
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
    """Return the options in which a run differs from a recipe, except those of the task; defaults for missing ones."""
    absent, kinds = object(), {key: kind for key, kind in run.row.items() if key.endswith(".kind")}
    keys = [key for key in {**recipe, **run.recipe} if key not in TASK_OPTIONS]
    changed = [key for key in keys if run.recipe.get(key, absent) != recipe.get(key, absent)]
    return {key: get_value(run.row, recipe | kinds, key) for key in changed}


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
            count = len({run.row["seed"] for run in runs})
            seeds = f"{count} seed{'s' * (count > 1)}"
            reason = "recipe not chosen by validation accuracy and seeds"
            if not any(run.evaluation for run in runs):
                reason = "recipe without a run that is finished and tested over these lengths"
            notes.append(f"{column}, {task}: {reason}: {shown} ({seeds}; {runs[0].row['path']})")
        if cell.duplicates:
            paths = ", ".join(f"{run.row['path']} (seed {run.row['seed']})" for run in cell.duplicates)
            notes.append(f"{column}, {task}: duplicate seeds, not counted: {paths}")
    return notes


def _describe_marks(results: Results) -> list[str]:
    """Return the legend, and lines for coarse tests, runs trained on the tested lengths, and unfinished runs."""
    tested = "; ".join(
        f"{_format_thoroughness(run)} ({'Table 1' if is_table_1 else f'other tasks, {first} to {last}'})"
        for (is_table_1, (first, last)), run in results.finest.items()
    )
    notes = [LEGEND.format(tested, SOLVED, ABSENT), *[PAPER_LEGEND] * (results.tables[0][0] in CHOMSKY_TASKS)]
    if any(cell.excesses for cell in results.cells.values()):
        notes.append(EXCESS_LEGEND)
    coarse: dict[str, list[CellKey]] = defaultdict(list)
    for key in results.cells:
        for run in results.find_coarse(*key):
            coarse[_format_thoroughness(run)].append(key)
    notes += [
        f"{COARSE} tested less than others: {how} ({_format_cells(keys)})" for how, keys in sorted(coarse.items())
    ]
    cells = results.cells.items()
    trained = [key for key, cell in cells for run in cell.runs if run.row["data.max_length"] >= run.lengths[0]]
    if trained:
        notes.append(f"trained on lengths that the score includes: {_format_cells(trained)}")
    unfinished = [run for cell in results.cells.values() for run in cell.unfinished]
    if unfinished:
        runs = "; ".join(f"{run.row['path']} ({_describe_state(run)})" for run in unfinished)
        notes.append(f"{UNFINISHED} some runs are not finished and tested: {runs}")
    if failed := [run.row["path"] for cell in results.cells.values() for run in cell.failed]:
        notes.append(f"failed runs count as not solved, and are in no other score: {join_paths(failed)}")
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
    for run in sorted(results.runs, key=lambda run: (cells.index(run.key), run.row["seed"])):
        cell, tested = results.cells[run.key], run.evaluation
        record: dict[str, Any] = {"task": run.task, "class": get_family(run.task), "model": run.column}
        record |= {f"score_{a}_{b}": run.compute_score((a, b)) for a, b in dict.fromkeys((*RANGES, run.lengths))}
        record["loss_above_entropy"] = run.compute_excess()
        record |= {"paper": cell.paper, "in_table": run in cell.runs, "recipe": name_recipe(run)}
        record["sequences_per_length"] = tested and tested.sequences
        record["length_stride"] = tested and tested.stride
        record["tested_in"] = tested and tested.path.name
        records.append(record | {key: value for key, value in run.row.items() if key not in (*record, *BY_LENGTH)})
    return records


# Figures


def _choose_colors(results: Results) -> dict[str, str]:
    """Return the color of each column with scores, in order."""
    columns = [
        c for c in results.list_columns() if any(cell.scores for (_, d), cell in results.cells.items() if c == d)
    ]
    others = [column for column in columns if column not in COLORS]
    colors = COLORS | dict(zip(others, itertools.cycle(OTHER_COLORS), strict=False))
    return {column: colors[column] for column in columns}


def _add_legend(figure: Any, colors: dict[str, str], place: str, **others: Any) -> None:
    """Add a legend outside the panels, in as many rows as the names need."""
    from matplotlib.patches import Patch

    handles = {column: Patch(color=color) for column, color in colors.items()} | others
    width = sum(0.8 + 0.07 * len(name) for name in handles)  # inches
    columns = math.ceil(len(handles) / math.ceil(width / figure.get_figwidth()))
    legend = {"loc": f"outside {place} center", "ncols": columns, "fontsize": 8, "frameon": False}
    figure.legend(handles.values(), handles.keys(), **legend)


def draw_bars(results: Results) -> Any:
    """Draw the best accuracy of each model and task, a dot for the median over seeds, a line for the paper's."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels: list[tuple[str, list[str], list[str]]] = []
    rows: list[list[int | str]] = [[]]
    for table in results.tables:
        columns = results.list_columns(table)
        for family, members in itertools.groupby(table, get_family):
            tasks = [task for task in members if any(results.cells[task, column].scores for column in columns)]
            for part in (tasks[i : i + MAX_TASKS] for i in range(0, len(tasks), MAX_TASKS)):
                if len(rows[-1]) + len(part) > MAX_TASKS:
                    rows.append([])
                rows[-1] += [len(panels)] * len(part)
                panels.append((family, part, columns))
    widest = max(map(len, rows))
    figure: Any = Figure(figsize=(max(6.5, 1.4 * widest), 3.2 * len(rows) + 0.4), layout="constrained")
    axes = figure.subplot_mosaic([row + ["."] * (widest - len(row)) for row in rows])
    colors = _choose_colors(results)
    for i, panel in enumerate(panels):
        _draw_family(axes[i], results, colors, *panel)
    lines = {
        "median over seeds": Line2D([], [], marker=".", linestyle="", color="black"),
        "paper": Line2D([], [], color="black", linewidth=1.4),
        "uniform guess": Line2D([], [], color="black", linestyle=":", linewidth=0.9),
    }
    _add_legend(figure, colors, "lower", **lines)
    return figure


def _draw_family(
    axes: Any, results: Results, colors: dict[str, str], family: str, tasks: Sequence[str], columns: Sequence[str]
) -> None:
    width = 0.84 / len(columns)
    for i, task in enumerate(tasks):
        for j, column in enumerate(columns):
            x = i + (j - (len(columns) - 1) / 2) * width
            if not (cell := results.cells[task, column]).scores:
                axes.text(x, 0.01, ABSENT, ha="center", fontsize=7, color="gray")
            else:
                axes.bar(x, max(cell.scores), width * 0.92, color=colors[column])
                axes.plot(x, statistics.median(cell.scores), ".", color="black", markersize=4)
                if cell.paper is not None:
                    axes.hlines(cell.paper, x - width * 0.42, x + width * 0.42, color="black", linewidth=1.4)
        axes.hlines(results.guess_accuracy(task), i - 0.46, i + 0.46, color="black", linestyle=":", linewidth=0.9)
    labels = [textwrap.fill(task.replace("_", " "), 12, break_long_words=False) for task in tasks]
    axes.set_xticks(range(len(tasks)), labels, fontsize=8.5)
    axes.set(xlim=(-0.5, len(tasks) - 0.5), ylim=(0, 1.04))
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    (first, last), *more = {results.cells[task, columns[0]].lengths for task in tasks}
    lengths = "longer strings" if more else f"lengths {first} to {last}"
    axes.set_ylabel(f"Best seed's accuracy on {lengths}", fontsize=8)
    axes.set_title(textwrap.fill(family.capitalize(), 13 * len(tasks)), fontsize=10)


def draw_curves(results: Results) -> Any:
    """Draw accuracy against length for each task with runs: median over seeds, and the range of the seeds.

    Lines at the same accuracy have dashes of all their colors.
    """
    tasks = list(dict.fromkeys(task for (task, _), cell in results.cells.items() if cell.runs))
    width = 5 if len(tasks) >= len(CHOMSKY_TASKS) else min(4, len(tasks))
    height, colors = math.ceil(len(tasks) / width), _choose_colors(results)
    figure, _ = new_figure(max(2.7 * width, 6.5), 2.1 * height + 1.1, height, width, sharey=True)
    for axes, task in zip(figure.axes, tasks, strict=False):
        shown = {c: cell for (other, c), cell in results.cells.items() if other == task and cell.runs}
        for i, (column, cell) in enumerate(shown.items()):
            lengths, low, median, high = build_curve(cell)
            axes.fill_between(lengths, low, high, color=colors[column], alpha=0.2, linewidth=0)
            style = {"color": colors[column], "linewidth": 1.3}
            axes.plot(lengths, median, **style)
            if len(shown) > 1:
                axes.plot(lengths, median, **style, zorder=3, linestyle=(-DASH * i, (DASH, DASH * (len(shown) - 1))))
        longest = max(run.row["data.max_length"] for run in results.runs if run.task == task)
        axes.axhline(results.guess_accuracy(task), color="black", linestyle=":", linewidth=0.9)
        axes.axvspan(0, longest, color="black", alpha=0.07, linewidth=0)
        axes.set_title(task, fontsize=9)
        axes.set(ylim=(0, 1.04), xlim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    for axes in figure.axes[len(tasks) :]:
        axes.set_visible(False)
    figure.supxlabel(
        "Length (gray: training lengths)\nline: median over seeds; band: lowest to highest; dotted: uniform guess",
        fontsize=9,
    )
    figure.supylabel("Accuracy", fontsize=10)
    _add_legend(figure, colors, "upper")
    return figure


def build_curve(cell: Cell) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return the lengths that all seeds were tested at, and the lowest, median and highest accuracy at each."""
    curves = [run.evaluation.accuracy for run in cell.runs if run.evaluation]
    lengths = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[length] for curve in curves] for length in lengths]
    return lengths, [min(v) for v in values], [statistics.median(v) for v in values], [max(v) for v in values]
