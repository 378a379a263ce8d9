"""Compare runs in tables and figures."""

import dataclasses
import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stackexp.verbs.parser import FIGURE_SUFFIXES, Parser, Verb, at_least, split_names


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


class Compare(Verb):
    """Compare runs in one table, from their run folders. Refuses runs that were trained on different data."""

    examples = ("report compare runs/quickstart/* --figure loss.png",)

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders of run folders")
        parser.add_argument("--figure", type=Path, metavar="FILE", help="plot the losses into this file")
        style = parser.add_mutually_exclusive_group()
        style.add_argument("--markdown", action="store_true", help="print a Markdown table")
        style.add_argument(
            "--json", action="store_true", help="print a list of objects: state, options, result and scores of each run"
        )
        parser.add_argument("--different-data", action="store_true", help="compare runs even if their data differ")

    def run(self, args: Namespace) -> int:
        args.parser.check_output("--figure", args.figure, FIGURE_SUFFIXES)
        from stackexp import runs
        from stackexp.frame import list_rows, load_runs
        from stackexp.reports.compare import draw_losses, format_comparison, has_repetitions
        from stackexp.reports.differences import check_same_data

        for path in args.runs:
            if not Path(path).is_dir():
                runs.open_run(path)  # raises an error
        rows = list_rows(load_runs(args.runs))
        if not rows:
            args.parser.error(f"{', '.join(args.runs)}: no run folders; give run folders or folders of them")
        for row in rows:
            if row["problem"]:
                print(f"damaged: {row['problem']}", file=sys.stderr)
        if not args.different_data:
            for note in check_same_data(rows):
                print(note, file=sys.stderr)
        if args.json:
            print(json.dumps(rows, indent=2))
        else:
            print(format_comparison(rows, "markdown" if args.markdown else "terminal"))
            if has_repetitions(rows):
                print("\n`report ablation` gives the means over the seeds, and differences with intervals")
        if args.figure:
            draw_losses(rows, args.figure)
        return 0


class Formal(Verb):
    """Compare runs on formal languages with Table 1 of the paper, from their run folders.

    RUNS are run folders, folders of run folders such as runs/formal_table, or a sweep's folder.
    """

    examples = (
        "report formal runs/formal_table",
        "report formal runs/formal_table runs/formal --score 41_100 --latex --csv runs.csv",
        "report formal runs/formal_table --figure bars.png --curves curves.pdf",
    )

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of run folders")
        parser.add_argument("--score", default="41_500", metavar="A_B", help="range of lengths (default: %(default)s)")
        parser.add_argument(
            "--curves", type=Path, metavar="FILE", help="plot the accuracy against length for each task"
        )
        add_output_arguments(parser)

    def run(self, args: Namespace) -> int:
        lengths = _parse_lengths(args)
        args.parser.check_output("--curves", args.curves, FIGURE_SUFFIXES)
        from stackexp.reports.figures import save_figure
        from stackexp.reports.formal.figures import draw_curves
        from stackexp.reports.formal.records import collect_results
        from stackexp.reports.formal.tables import build_formal
        from stackexp.reports.report import Report

        def build() -> Report:
            results = collect_results(args.runs, lengths)
            if args.curves:
                save_figure(draw_curves(results), args.curves)
            return build_formal(results)

        return print_report(args, build)


def _parse_lengths(args: Namespace) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)_(\d+)", args.score)
    first, last = (int(match[1]), int(match[2])) if match else (1, 0)
    if not 1 <= first <= last:
        args.parser.error(f"--score: expected a range of lengths such as 41_500, found {args.score}")
    return first, last


class Ablation(Verb):
    """Compare the variants of a model with the paper's ablation, with differences from a baseline, paired by seed.

    RUNS are run folders, folders of run folders, or a sweep's folder.
    """

    examples = (
        "report ablation runs/ablation",
        "report ablation runs/depth_memories --baseline transformer_wide --figure ablation.pdf",
    )

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of run folders")
        baseline = "run to compare with (default: the Transformer without a memory)"
        parser.add_argument("--baseline", metavar="NAME", help=baseline)
        add_output_arguments(parser)

    def run(self, args: Namespace) -> int:
        from stackexp.reports.ablation import build_ablation

        return print_report(args, lambda: build_ablation(args.runs, args.baseline))


class Scaling(Verb):
    """Fit power laws of the loss against parameters and against tokens, for each family of models.

    RUNS are run folders, folders of run folders, or a sweep's folder. Families are the paper's variants and the kinds
    of memory; --by separates them by options.
    """

    examples = (
        "report scaling runs/ladder --figure scaling.pdf",
        "report scaling runs/scaling --irreducible 1.7 --latex",
        "report scaling runs/ladder --by optimizer.lr",
    )

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of run folders")
        loss = "training loss, V2, V3 or average (default: the first of V2, average, training loss that all runs have)"
        parser.add_argument("--loss", choices=("training loss", "V2", "V3", "average"), metavar="COLUMN", help=loss)
        irreducible = "loss that no size removes (default: 0)"
        parser.add_argument("--irreducible", type=float, default=0.0, metavar="LOSS", help=irreducible)
        parser.add_argument("--by", metavar="KEY,...", help="options whose values separate families as well")
        add_output_arguments(parser)

    def run(self, args: Namespace) -> int:
        from stackexp.reports.scaling import build_scaling

        by = split_names(args.by or "")
        return print_report(args, lambda: build_scaling(args.runs, args.loss, args.irreducible, by))


