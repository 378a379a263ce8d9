"""Tables for the terminal, Markdown and LaTeX."""

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
    rows: Sequence[Sequence[str]], *, header: Sequence[str] = (), align: str = "", style: Style = "terminal"
) -> str:
    """Return rows of text as a table.

    Args:
        rows: Cells as text, and `RULE` for a horizontal line.
        header: The column titles, if any.
        align: One "<" (left) or ">" (right) for each column; left where it is missing.
        style: "latex" gives the body of a `tabular` environment with booktabs rules; its cells must be valid LaTeX.
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
    )
    return "\n".join(line.rstrip() for line in text.splitlines())
