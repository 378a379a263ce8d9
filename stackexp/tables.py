"""Tables for the terminal, Markdown and LaTeX."""

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import Literal

import tabulate

Style = Literal["terminal", "markdown", "latex"]

ABSENT = "\u2013"
"""A cell without a value, such as bits per byte of token ids without a tokenizer."""
RULE: tuple[str, ...] = (tabulate.SEPARATING_LINE,)
"""A row that draws a horizontal line (omitted in Markdown, which has none)."""

MIN_WRAPPED = 20
"""Text is not wrapped to fewer characters."""

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
) -> str:
    """Return rows of text as a table.

    On a terminal, a table with a header is fitted to the width: text in the last column is wrapped, or the columns are
    split into several tables, each with the first column.

    Args:
        rows: Cells as text, and `RULE` for a horizontal line.
        header: The column titles, if any.
        align: One "<" (left) or ">" (right) for each column; left where it is missing.
        style: "latex" gives the body of a `tabular` environment with booktabs rules; its cells must be valid LaTeX.
    """
    columns = len(header) or max((len(row) for row in rows), default=0)
    sides = align.ljust(columns, "<")
    width = shutil.get_terminal_size().columns if style == "terminal" and header and sys.stdout.isatty() else None
    if width is None:
        return _format(rows, header, sides, style)
    return "\n\n".join(_fit(rows, header, sides, width))


def _fit(rows: Sequence[Sequence[str]], header: Sequence[str], sides: str, max_width: int) -> Iterator[str]:
    """Yield the table in parts of at most `max_width` characters, unless a single column or word is wider."""
    lines = [row for row in [header, *rows] if row is not RULE]
    widths = [max(map(len, column)) for column in zip_longest(*lines, fillvalue="")]
    rest = max_width - sum(width + 2 for width in widths[:-1])
    if widths[-1] <= rest or len(widths) < 3:
        yield _format(rows, header, sides, "terminal", max(MIN_WRAPPED, rest))
    elif sides[-1] == "<" and rest >= MIN_WRAPPED:
        yield _format(rows, header, sides, "terminal", rest)
    else:
        totals = list(accumulate(width + 2 for width in widths))
        end = max(2, sum(total <= max_width + 2 for total in totals))
        for part in (range(end), (0, *range(end, len(header)))):
            cut = [row if row is RULE else [row[i] for i in part] for row in rows]
            yield from _fit(cut, [header[i] for i in part], "".join(sides[i] for i in part), max_width)


def _format(
    rows: Sequence[Sequence[str]], header: Sequence[str], sides: str, style: Style, last_width: int | None = None
) -> str:
    """Return the table; text in the last column is wrapped at `last_width` characters."""
    if style == "markdown":
        rows = [[cell.replace("|", "\\|") for cell in row] for row in rows if row is not RULE]
    if last_width:  # break text between words: a path stays whole, so that it can be copied
        wrapper = textwrap.TextWrapper(last_width, break_long_words=False, break_on_hyphens=False)
        rows = [row if row is RULE else [*row[:-1], wrapper.fill(row[-1])] for row in rows]
    text = tabulate.tabulate(
        rows,
        headers=header,
        tablefmt={"terminal": "simple" if header else "plain", "markdown": "pipe", "latex": _LATEX}[style],
        colalign=["right" if side == ">" else "left" for side in sides] if rows else None,
        disable_numparse=True,
    )
    return "\n".join(line.rstrip() for line in text.splitlines())
