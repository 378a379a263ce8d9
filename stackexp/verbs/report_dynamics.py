"""Compare the training losses of runs over the tokens, raw and smoothed, and find where they cross the baseline.

RUNS are run folders, folders of run folders, or a sweep's folder. Unfinished runs are included.
"""

from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser, at_least, split_names
from stackexp.verbs.report_output import OUTPUT_USAGE, add_output_arguments, print_report

USAGE = f"RUNS ... [--only NAME,...] [--baseline NAME] [--smooth STEPS] {OUTPUT_USAGE}"
EXAMPLES = ("report dynamics runs/ablation --only stacktrans,queue --smooth 200 --figure dynamics.pdf",)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of run folders")
    parser.add_argument("--only", metavar="NAME,...", help="runs to show (default: all, or the paper's two)")
    parser.add_argument("--baseline", metavar="NAME", help="run to compare with (default: the Transformer)")
    smooth = "steps in a moving average (default: 4 %% of all)"
    parser.add_argument("--smooth", type=at_least(1), metavar="STEPS", help=smooth)
    add_output_arguments(parser)


def run(args: Namespace) -> int:
    from stackexp.reports.dynamics import build_dynamics

    only = split_names(args.only or "")
    return print_report(args, lambda: build_dynamics(args.runs, only, args.baseline, args.smooth))
