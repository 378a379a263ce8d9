"""A report as data: tables, notes and a figure. Written for the terminal, Markdown, LaTeX, CSV and image files."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stackexp.reports.latex import format_float
from stackexp.tables import Style, format_table
from stackexp.terminal import wrap_text

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c8c8c")
"""Colors that color-blind readers can distinguish (Okabe and Ito)."""
LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = "osD^vPX*"
MAX_LATEX_WIDTH = 50
"""LaTeX wraps columns of text that are longer, in characters."""


@dataclass(frozen=True)
class Table:
    """A titled table of text cells: first `num_labels` columns of labels, then columns of numbers.

    Text in `**` is bold; on a terminal it ends with a `*`. A cell in `*` is italic; on a terminal it is plain.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    num_labels: int = 1

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
    """Return the tables and notes as text."""
    if style == "latex":
        return _format_latex(report)
    parts = []
    for table in report.tables:
        rows = table.rows if style == "markdown" else [[_star(cell) for cell in row] for row in table.rows]
        body = format_table(rows, header=table.header, align=table.align, style=style)
        parts += [f"**{table.title}**" if style == "markdown" else wrap_text(table.title), body]
    if report.notes and style == "markdown":
        parts.append("\n".join(f"- {note}" for note in report.notes))
    elif report.notes:
        parts.append("\n".join(wrap_text(f"- {note}", indent=2) for note in report.notes))
    return "\n\n".join(parts)


def _star(cell: str) -> str:
    text = re.sub(r"\*\*(.+)\*\*", r"\1*", cell)
    return re.sub(r"^\*(.+)\*$", r"\1", text)


def _format_latex(report: Report) -> str:
    """Return the tables as floats, with the notes below the last one. Commands become comments."""
    lines = ["% Needs \\usepackage{booktabs,graphicx}.", *(f"% {note}" for note in report.notes if "`" in note)]
    footnotes = [note for note in report.notes if "`" not in note]
    for table in report.tables:
        columns = "".join(map(_get_latex_column, table.align, zip(table.header, *table.rows, strict=True)))
        notes = footnotes if table is report.tables[-1] else []
        lines += format_float(table.title, columns, table.header, table.rows, notes)
    return "\n".join(lines)


def _get_latex_column(side: str, cells: Sequence[str]) -> str:
    """Return the LaTeX specification of a column; long text is wrapped."""
    if side == "<" and max(map(len, cells)) > MAX_LATEX_WIDTH:
        return r"p{0.6\textwidth}"
    return "l" if side == "<" else "r"


def format_csv(records: list[dict[str, Any]]) -> str:
    """Return a header and one line for each record."""
    text = io.StringIO()
    columns = dict.fromkeys(key for record in records for key in record)
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
