"""Figures of the formal-language table: bars like the paper's, and accuracy against length."""

import statistics
from typing import Any

from stackexp.reports.figures import new_figure
from stackexp.reports.formal.records import CLASSES, COLUMNS, DEPTH, Cell, Results
from stackexp.tasks import TASKS

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


def draw_bars(results: Results) -> Any:
    """Draw the best score of each model and task, a dot for the median over seeds, a line for the paper's score."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure: Any = Figure(figsize=(11, 6.4), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1), hspace=0.04)
    panels = [*top.subplots(1, 2, sharey=True), bottom.subplots()]
    handles: dict[str, Any] = {}
    for axes, (name, tasks) in zip(panels, CLASSES.items(), strict=True):
        for i, task in enumerate(tasks):
            for j, column in enumerate(COLUMNS):
                if (cell := results.cells[task, column]).scores:
                    x = i + (j - (len(COLUMNS) - 1) / 2) * BAR_WIDTH
                    handles.setdefault(column, _draw_bar(axes, cell, x))
            axes.hlines(_guess_accuracy(task), i - 0.46, i + 0.46, color="black", linestyle=":", linewidth=0.9)
        labels = [task.replace("_", "\n", 1).replace("_", " ") for task in tasks]
        axes.set_xticks(range(len(tasks)), labels, fontsize=8.5)
        axes.set(xlim=(-0.5, len(tasks) - 0.5), ylim=(0, 1.04))
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(name.capitalize(), fontsize=10)
    first, last = results.lengths
    for axes in (panels[0], panels[2]):
        axes.set_ylabel(f"Accuracy on lengths {first} to {last}")
    handles = {column: handles[column] for column in COLUMNS if column in handles}
    handles["median over seeds"] = Line2D([], [], marker=".", linestyle="", color="black")
    handles["paper"] = Line2D([], [], color="black", linewidth=1.4)
    handles["uniform guess"] = Line2D([], [], color="black", linestyle=":", linewidth=0.9)
    legend = {"loc": "outside lower center", "ncols": len(handles), "fontsize": 8, "frameon": False}
    figure.legend(handles.values(), handles.keys(), **legend)
    return figure


def _draw_bar(axes: Any, cell: Cell, x: float) -> Any:
    """Draw the scores of a cell, and the paper's if it prints one. Return the bar for the legend."""
    bar = axes.bar(x, max(cell.scores), BAR_WIDTH * 0.92, color=COLORS[cell.column])
    axes.plot(x, statistics.median(cell.scores), ".", color="black", markersize=4)
    if cell.paper is not None:
        axes.hlines(cell.paper, x - BAR_WIDTH * 0.42, x + BAR_WIDTH * 0.42, color="black", linewidth=1.4)
    return bar


def draw_curves(results: Results) -> Any:
    """Draw accuracy against length for each task with runs: median over seeds, and the range of the seeds."""
    from matplotlib.lines import Line2D

    tasks = [task for task in TASKS if any(results.cells[task, column].runs for column in COLUMNS)]
    width = 5 if len(tasks) == len(TASKS) else min(4, len(tasks))
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
            max_length = max(max_length, *(run.config["data.max_length"] for run in cell.runs))
    axes.axhline(_guess_accuracy(task), color="black", linestyle=":", linewidth=0.9)
    axes.axvspan(0, max_length, color="black", alpha=0.07, linewidth=0)
    axes.set_title(task, fontsize=9)
    axes.set(ylim=(0, 1.04), xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)


def _guess_accuracy(task: str) -> float:
    """Return the accuracy of a uniform guess among the answer symbols."""
    return 1 / TASKS[task].num_answer_symbols


def build_curve(cell: Cell) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return the lengths that all seeds were tested at, and the lowest, median and highest accuracy at each."""
    curves = [evaluation.accuracy for evaluation in cell.evaluations]
    lengths = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[length] for curve in curves] for length in lengths]
    return lengths, [min(v) for v in values], [statistics.median(v) for v in values], [max(v) for v in values]
