"""Compare runs in tables and figures."""

import argparse
import contextlib
import dataclasses
import inspect
import pkgutil
import re
import sys
from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import FIGURE_SUFFIXES, Parser, Settings, Verb, at_least, count, flag, setting, split_names

Argument = tuple[str, Settings]
"""Name and settings of an argument."""
ALL_TABLES = 0
"""The value of --tables without a number."""


def parse_lengths(text: str) -> tuple[int, int]:
    """Return a range of lengths such as 41_500."""
    match = re.fullmatch(r"(\d+)_(\d+)", text)
    first, last = (int(match[1]), int(match[2])) if match else (1, 0)
    if not 1 <= first <= last:
        raise argparse.ArgumentTypeError(f"expected a range of lengths such as 41_500, found {text}")
    return first, last


def parse_size(text: str) -> int:
    """Return a positive number such as 700000000 or 700e6."""
    with contextlib.suppress(ValueError, OverflowError):
        if (size := int(float(text))) > 0:
            return size
    raise argparse.ArgumentTypeError(f"expected a number such as 700e6, found {text}")


RUNS = ("paths", setting("RUNS", "run folders, or folders of them, such as a sweep's", nargs="+", type=Path))
LOSS = (
    "--loss",
    setting(
        "COLUMN",
        "training loss, V2, V3 or average (default: the first of V2, average, training loss that all runs have)",
        dest="measure",
        choices=("training loss", "V2", "V3", "average"),
    ),
)


class ReportVerb(Verb):
    """A report of runs, with options for its output.

    `builder` is the function that builds it, as "module:function" in stackexp. Its parameters are the destinations of
    `arguments`.
    """

    builder = ""
    arguments: tuple[Argument, ...] = (RUNS,)

    def add_arguments(self, parser: Parser) -> None:
        for name, settings in self.arguments:
            parser.add_argument(name, **settings)
        style = parser.add_mutually_exclusive_group()
        style.add_argument("--markdown", **flag("print Markdown tables"))
        style.add_argument("--latex", **flag("print LaTeX tables with booktabs rules"))
        add = parser.add_argument
        tables = "print only the tables, or only the Nth, without notes"
        add("--tables", **setting("N", tables, nargs="?", type=at_least(1), const=ALL_TABLES))
        add("--csv", **setting("FILE", "write the figures with full precision to this file", type=Path))
        add("--figure", **setting("FILE", "draw the figure to this .png, .pdf or .svg file", type=Path))

    def run(self, args: Namespace) -> int:
        args.parser.check_output("--figure", args.figure, FIGURE_SUFFIXES)
        args.parser.check_output("--csv", args.csv, [".csv"])
        from stackexp.reports.report import format_report, save_figure, write_csv

        build = pkgutil.resolve_name(f"stackexp.{self.builder}")
        report = build(**{name: getattr(args, name) for name in inspect.signature(build).parameters})
        if args.tables is not None:
            number, count = args.tables, len(report.tables)
            if number > count:
                args.parser.error(f"--tables {number}: the report has {count} tables")
            chosen = report.tables if number == ALL_TABLES else [report.tables[number - 1]]
            report = dataclasses.replace(report, tables=chosen, notes=[])
        print(format_report(report, "markdown" if args.markdown else "latex" if args.latex else "terminal"))
        if args.csv and not report.records:
            print(f"{args.csv}: not written, this report has no values for it", file=sys.stderr)
        elif args.csv:
            write_csv(report.records, args.csv)
        if args.figure and report.draw is None:
            print(f"{args.figure}: not drawn, there is nothing to compare yet", file=sys.stderr)
        elif args.figure:
            save_figure(report.draw(), args.figure)
        return 0


class Compare(ReportVerb):
    """Compare runs in one table, from their run folders. Refuses runs that were trained on different data.

    The CSV file has state, options, result and scores of each run. `report ablation` gives the means over the seeds,
    and differences with intervals.
    """

    builder = "reports.compare:build_comparison"
    examples = ("report compare runs/quickstart/* --figure loss.png",)
    arguments = (RUNS, ("--different-data", flag("compare runs even if their data differ")))


