"""A report as data: tables, notes and a figure. Written for the terminal, Markdown, LaTeX, CSV and image files.

Figures have one style.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stackexp.tables import ABSENT, Style, format_table
from stackexp.terminal import wrap_text

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c8c8c")
"""Colors that color-blind readers can distinguish (Okabe and Ito)."""
LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = "osD^vPX*"
WINDOWS_PER_CONTEXT = 16  # an average over positions covers this part of the training context
MAX_LATEX_WIDTH = 50
"""LaTeX wraps columns of text that are longer, in characters."""
LONG_COLUMN = r"p{0.6\textwidth}"
LATEX_SYMBOLS = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}"},
    **{"↓": r"$\downarrow$", "†": r"$\dagger$", "‡": r"$\ddagger$", ABSENT: "--"},
}


@dataclass(frozen=True)
class Table:
    """A titled table of text cells: first `num_labels` columns of labels, then columns of numbers.

    Text in `**` is bold; on a terminal it ends with a `*`. A cell in `*` is italic; on a terminal it is plain.
    `conclusion` is a line below the table.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    num_labels: int = 1
    conclusion: str = ""

    @property
    def align(self) -> str:
        """One "<" or ">" for each column."""
        return "<" * self.num_labels + ">" * (len(self.header) - self.num_labels)


@dataclass(frozen=True)
class Report:
    """Tables, notes and a figure. `records` are the lines of the CSV file, with full precision."""

    tables: list[Table]
    notes: list[str]
    records: list[dict[str, Any]]
    draw: Callable[[], Any] | None = None


def format_report(report: Report, style: Style) -> str:
    """Return the tables as text, then the notes below a heading."""
    if style == "latex":
        return _format_latex(report)
    parts = []
    for table in report.tables:
        rows = table.rows if style == "markdown" else [[_star(cell) for cell in row] for row in table.rows]
        body = format_table(rows, header=table.header, align=table.align, style=style)
        parts += [f"**{table.title}**" if style == "markdown" else wrap_text(table.title), body]
        if table.conclusion:
            parts.append(table.conclusion if style == "markdown" else wrap_text(table.conclusion))
    if report.notes and style == "markdown":
        parts += ["**Notes**", "\n".join(f"- {note}" for note in report.notes)]
    elif report.notes:
        parts += ["Notes", "\n".join(wrap_text(f"- {note}", indent=2) for note in report.notes)]
    return "\n\n".join(parts)


def _star(cell: str) -> str:
    text = re.sub(r"\*\*(.+)\*\*", r"\1*", cell)
    return re.sub(r"^\*(.+)\*$", r"\1", text)


def _format_latex(report: Report) -> str:
    """Return the tables as floats as wide as the text, with the notes below the last one. Commands become comments."""
    lines = ["% Needs \\usepackage{booktabs,graphicx}.", *(f"% {note}" for note in report.notes if "`" in note)]
    for table in report.tables:
        header, *rows = ([_convert_cell(cell) for cell in row] for row in (table.header, *table.rows))
        is_long = [max(map(len, cells)) > MAX_LATEX_WIDTH for cells in zip(table.header, *table.rows, strict=True)]
        columns = ["r" if a == ">" else LONG_COLUMN if b else "l" for a, b in zip(table.align, is_long, strict=True)]
        lines += [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape_latex(table.title)}}}",
            rf"\resizebox{{\textwidth}}{{!}}{{\begin{{tabular}}{{{''.join(columns)}}}",
            format_table(rows, header=header, style="latex"),
            r"\end{tabular}}",
        ]
        below = [table.conclusion] if table.conclusion else []
        if table is report.tables[-1]:
            below += [note for note in report.notes if "`" not in note]
        lines += [rf"\par\raggedright\footnotesize {escape_latex(line)}" for line in below]
        lines.append(r"\end{table}")
    return "\n".join(lines)


def escape_latex(text: str) -> str:
    """Escape text for LaTeX; `code` becomes typewriter text that may break after / _ = . and -."""
    parts = text.split("`")
    for i, part in enumerate(parts):
        parts[i] = "".join(LATEX_SYMBOLS.get(character, character) for character in part)
        if i % 2:
            parts[i] = r"\texttt{" + re.sub(r"(/|\\_|=|\.|-)", r"\1\\allowbreak{}", parts[i]) + "}"
    return "".join(parts)


def _convert_cell(cell: str) -> str:
    """Return a cell in LaTeX, with `**bold**` and `*italic*` text and minus signs."""
    text = re.sub(r"(?<![\w.])-(?=\d)", "$-$", escape_latex(cell))
    text = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text)
    return re.sub(r"\*(.+?)\*", r"\\emph{\1}", text)


def write_csv(records: list[dict[str, Any]], path: Path) -> None:
    """Write a header and one line for each record. Missing values, None and NaN are empty."""
    import pandas as pd

    pd.DataFrame(records, dtype=object).to_csv(path, index=False, lineterminator="\n")


# Figures


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
    """Return the centered moving average over `window` values, fewer at both ends: a pandas Series or DataFrame."""
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
