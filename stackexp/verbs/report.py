"""`stackexp report`: runs side by side, and the paper's table of formal languages."""

import re
import sys
from pathlib import Path

from stackexp.config.suggestions import nearest
from stackexp.errors import ConfigError
from stackexp.verbs.parser import Parser

USAGES = {
    "compare": "RUN ... [--figure FILE] [--different-data]",
    "formal": "RUNS ... [--score A_B] [--out FILE] ... [--figure FILE] [--curves FILE]",
}
PURPOSES = {
    "compare": "Runs side by side, from their folders alone; refused if they were not trained on the same data.",
    "formal": "Runs on formal languages as Table 1 of the paper, its figures beside ours; from run folders alone.",
}
EXAMPLES = {
    "compare": ["report compare runs/quickstart/* --figure loss.png"],
    "formal": [
        "report formal runs/formal_table",
        "report formal runs/formal_table runs/formal --score 41_100 --out table.md --out table.tex --out runs.csv",
        "report formal runs/formal_table --figure bars.png --curves curves.pdf",
    ],
}
ABOUT = {
    "compare": "",
    "formal": "RUNS are run folders, folders of run folders such as runs/formal_table, or a sweep's folder.\n",
}
FIGURES = (".png", ".pdf", ".svg")


def main(argv: list[str]) -> int:
    """Run `report compare|formal`. Raises ConfigError for a mistake on the command line, else RunError."""
    if argv[:1] in ([], ["-h"], ["--help"]):
        examples = [example for some in EXAMPLES.values() for example in some]
        parser = Parser(
            "report", "Tables and figures, from run folders.", examples, "compare|formal RUNS ... [OPTIONS]"
        )
        parser.parse_args(argv or ["--help"])
    if argv[0] not in USAGES:
        raise ConfigError(f"report: expected {', '.join(USAGES)}, found {argv[0]!r}{nearest(argv[0], USAGES)}")
    verb = argv[0]
    parser = Parser(f"report {verb}", PURPOSES[verb], EXAMPLES[verb], USAGES[verb], ABOUT[verb])
    return {"compare": _compare, "formal": _formal}[verb](parser, argv[1:])


def _compare(parser: Parser, argv: list[str]) -> int:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="also draw the losses into this file")
    parser.add_argument("--different-data", action="store_true", help="compare them whatever they were trained on")
    options = parser.parse(argv)
    from stackexp.reports.compare import check_same_data, draw_losses, markdown
    from stackexp.runs import at

    runs = [at(path) for path in options.runs]
    if not options.different_data:
        for line in check_same_data(runs):
            print(line, file=sys.stderr)
    print(markdown(runs))
    if options.figure:
        draw_losses(runs, options.figure)
    return 0


def _formal(parser: Parser, argv: list[str]) -> int:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of them")
    parser.add_argument("--score", default="41_500", metavar="A_B", help="range of lengths (default: %(default)s)")
    files = "instead of the terminal: a .md, .tex or .csv (one line per run); may stand several times"
    parser.add_argument("--out", action="append", type=Path, default=[], metavar="FILE", help=files)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="bars of all models, the paper's figures beside")
    parser.add_argument("--curves", type=Path, metavar="FILE", help="accuracy against length, for each task")
    options = parser.parse(argv)
    match = re.fullmatch(r"(\d+)_(\d+)", options.score)
    among = (int(match[1]), int(match[2])) if match else (1, 0)
    if not 1 <= among[0] <= among[1]:
        parser.error(f"--score: expected A_B, a range of lengths such as 41_500 or 41_100, found {options.score}")
    for path in options.out:
        if path.suffix not in (".md", ".tex", ".csv"):
            parser.error(f"--out: expected a name that ends in .md, .tex or .csv, found {path}")
    for name in ("figure", "curves"):
        path = getattr(options, name)
        if path and path.suffix not in FIGURES:
            parser.error(f"--{name}: expected a name that ends in {', '.join(FIGURES)}, found {path}")
    from stackexp.reports.formal import collect as formal
    from stackexp.reports.formal import export as formal_export
    from stackexp.reports.formal import figures as formal_figures
    from stackexp.reports.formal import tables as formal_tables

    report = formal.collect(options.runs, among)
    if not options.out:
        print(formal_tables.markdown(report, options.runs), end="")
    writers = {".md": formal_tables.markdown, ".tex": formal_export.latex, ".csv": formal_export.comma_separated}
    for path in options.out:
        path.write_text(writers[path.suffix](report, options.runs), encoding="utf-8")
        print(path)
    for path, draw in ((options.figure, formal_figures.draw_bars), (options.curves, formal_figures.draw_curves)):
        if path:
            draw(report, path)
            print(path)
    return 0
