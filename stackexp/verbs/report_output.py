"""The output options that reports share: table style, CSV file and figure."""

import dataclasses
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stackexp.verbs.parser import FIGURE_SUFFIXES, Parser

OUTPUT_USAGE = "[--markdown | --latex] [--tables] [--csv FILE] [--figure FILE]"


def add_output_arguments(parser: Parser) -> None:
    """Add the output options of a report."""
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--markdown", action="store_true", help="print Markdown tables")
    style.add_argument("--latex", action="store_true", help="print LaTeX tables with booktabs rules")
    parser.add_argument("--tables", action="store_true", help="print only the tables, without notes")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the figures with full precision into this file")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the figure into this .png, .pdf or .svg file")


def print_report(args: Namespace, build: Callable[[], Any]) -> int:
    """Build a report and write it as requested."""
    args.parser.check_output("--figure", args.figure, FIGURE_SUFFIXES)
    args.parser.check_output("--csv", args.csv, [".csv"])
    from stackexp.reports.figures import save_figure
    from stackexp.reports.report import format_csv, format_report

    report = build()
    if args.tables:
        report = dataclasses.replace(report, notes=[])
    print(format_report(report, "markdown" if args.markdown else "latex" if args.latex else "terminal"))
    if args.csv:
        args.csv.write_text(format_csv(report.records), encoding="utf-8")
    if args.figure and report.draw is None:
        print(f"{args.figure}: not drawn, there is nothing to compare yet", file=sys.stderr)
    elif args.figure:
        save_figure(report.draw(), args.figure)
    return 0
