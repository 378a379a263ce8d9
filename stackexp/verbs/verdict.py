"""Decide whether a memory helps."""

import argparse
import contextlib
import math
from argparse import Namespace
from pathlib import Path

from stackexp.errors import ConfigError
from stackexp.verbs.parser import Parser, at_least
from stackexp.verbs.report import ReportVerb, argument


def parse_factor(text: str) -> float:
    """Return a number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")


class Verdict(ReportVerb):
    """Decide which arms of a comparison lower the loss: tune all equally, then train pairs until each is decided.

    A file names the arms, the effect in question and the search. With --memory and --config, a file with the usual
    controls is written first. The same command continues after a stop. Results are valid after any number of pairs.
    """

    builder = "reports.verdict:build_verdicts"
    source = argument("file", "FILE.yaml", "the arms, the effect and the search", nargs="?", type=Path)
    options = (
        ("--memory", {"metavar": "NAME", "help": "compare this memory with the usual controls"}),
        ("--report", {"action": "store_true", "help": "only read finished runs"}),
        ("--dry-run", {"action": "store_true", "help": "only print the number of runs and the time left"}),
        (
            "--budget",
            {
                "type": parse_factor,
                "default": 1.0,
                "metavar": "FACTOR",
                "help": "multiply all steps of the file by this",
            },
        ),
        ("--launcher", {"choices": ["local", "slurm"], "default": "local", "help": "default: local"}),
        ("--max-parallel", {"type": at_least(1), "metavar": "N", "help": "runs at once (default: as many as fit)"}),
    )
    examples = ("verdict mine.yaml --dry-run", "verdict --memory queue --config ablation/small")

    def add_arguments(self, parser: Parser) -> None:
        super().add_arguments(parser)
        parser.add_config()

    def run(self, args: Namespace) -> int:
        from stackexp.sweeps.controls import write_question
        from stackexp.sweeps.verdict import load_verdicts

        if args.memory and args.file and "=" in str(args.file):
            args.file, args.overrides = None, [str(args.file), *args.overrides]
        if (args.file is None) == (args.memory is None):
            args.parser.error("give a FILE.yaml, or --memory NAME with --config")
        if args.memory:
            args.parser.require_config(args)
            args.file, overrides = write_question(args.config, args.overrides, args.memory), []
        elif args.config:
            raise ConfigError(f"verdict: --config: {args.file} names its config; remove one of them")
        else:
            overrides = args.overrides
        verdicts = load_verdicts(args.file, overrides, args.budget)
        for verdict in verdicts:
            verdict.check()
        if args.dry_run:
            from stackexp.reports.verdict import format_plan

            print("\n\n".join(map(format_plan, verdicts)))
            return 0
        for verdict in verdicts if not args.report else ():
            is_complete = verdict.run(args.launcher, args.max_parallel)
            if is_complete and verdict.config.interventions_chunks:
                from stackexp.inspection.pairs import measure_pairs

                measure_pairs(verdict)
        args.verdicts, args.parameters = verdicts, ["verdicts"]
        return super().run(args)
