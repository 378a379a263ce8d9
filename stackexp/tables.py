"""Tables for the terminal, Markdown and LaTeX."""

import shutil
import sys
from collections.abc import Sequence
from typing import Literal

import tabulate

Style = Literal["terminal", "markdown", "latex"]

ABSENT = "\u2013"
"""A cell without a value, such as bits per byte of token ids without a tokenizer."""
RULE: tuple[str, ...] = (tabulate.SEPARATING_LINE,)
"""A row that draws a horizontal line (left out in Markdown, which has none)."""

tabulate.MIN_PADDING = 0  # columns are as narrow as their titles

_LATEX_RULES = [tabulate.Line(command, "", "", "") for command in (r"\toprule", r"\midrule", r"\bottomrule")]
_LATEX_ROW = tabulate.DataRow("", " & ", r" \\")
_LATEX = tabulate.TableFormat(
    lineabove=_LATEX_RULES[0],
    linebelowheader=_LATEX_RULES[1],
    linebetweenrows=None,
    linebelow=_LATEX_RULES[2],
    headerrow=_LATEX_ROW,
    datarow=_LATEX_ROW,
    padding=0,
    with_header_hide=None,
)


def format_table(
    rows: Sequence[Sequence[str]],
    *,
    header: Sequence[str] = (),
    align: str = "",
    style: Style = "terminal",
    max_width: int | None = None,
) -> str:
    """Return rows of text as a table.

    Args:
        rows: Cells as text, and `RULE` for a horizontal line.
        header: The column titles, if any.
        align: One "<" (left) or ">" (right) for each column; left where it is missing.
        style: "latex" gives the body of a `tabular` environment with booktabs rules; its cells must be valid LaTeX.
        max_width: Wrap the last column so that lines have at most this many characters.
    """
    if style == "markdown":
        rows = [[cell.replace("|", "\\|") for cell in row] for row in rows if row is not RULE]
    columns = len(header) or max((len(row) for row in rows), default=0)
    text = tabulate.tabulate(
        rows,
        headers=header,
        tablefmt={"terminal": "simple" if header else "plain", "markdown": "pipe", "latex": _LATEX}[style],
        colalign=["right" if side == ">" else "left" for side in align.ljust(columns, "<")] if rows else None,
        disable_numparse=True,
        maxcolwidths=[*[None] * (columns - 1), _fit_last_column(rows, header, max_width)] if max_width else None,
    )
    return "\n".join(line.rstrip() for line in text.splitlines())


def terminal_width() -> int | None:
    """Return the columns of the terminal, or None if the output goes to a file or pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _fit_last_column(rows: Sequence[Sequence[str]], header: Sequence[str], max_width: int) -> int:
    """Return the width that the other columns leave, at least 20."""
    lines = [row for row in [header, *rows] if row is not RULE]
    others = sum(max((len(cell) for cell in column), default=0) + 2 for column in list(zip(*lines, strict=True))[:-1])
    return max(20, max_width - others)
