"""Tables for the terminal, Markdown and LaTeX, and the table of scores on named datasets."""

from collections.abc import Sequence
from typing import Literal

import tabulate

Style = Literal["terminal", "markdown", "latex"]
Scores = dict[str, float]

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


def table(rows: Sequence[Sequence[str]], align: str = "", rules: Sequence[int] = ()) -> str:
    """Temporary: the old name of `format_table`, with the header as the first row if `rules` contains 1."""
    header, body = (rows[0], list(rows[1:])) if 1 in rules else ((), list(rows))
    for rule in sorted((rule for rule in rules if rule > 1), reverse=True):
        body.insert(rule - 1, RULE)
    return format_table(body, header=header, align=align)


# Scores on named datasets: name -> loss (nats per token), perplexity, bits_per_byte, instances, tokens.

_SCORE_HEADER = ("set", "instances", "tokens", "loss", "95 % interval", "perplexity", "bits/byte")


def format_scores(sets: dict[str, Scores], style: Style = "terminal") -> str:
    """Return a table of the scores on each named set, the averages of each group, and the mean over all sets."""
    if not sets:
        return "no validation sets; name some in data.validation"
    rows, averages = score_rows(sets)
    return format_table([*rows, RULE, *averages], header=_SCORE_HEADER, align="<>>>>>>", style=style)


def score_rows(sets: dict[str, Scores]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the rows of the sets and the rows of their averages."""
    from stackexp.modules.scores import average_groups, average_scores  # imports torch; plain tables do without

    rows, averages = [_score_row(name, [scores], scores) for name, scores in sets.items()], []
    for group, average in average_groups(sets).items():
        members = [scores for name, scores in sets.items() if name.startswith(f"{group}/")]
        averages.append(_score_row(f"{group}: means of {len(members)} set{'s' * (len(members) > 1)}", members, average))
        exp_mean_loss = _format_perplexity(average["exp_mean_loss"])
        averages.append([f"{group}: exp of the mean loss", *[""] * 4, exp_mean_loss, ""])
    if not averages or any("/" not in name for name in sets) or len(averages) > 2:
        averages.append(_score_row("average of sets", list(sets.values()), average_scores(sets)))
    return rows, averages


def _score_row(name: str, sets: list[Scores], scores: Scores) -> list[str]:
    instances, tokens = (sum(s.get(key, 0) for s in sets) for key in ("instances", "tokens"))
    interval = f"{scores['loss_low']:.4f}-{scores['loss_high']:.4f}" if "loss_low" in scores else ABSENT
    bits = f"{scores['bits_per_byte']:.4f}" if "bits_per_byte" in scores else ABSENT
    perplexity = _format_perplexity(scores["perplexity"])
    return [name, f"{instances:,}", f"{tokens:,}", f"{scores['loss']:.4f}", interval, perplexity, bits]


def _format_perplexity(value: float) -> str:
    return f"{value:.2f}" if value < 1e6 else f"{value:.3g}"  # a diverged model would need three lines
