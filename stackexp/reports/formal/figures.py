"""Figures of the formal-language table: bars like the paper's, and accuracy against length."""

import statistics
from pathlib import Path
from typing import Any

from stackexp.reports.formal.collect import COLUMNS, DEPTH, Cell, Report, paper

COLORS = {
    "LSTM": "#8c8c8c",
    "StackRNN": "#e69f00",
    "StackAttn": "#009e73",
    "Transformer": "#56b4e9",
    "StackTrans": "#c0272d",
    DEPTH: "#e8a0a3",
}
"""Distinct for the colour-blind (Okabe and Ito) and in grey; StackTrans stands out."""


def draw_bars(report: Report, path: Path) -> None:
    """Best score of each model and task, a dot for the median of the seeds, a line for the paper's figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1), hspace=0.04)
    names = list(paper.CLASSES)
    left, right = top.subplots(1, 2, sharey=True)
    panels = dict(zip(names, (left, right, bottom.subplots()), strict=True))
    for name, axes in panels.items():
        _draw_class(report, axes, paper.CLASSES[name])
        axes.set_title(name, fontsize=10)
    first, last = report.among
    for axes in (left, panels[names[2]]):
        axes.set_ylabel(f"accuracy, lengths {first}..{last}")
    figure.legend(*_legend(), loc="outside lower center", ncols=len(COLUMNS) + 2, fontsize=8.5, frameon=False)
    figure.savefig(path, dpi=200)


def _draw_class(report: Report, axes: Any, tasks: tuple[str, ...]) -> None:
    width = 0.84 / len(COLUMNS)
    for i, task in enumerate(tasks):
        for j, column in enumerate(COLUMNS):
            cell, x = report.cells[task, column], i + (j - (len(COLUMNS) - 1) / 2) * width
            if cell.scores:
                axes.bar(x, max(cell.scores), width * 0.92, color=COLORS[column])
                axes.plot(x, statistics.median(cell.scores), ".", color="black", markersize=4)
            if cell.paper is not None:  # in the color of the bar that is missing
                color = "black" if cell.scores else COLORS[column]
                axes.hlines(cell.paper, x - width * 0.42, x + width * 0.42, color=color, linewidth=1.4)
    axes.set_xticks(range(len(tasks)), [task.replace("_", "\n", 1).replace("_", " ") for task in tasks], fontsize=8.5)
    axes.set(xlim=(-0.5, len(tasks) - 0.5), ylim=(0, 1.04))
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend() -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=COLORS[column]) for column in COLUMNS]
    handles += [Line2D([], [], marker=".", linestyle="", color="black"), Line2D([], [], color="black", linewidth=1.3)]
    return handles, [*COLUMNS, "median of the seeds", "the paper's figure"]


def draw_curves(report: Report, path: Path) -> None:
    """Accuracy against length for each task that has runs: median of the seeds, and from the least to the best."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    tasks = [task for task in paper.TASKS if any(report.cells[task, column].runs for column in COLUMNS)]
    across = 5 if len(tasks) == len(paper.TASKS) else min(4, len(tasks))
    down = -(-len(tasks) // across)
    figure = Figure(figsize=(max(2.7 * across, 6.5), 2.1 * down + 0.9), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.09)  # inches, between the last length and the next panel's first
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for axes, task in zip(grid.flat, tasks, strict=False):
        _draw_task(report, axes, task)
    for axes in grid.flat[len(tasks) :]:
        axes.set_visible(False)
    for i in range(len(tasks), down * across):  # the lengths stand below the last panel of each column
        grid.flat[i - across].xaxis.set_tick_params(labelbottom=True)
    about = "length (grey: trained on). Lines: median of the seeds; bands: from the least to the best"
    figure.supxlabel(about, fontsize=10)
    figure.supylabel("accuracy", fontsize=10)
    shown = [column for column in COLUMNS if any(report.cells[task, column].runs for task in tasks)]
    handles = [Line2D([], [], color=COLORS[column], linewidth=2) for column in shown]
    figure.legend(handles, shown, loc="outside upper center", ncols=min(len(shown), 2 * across), frameon=False)
    figure.savefig(path, dpi=200)


def _draw_task(report: Report, axes: Any, task: str) -> None:
    trained = 0
    for column in COLUMNS:
        cell = report.cells[task, column]
        if cell.runs:
            lengths, low, median, high = _curve(cell)
            axes.fill_between(lengths, low, high, color=COLORS[column], alpha=0.2, linewidth=0)
            axes.plot(lengths, median, color=COLORS[column], linewidth=1.3, zorder=3 if column == "StackTrans" else 2)
            trained = max(trained, *(run.config["data.max_length"] for run in cell.runs))
    axes.axvspan(0, trained, color="black", alpha=0.07, linewidth=0)  # lengths that were trained on
    axes.set_title(task, fontsize=9)
    axes.set(ylim=(0, 1.04), xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _curve(cell: Cell) -> tuple[list[int], list[float], list[float], list[float]]:
    """Lengths that all seeds of a cell were tested at, and the lowest, median and highest accuracy at each."""
    curves = [tested.accuracy for run in cell.runs if (tested := run.tested(cell.among))]
    lengths = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[length] for curve in curves] for length in lengths]
    return lengths, [min(v) for v in values], [statistics.median(v) for v in values], [max(v) for v in values]
