"""Fit power laws of the loss against parameters and against tokens, for each family of models.

RUNS are run folders, folders of run folders, or a sweep's folder. Families are the Transformer and each memory.
"""

from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser
from stackexp.verbs.report_output import OUTPUT_USAGE, add_output_arguments, print_report

USAGE = f"RUNS ... [--loss COLUMN] [--irreducible LOSS] {OUTPUT_USAGE}"
EXAMPLES = ("report scaling runs/ladder --figure scaling.pdf", "report scaling runs/scaling --irreducible 1.7 --latex")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of run folders")
    loss = "training loss, V2, V3 or average (default: the first of V2, average, training loss that all runs have)"
    parser.add_argument("--loss", choices=("training loss", "V2", "V3", "average"), metavar="COLUMN", help=loss)
    irreducible = "loss that no size removes (default: 0)"
    parser.add_argument("--irreducible", type=float, default=0.0, metavar="LOSS", help=irreducible)
    add_output_arguments(parser)


def run(args: Namespace) -> int:
    from stackexp.reports.scaling import build_scaling

    return print_report(args, lambda: build_scaling(args.runs, args.loss, args.irreducible))