class Benchmarks(Verb):
    """Compare the benchmarks of runs and baselines: a table of tasks, and the average over the training tokens.

    RUNS are run folders, folders of run folders, and files that `evaluate --out` wrote.
    """

    examples = ("report benchmarks runs/pretrain baseline.json --figure benchmarks.pdf",)

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument(
            "runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or files of evaluate --out"
        )
        add_output_arguments(parser)

    def run(self, args: Namespace) -> int:
        from stackexp.reports.benchmarks import build_benchmarks

        return print_report(args, lambda: build_benchmarks(args.runs))


class Dynamics(Verb):
    """Compare the training losses of runs over the tokens, raw and smoothed, and find where they cross the baseline.

    RUNS are run folders, folders of run folders, or a sweep's folder. Unfinished runs are included.
    """

    examples = ("report dynamics runs/ablation --only stacktrans,queue --smooth 200 --figure dynamics.pdf",)

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of run folders")
        parser.add_argument("--only", metavar="NAME,...", help="runs to show (default: all, or the paper's two)")
        parser.add_argument("--baseline", metavar="NAME", help="run to compare with (default: the Transformer)")
        smooth = "steps in a moving average (default: 4 %% of all)"
        parser.add_argument("--smooth", type=at_least(1), metavar="STEPS", help=smooth)
        add_output_arguments(parser)

    def run(self, args: Namespace) -> int:
        from stackexp.reports.dynamics import build_dynamics

        only = split_names(args.only or "")
        return print_report(args, lambda: build_dynamics(args.runs, only, args.baseline, args.smooth))


class Grid(Verb):
    """Show the loss over the stack's heads (H), slot size (d_s) and slots (S), from the trials of a sweep.

    SWEEP is a sweep's folder in runs/, a shipped name or a YAML file.
    """

    examples = ("report grid stack_grid --figure grid.pdf", "report grid runs/stack_grid --latex")

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("sweep", metavar="SWEEP", help="a sweep's folder, a shipped name or a YAML file")
        add_output_arguments(parser)

    def run(self, args: Namespace) -> int:
        from stackexp.reports.grid import build_grid

        return print_report(args, lambda: build_grid(args.sweep))


class Actions(Verb):
    """Show when runs push and pop: the probability of each action over the layers, as in the paper's action study.

    RUNS are run folders or folders of run folders. Runs without a stack are skipped. To run the paper's study:
    `fit --config arithmetic/addition` and `fit --config arithmetic/multiplication`.
    """

    examples = ("report actions runs/arithmetic --figure actions.pdf",)

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of run folders")
        parser.add_argument(
            "--set", metavar="NAME", dest="set_name", help="a validation set (default: each run's first)"
        )
        chunks = "chunks or problems of the set (default: %(default)s)"
        parser.add_argument("--chunks", type=at_least(1), default=256, metavar="N", help=chunks)
        add_output_arguments(parser)

    def run(self, args: Namespace) -> int:
        from stackexp.inspection.actions import build_actions

        return print_report(args, lambda: build_actions(args.runs, args.set_name, args.chunks))


class Efficiency(Verb):
    """Compare the cost of the memories with the paper's efficiency table, from a file of `bench efficiency --out`."""

    examples = ("report efficiency efficiency.json --figure efficiency.pdf",)

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("file", type=Path, metavar="FILE", help="the JSON file")
        add_output_arguments(parser)

    def run(self, args: Namespace) -> int:
        from stackexp.reports.efficiency import build_efficiency

        return print_report(args, lambda: build_efficiency(args.file))


class All(Verb):
    """Write one HTML page with the tables and figures of all runs in a folder. It opens offline.

    The page has sections for the ablation, scaling, training dynamics, sweeps over the stack's hyperparameters,
    benchmarks, formal languages, actions in arithmetic, and files of `bench efficiency --out` in the folder. Sections
    without runs are omitted.

    With --update, it instead replaces the tables of a Markdown document: those between a comment with their command,
    `<!-- python -m stackexp report ... -->`, and `<!-- end of report -->`.
    """

    usage = "(FOLDER [--out FILE.html] | --update FILE.md)"
    examples = (
        "report all runs",
        "report all runs/ablation --out ablation.html",
        "report all --update docs/results.md",
    )

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument(
            "folder", nargs="?", type=Path, metavar="FOLDER", help="a folder of run folders, such as runs"
        )
        parser.add_argument("--update", type=Path, metavar="FILE.md", help="a document whose tables to replace")
        out = "file to write (default: %(default)s)"
        parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE.html", help=out)

    def run(self, args: Namespace) -> int:
        """Write the page, or update the document."""
        if (args.folder is None) == (args.update is None):
            args.parser.error("give either FOLDER or --update FILE.md")
        if args.update:
            if not args.update.is_file():
                args.parser.error(f"{args.update}: no such file")
            from stackexp.reports.publish import update_document

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
