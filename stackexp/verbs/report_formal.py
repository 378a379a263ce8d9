"""Compare runs on formal languages with Table 1 of the paper, from their run folders.

RUNS are run folders, folders of run folders such as runs/formal_table, or a sweep's folder.
"""

import re
from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import FIGURE_SUFFIXES, Parser

USAGE = "RUNS ... [--score A_B] [--out FILE] ... [--figure FILE] [--curves FILE]"
EXAMPLES = (
    "report formal runs/formal_table",
    "report formal runs/formal_table runs/formal --score 41_100 --out table.md --out table.tex --out runs.csv",
    "report formal runs/formal_table --figure bars.png --curves curves.pdf",
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of run folders")
    parser.add_argument("--score", default="41_500", metavar="A_B", help="range of lengths (default: %(default)s)")
    out = "write a .md, .tex or .csv file (one line per run) instead of printing; may be repeated"
    parser.add_argument("--out", action="append", type=Path, default=[], metavar="FILE", help=out)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="bar chart of all models and the paper's scores")
    parser.add_argument("--curves", type=Path, metavar="FILE", help="plot the accuracy against length for each task")


def run(args: Namespace) -> int:
    lengths = _parse_lengths(args)
    for path in args.out:
        args.parser.check_output("--out", path, (".md", ".tex", ".csv"))
    args.parser.check_output("--figure", args.figure, FIGURE_SUFFIXES)
    args.parser.check_output("--curves", args.curves, FIGURE_SUFFIXES)
    from stackexp.reports.figures import save_figure
    from stackexp.reports.formal import export, figures, tables
    from stackexp.reports.formal.cells import collect_report

    report = collect_report(args.runs, lengths)
    if not args.out:
        print(tables.format_markdown(report), end="")
    writers = {".md": tables.format_markdown, ".tex": export.format_latex, ".csv": export.format_runs}
    for path in args.out:
        path.write_text(writers[path.suffix.lower()](report), encoding="utf-8")
        print(path)
    for path, draw in ((args.figure, figures.draw_bars), (args.curves, figures.draw_curves)):
        if path:
            save_figure(draw(report), path)
            print(path)
    return 0


def _parse_lengths(args: Namespace) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)_(\d+)", args.score)
    first, last = (int(match[1]), int(match[2])) if match else (1, 0)
    if not 1 <= first <= last:
        args.parser.error(f"--score: expected a range of lengths such as 41_500, found {args.score}")
    return first, last
