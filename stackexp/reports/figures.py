"""Create and save matplotlib figures in one style."""

from pathlib import Path
from typing import Any

from stackexp.errors import ConfigError

FIGURE_SUFFIXES = (".png", ".pdf", ".svg")


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure of this size (inches) with one set of axes and a light grid. Needs no display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to a .png, .pdf or .svg file; see `check_figure_path`."""
    figure.savefig(path, dpi=200)


def check_figure_path(path: Path) -> None:
    """Raise ConfigError unless the suffix is that of a supported format and the folder exists."""
    if path.suffix.lower() not in FIGURE_SUFFIXES:
        raise ConfigError(
            f"{path}: cannot draw a {path.suffix or 'file without suffix'}; use {', '.join(FIGURE_SUFFIXES)}"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist; create it first")