class Formal(ReportVerb):
    """Compare runs on formal languages with Table 1 of the paper, from their run folders."""

    builder = "reports.formal:build_formal"
    examples = (
        "report formal runs/formal_table",
        "report formal runs/formal_table runs/formal --score 41_100 --latex --csv runs.csv",
        "report formal runs/formal_table --figure bars.png --curves curves.pdf",
    )
    arguments = (
        RUNS,
        ("--score", setting("A_B", "lengths (default: 41_500)", dest="lengths", type=parse_lengths, default="41_500")),
        ("--curves", setting("FILE", "plot the accuracy against length for each task", type=Path)),
        ("--arms", flag("a column for each arm of a verdict file, without the paper's")),
        ("--one-setting", flag("with --arms: only runs with the trial of an arm that is best over all tasks")),
    )

    def run(self, args: Namespace) -> int:
        args.parser.check_output("--curves", args.curves, FIGURE_SUFFIXES)
        if args.arms and (args.curves or args.figure):
            args.parser.error("--arms has no figures; omit --curves and --figure")
        if args.one_setting and not args.arms:
            args.parser.error("--one-setting requires --arms")
        return super().run(args)


class Ablation(ReportVerb):
    """Compare the variants of a model with the paper's ablation, with differences from a baseline, paired by seed.

    A verdict follows the differences: an arm helps, hurts, has no effect above --effect, or is undecided.
    """

    builder = "reports.ablation:build_ablation"
    examples = (
        "report ablation runs/ablation",
        "report ablation runs/depth_memories --baseline transformer_wide --figure ablation.pdf",
    )
    arguments = (
        RUNS,
        ("--baseline", setting("NAME", "run to compare with (default: the Transformer without a memory)")),
        LOSS,
        ("--effect", setting("NATS", "difference in question (default: %(default)s)", type=float, default=0.01)),
    )


class Scaling(ReportVerb):
    """Fit power laws of the loss against parameters and against tokens, for each family of models.

    Families are the paper's variants and the kinds of memory; --by separates them by options.

    With --forecast, it instead predicts the loss of one new run of the next size, with a 95 % interval, and writes this
    to FILE. The same command scores the forecast when runs of this size have finished; it never changes FILE.
    """

    builder = "reports.scaling:build_scaling"
    examples = (
        "report scaling runs/ladder --figure scaling.pdf",
        "report scaling runs/scaling --irreducible 1.7 --latex",
        "report scaling runs/ladder --by optimizer.lr",
        "report scaling runs/ladder --forecast forecast-700m.json --size 700e6",
    )
    arguments = (
        RUNS,
        LOSS,
        ("--irreducible", setting("LOSS", "loss that no size removes (default: 0)", type=float, default=0.0)),
        ("--by", setting("KEY,...", "options whose values separate families as well", type=split_names, default=())),
        ("--forecast", setting("FILE.json", "file to write, or to score if it exists", type=Path)),
        ("--size", setting("N", "parameters outside the memory to forecast", type=parse_size)),
        ("--tokens", setting("N", "tokens to forecast, for loss against tokens", type=parse_size)),
    )

    def run(self, args: Namespace) -> int:
        if args.size and args.tokens:
            args.parser.error("--tokens: not allowed with --size")
        if args.forecast is None and (args.size or args.tokens):
            args.parser.error("--size and --tokens require --forecast")
        if args.forecast:
            args.parser.check_output("--forecast", args.forecast, [".json"])
            if args.figure:
                args.parser.error("--figure: a forecast has no figure; omit it")
        return super().run(args)


