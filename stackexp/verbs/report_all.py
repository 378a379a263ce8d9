"""Write one HTML page with the tables and figures of all runs in a folder. It opens offline.

The page has sections for the ablation, scaling, training dynamics, sweeps over the stack's hyperparameters, formal
languages, and files of `bench efficiency --out` in the folder. Sections without runs are omitted.
"""

from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser

USAGE = "FOLDER [--out FILE.html]"
EXAMPLES = ("report all runs", "report all runs/ablation --out ablation.html")


def add_arguments(parser: Parser) -> None:
    """Add the options of `report all`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a folder of run folders, such as runs")
    out = "file to write (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE.html", help=out)


def run(args: Namespace) -> int:
    """Write the page."""
    from stackexp.reports.figures import check_output_path
    from stackexp.reports.page import build_page

    check_output_path(args.out, (".html",))
    args.out.write_text(build_page(args.folder), encoding="utf-8")
    print(args.out)
    return 0
