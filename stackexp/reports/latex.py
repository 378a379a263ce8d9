"""Text and tables in LaTeX."""

import re
from collections.abc import Sequence

from stackexp.tables import ABSENT, format_table

_SYMBOLS = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}"},
    **{"↓": r"$\downarrow$", "†": r"$\dagger$", "‡": r"$\ddagger$", ABSENT: "--"},
}


def escape_latex(text: str) -> str:
    """Escape text for LaTeX; `code` becomes typewriter text that may break after / _ = . and -."""
    parts = text.split("`")
    for i, part in enumerate(parts):
        parts[i] = "".join(_SYMBOLS.get(character, character) for character in part)
        if i % 2:
            parts[i] = r"\texttt{" + re.sub(r"(/|\\_|=|\.|-)", r"\1\\allowbreak{}", parts[i]) + "}"
    return "".join(parts)


def convert_cell(cell: str) -> str:
    """Return a cell in LaTeX, with `**bold**` and `*italic*` text and minus signs."""
    text = re.sub(r"(?<![\w.])-(?=\d)", "$-$", escape_latex(cell))
    text = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text)
    return re.sub(r"\*(.+?)\*", r"\\emph{\1}", text)


def format_float(
    caption: str, columns: str, header: Sequence[str], rows: Sequence[Sequence[str]], footnotes: Sequence[str] = ()
) -> list[str]:
    """Return the lines of a table as wide as the text, with a caption and footnotes; `columns` is its LaTeX spec."""
    titles, *cells = ([convert_cell(cell) for cell in row] for row in (header, *rows))
    return [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape_latex(caption)}}}",
        rf"\resizebox{{\textwidth}}{{!}}{{\begin{{tabular}}{{{columns}}}",
        format_table(cells, header=titles, style="latex"),
        r"\end{tabular}}",
        *(rf"\par\raggedright\footnotesize {escape_latex(note)}" for note in footnotes),
        r"\end{table}",
    ]
