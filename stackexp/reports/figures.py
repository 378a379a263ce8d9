"""Create and save matplotlib figures in one style."""

from pathlib import Path
from typing import Any


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure of this size (inches) with one set of axes and a light grid. Needs no display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to a .png, .pdf or .svg file."""
    figure.savefig(path, dpi=200)