class Benchmarks(ReportVerb):
    """Compare the benchmarks of runs and baselines: a table of tasks, and the average over the training tokens.

    RUNS may also be files that `evaluate --out` wrote.
    """

    builder = "reports.benchmarks:build_benchmarks"
    examples = ("report benchmarks runs/pretrain baseline.json --figure benchmarks.pdf",)


class Dynamics(ReportVerb):
    """Compare the training losses of runs over the tokens, raw and smoothed, and find where they cross the baseline.

    Unfinished runs are included.
    """

    builder = "reports.dynamics:build_dynamics"
    examples = ("report dynamics runs/ablation --only stacktrans,queue --smooth 200 --figure dynamics.pdf",)
    arguments = (
        RUNS,
        ("--only", setting("NAME,...", "runs (default: all, or the paper's two)", type=split_names, default=())),
        ("--baseline", setting("NAME", "run to compare with (default: the Transformer)")),
        ("--smooth", count(1, "steps in a moving average (default: 4 %% of all)")),
    )


class Grid(ReportVerb):
    """Show the loss over the hyperparameters of a sweep, with heat maps of the stack's heads, slot size and slots.

    SWEEP is a sweep's folder in runs/, a shipped name or a YAML file.
    """

    builder = "reports.grid:build_grid"
    examples = ("report grid stack_grid --figure grid.pdf", "report grid runs/stack_grid --latex")
    arguments = ()

    def add_arguments(self, parser: Parser) -> None:
        parser.add_sweep()
        super().add_arguments(parser)


class Actions(ReportVerb):
    """Show when runs push and pop: the probability of each action over the layers, as in the paper's action study.

    Runs without a stack are skipped. To run the paper's study: `fit --config arithmetic/addition` and
    `fit --config arithmetic/multiplication`.
    """

    builder = "inspection.actions:build_actions"
    examples = ("report actions runs/arithmetic --figure actions.pdf",)
    arguments = (
        RUNS,
        ("--set", setting("NAME", "a validation set (default: each run's first)", dest="set_name")),
        ("--chunks", count(1, "chunks or problems of the set", 256, dest="num_chunks")),
    )


class States(ReportVerb):
    """Show how states drift and actions blur with the length of strings, and how well this predicts failure.

    Takes runs on formal languages with their checkpoints. Hidden states and slots are compared with the state of the
    task's automaton at each token. The prediction uses strings of up to 60 symbols; a run fails if its mean accuracy
    over 41..500 is below 0.99.
    """

    builder = "inspection.states:build_states"
    examples = ("report states runs/formal_table --figure states.png --csv states.csv",)
    arguments = (RUNS, ("--strings", count(8, "strings of each length", 64, dest="num_strings")))


class Efficiency(ReportVerb):
    """Compare the cost of the memories with the paper's efficiency table, from a file of `bench efficiency --out`."""

    builder = "reports.efficiency:build_efficiency"
    examples = ("report efficiency efficiency.json --figure efficiency.pdf",)
    arguments = (("path", setting("FILE", "the JSON file", type=Path)),)


class All(Verb):
    """Write one HTML page with the tables and figures of all runs in a folder. It opens offline.

    The page has sections for the ablation, scaling, training dynamics, sweeps, benchmarks, formal languages, actions in
    arithmetic, and files of `bench efficiency --out` in the folder. Sections without runs are omitted.

    With --update, it instead replaces the tables of a Markdown document: those between a comment with their command,
    `<!-- python -m stackexp report ... -->`, and `<!-- end of report -->`.
    """

    examples = (
        "report all runs",
        "report all runs/ablation --out ablation.html",
        "report all --update docs/results.md",
    )

    def add_arguments(self, parser: Parser) -> None:
        folder = setting("FOLDER", "a folder of run folders, such as runs", type=Path)
        parser.add_argument("folder", nargs="?", **folder)
        parser.add_argument("--update", type=Path, metavar="FILE.md", help="a document whose tables to replace")
        out = "file to write (default: %(default)s)"
        parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE.html", help=out)

    def run(self, args: Namespace) -> int:
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
