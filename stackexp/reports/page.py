"""All reports of a folder as one self-contained HTML page with embedded figures."""

import base64
import html
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from stackexp.errors import ConfigError, RunError
from stackexp.frame import find_runs
from stackexp.reports.ablation import build_ablation
from stackexp.reports.benchmarks import build_benchmarks
from stackexp.reports.dynamics import build_dynamics
from stackexp.reports.efficiency import build_efficiency, read_efficiency
from stackexp.reports.formal import build_formal
from stackexp.reports.grid import build_grid
from stackexp.reports.report import Report, Table, save_figure
from stackexp.reports.scaling import build_scaling
from stackexp.sweeps.sweep import COPY

MAX_NOTES = 6
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1340px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th { border-bottom: 2px solid #222; vertical-align: bottom }
td, th { padding: 3px 8px; text-align: right } td { border-bottom: 1px solid #ddd }
.text { text-align: left } td.text:first-child { white-space: nowrap }
.wide { overflow-x: auto } img { max-width: 100% } code { background: #f2f2f2; overflow-wrap: anywhere }
ul, summary { font-size: 13px; max-width: 1100px } .whole { white-space: nowrap }
figure { margin: 1em 0; break-inside: avoid } nav a { margin-right: 1em }
@media print { .wide { overflow: visible } table { font-size: 9px } td, th { padding: 2px 4px } nav { display: none } }
"""


Builder = Callable[[], Report]


def build_page(folder: Path, others: Mapping[str, Builder] | None = None) -> str:
    """Return the page of all runs and sweeps at or below `folder` and the efficiency files in it.

    `others` are more sections: their titles and builders.

    Raises RunError if there is nothing to report.
    """
    sections, problems = [], []
    with tempfile.TemporaryDirectory() as images:
        for title, build in [*_list_builders(folder), *(others or {}).items()]:
            try:
                sections.append((title, _format_section(title, build(), Path(images, "figure.png"))))
            except (ConfigError, RunError) as error:
                problems.append(f"{title}: {error}")
    if not sections and not find_runs([folder]):
        raise RunError(f"{folder}: no runs and no file of `bench efficiency --out`; give a folder such as runs/")
    if not sections:
        raise RunError(f"{folder}: nothing to report; {'; '.join(problems)}")
    links = "".join(f'<a href="#{_anchor(title)}">{html.escape(title)}</a>' for title, _ in sections)
    title = html.escape(f"Reports of {folder}")
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n<style>{STYLE}</style>'
    parts = [head, f"<h1>{title}</h1>", f"<nav>{links}</nav>", *(section for _, section in sections)]
    if problems:
        parts += ["<h2>Not shown</h2>", _format_notes(problems)]
    return "\n".join([*parts, "</html>\n"])


def _list_builders(folder: Path) -> Iterator[tuple[str, Builder]]:
    """Yield title and builder of each section. Sweeps and files of other kinds have no section."""
    yield "Ablation", partial(build_ablation, [folder])
    yield "Scaling", partial(build_scaling, [folder])
    yield "Training dynamics", partial(build_dynamics, [folder])
    for sweep in sorted(path.parent for path in folder.rglob(COPY) if path.is_file()):
        name = sweep.resolve().name if sweep == folder else sweep.relative_to(folder).as_posix()
        yield f"Sweep: {name}", partial(build_grid, str(sweep))
    for path in sorted(folder.glob("*.json")):
        try:
            read_efficiency(path)
        except RunError:
            continue
        yield f"Efficiency: {path.name}", partial(build_efficiency, path)
    yield "Benchmarks", partial(build_benchmarks, [folder])
    yield "Formal languages", partial(build_formal, [folder])


def _format_section(title: str, report: Report, image: Path) -> str:
    parts = [f'<h2 id="{_anchor(title)}">{html.escape(title)}</h2>', *map(_format_table, report.tables)]
    if report.draw:
        save_figure(report.draw(), image)
        png = image.read_bytes()
        width = int.from_bytes(png[16:20], "big") // 2  # in the header; half of it is sharp on any screen
        source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        parts.append(f'<figure><img width="{width}" alt="{html.escape(title)}" src="{source}"></figure>')
    if report.notes:
        parts += ["<h3>Notes</h3>", _format_notes(report.notes)]
    return "\n".join(parts)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w/.=+-]+", "-", title)


def _format_table(table: Table) -> str:
    def row(cells: list[str], tag: str) -> str:
        sides = [' class="text"' if side == "<" else "" for side in table.align]
        found = zip(sides, cells, strict=True)
        return "<tr>" + "".join(f"<{tag}{side}>{_format_cell(cell)}</{tag}>" for side, cell in found) + "</tr>"

    rows = "\n".join([row(table.header, "th"), *(row(cells, "td") for cells in table.rows)])
    conclusion = f"\n<p>{_markup(table.conclusion)}</p>" if table.conclusion else ""
    return f'<h3>{_markup(table.title)}</h3>\n<div class="wide"><table>\n{rows}\n</table></div>{conclusion}'


def _format_cell(cell: str) -> str:
    """Return a cell whose lines do not break within parentheses, such as an interval."""
    return re.sub(r"\([^()]*\)", r'<span class="whole">\g<0></span>', _markup(cell))


def _format_notes(notes: list[str]) -> str:
    """Return a list of notes; those after the first MAX_NOTES are folded."""
    items = [f"<li>{_markup(note)}</li>" for note in notes]
    text = "<ul>" + "\n".join(items[:MAX_NOTES]) + "</ul>"
    if folded := "\n".join(items[MAX_NOTES:]):
        text += f"<details><summary>{len(notes) - MAX_NOTES} more notes</summary><ul>{folded}</ul></details>"
    return text


def _markup(text: str) -> str:
    """Escape text; `**bold**`, `*italic*` and `code` in backticks become elements."""
    parts = re.split(r"`(.+?)`", html.escape(text))  # code is every second part
    for i, part in enumerate(parts):
        bold = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", part)
        parts[i] = f"<code>{part}</code>" if i % 2 else re.sub(r"\*(.+?)\*", r"<i>\1</i>", bold)
    return "".join(parts)
