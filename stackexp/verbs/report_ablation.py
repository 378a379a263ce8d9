"""Compare the variants of a model with the paper's ablation, with differences from a baseline, paired by seed.

RUNS are run folders, folders of run folders, or a sweep's folder.
"""

from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser
from stackexp.verbs.report_output import OUTPUT_USAGE, add_output_arguments, print_report

USAGE = f"RUNS ... [--baseline NAME] {OUTPUT_USAGE}"
EXAMPLES = (
    "report ablation runs/ablation",
    "report ablation runs/depth_memories --baseline transformer_wide --figure ablation.pdf",
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of run folders")
    baseline = "run to compare with (default: the Transformer without a memory)"
    parser.add_argument("--baseline", metavar="NAME", help=baseline)
    add_output_arguments(parser)


def run(args: Namespace) -> int:
    from stackexp.reports.ablation import build_ablation

    return print_report(args, lambda: build_ablation(args.runs, args.baseline))
