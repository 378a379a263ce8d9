"""Write one HTML page with the tables and figures of all runs in a folder. It opens offline.

The page has sections for the ablation, scaling, training dynamics, sweeps over the stack's hyperparameters, benchmarks,
formal languages, actions in arithmetic, and files of `bench efficiency --out` in the folder. Sections without runs are
omitted.

With --update, it instead replaces the tables of a Markdown document: those between a comment with their command,
`<!-- python -m stackexp report ... -->`, and `<!-- end of report -->`.
"""

from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser

USAGE = "(FOLDER [--out FILE.html] | --update FILE.md)"
EXAMPLES = ("report all runs", "report all runs/ablation --out ablation.html", "report all --update docs/results.md")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="a folder of run folders, such as runs")
    parser.add_argument("--update", type=Path, metavar="FILE.md", help="a document whose tables to replace")
    out = "file to write (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE.html", help=out)


def run(args: Namespace) -> int:
    """Write the page, or update the document."""
    if (args.folder is None) == (args.update is None):
        args.parser.error("give either FOLDER or --update FILE.md")
    if args.update:
        if not args.update.is_file():
            args.parser.error(f"{args.update}: no such file")
        from stackexp.reports.documents import update_document

        print("\n".join(update_document(args.update)))
        return 0
    if not args.folder.is_dir():
        args.parser.error(f"{args.folder}: no such folder; give a folder of runs, such as runs/")
    args.parser.check_output("--out", args.out, [".html"])
    from stackexp.inspection.actions import build_arithmetic_actions
    from stackexp.reports.page import build_page

    others = {"Actions in arithmetic": lambda: build_arithmetic_actions(args.folder)}
    args.out.write_text(build_page(args.folder, others), encoding="utf-8")
    print(args.out)
    return 0
