"""Create and save matplotlib figures in one style."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stackexp.reports.report import LINE_STYLES, PALETTE

WINDOWS_PER_CONTEXT = 16  # an average over positions covers this part of the training context


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return a figure of this size (inches) and its axes, with a light grid. Needs no display.

    Several rows or columns give an array of axes; `options` are those of matplotlib's `Figure.subplots`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, columns, **options)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    return figure, panels


def abbreviate_thousands(axis: Any) -> None:
    """Write the numbers of an axis as 700k or 1.5M."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to a .png, .pdf or .svg file. Text with dollar signs that are not a formula is shown unchanged."""
    from matplotlib.mathtext import MathTextParser
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if text.get_text().count("$") > 1:
            try:
                MathTextParser("path").parse(text.get_text())
            except ValueError:  # the name of a run, not a formula
                text.set_parse_math(False)
    figure.savefig(path, dpi=200)


def smooth_losses(losses: Any, window: int) -> Any:
    """Return the centered moving average [N, ...] over `window` values, or over fewer at both ends, as pandas data."""
    import pandas as pd

    data = losses if isinstance(losses, pd.DataFrame) else pd.Series(losses)
    return data.rolling(window, center=True, min_periods=1).mean()


def draw_by_position(context: int, curves: Sequence[tuple[str, Any]]) -> Any:
    """Draw one curve for each set, (name, losses [T - 1]), averaged over neighboring positions."""
    figure, axes = new_figure(6.8, 3.6)
    window = max(1, context // WINDOWS_PER_CONTEXT)
    for i, (name, losses) in enumerate(curves):
        style = {"color": PALETTE[i % len(PALETTE)], "linestyle": LINE_STYLES[i // len(PALETTE) % len(LINE_STYLES)]}
        axes.plot(np.arange(1, len(losses) + 1), smooth_losses(losses, window), linewidth=1.2, label=name, **style)
    axes.axvline(context, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="Position (tokens before)", ylabel="Loss (nats per token)")
    axes.set_title(f"dotted: training context; averages of {window} positions", fontsize=8, loc="right")
    axes.legend(fontsize=7)
    return figure
