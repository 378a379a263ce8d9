"""Show the contents of a dataset and verify its files.

PATH is a set made by `data prepare`, a token file (.npy, .bin), a folder of MDS shards, or a folder of several of
these. Every file is compared with its recorded hash. The exit code is 1 if a file is missing, cut short or corrupt.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import FIGURE_SUFFIXES, Parser, at_least

USAGE = "PATH [OPTIONS]"
EXAMPLES = (
    "data inspect shards/",
    "data inspect shards/ --figure lengths.png --samples 5 --seed 1",
    "data inspect data/olmo/v2 --tokenizer gpt-neox-20b.json --samples 1",
    "data inspect part-000.npy --json",
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a dataset, or a folder of datasets")
    samples, seed = "samples to show (default: %(default)s)", "choice of samples (default: %(default)s)"
    parser.add_argument("--samples", type=at_least(0), default=3, metavar="N", help=samples)
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help=seed)
    parser.add_argument("--figure", type=Path, metavar="FILE.png", help="draw the distribution of document lengths")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json of token ids without one")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    """Inspect the datasets at a path; return 1 if a file is damaged."""
    if args.figure and args.figure.suffix not in FIGURE_SUFFIXES:
        args.parser.error(f"--figure {args.figure}: must end in {', '.join(FIGURE_SUFFIXES)}")
    from stackexp.data.tokenizer import KnownTokenizer
    from stackexp.reports.data.inspect import draw_figures, inspect_path
    from stackexp.reports.data.inspection import InspectOptions

    tokenizer = KnownTokenizer.read(args.tokenizer) if args.tokenizer else None
    inspections = inspect_path(args.path, InspectOptions(args.samples, args.seed, tokenizer, sys.stderr.isatty()))
    if args.json:
        print(json.dumps([inspection.as_dict() for inspection in inspections], indent=2, ensure_ascii=False))
    else:
        print("\n".join(inspection.format() for inspection in inspections))
    if args.figure:
        files = draw_figures(inspections, args.figure)
        for file in files:
            print(file)
        if not files:
            print("no figure: the lengths of documents are unknown", file=sys.stderr)
    return int(any(inspection.damage for inspection in inspections))
