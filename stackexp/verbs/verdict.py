"""Decide whether a memory helps."""

import argparse
import contextlib
import math
from argparse import Namespace
from pathlib import Path

from stackexp.errors import ConfigError
from stackexp.verbs.parser import FIGURE_SUFFIXES, Parser, count, flag, setting
from stackexp.verbs.report import ReportVerb


def parse_factor(text: str) -> float:
    """Return a finite number above 0."""
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
    arguments = (
        ("file", setting("FILE.yaml", "the arms, the effect and the search", nargs="?")),
        ("--memory", setting("NAME", "compare this memory with the usual controls")),
        ("--effect", setting("NATS", "with --memory: the smallest difference of interest", type=parse_factor)),
        ("--report", flag("only read finished runs")),
        ("--dry-run", flag("train nothing; print the number of runs and the time left")),
        ("--budget", setting("FACTOR", "multiply all steps of the file by this", type=parse_factor, default=1.0)),
        ("--launcher", {"choices": ["local", "slurm"], "help": "default: local"}),
        ("--max-parallel", count(1, "runs at once (default: as many as fit)")),
    )
    examples = ("verdict mine.yaml --dry-run", "verdict --memory queue --config ablation/small")

    def add_arguments(self, parser: Parser) -> None:
        super().add_arguments(parser)
        parser.add_config()

    def _check_arguments(self, args: Namespace) -> None:
        args.parser.check_output("--figure", args.figure, FIGURE_SUFFIXES)  # before runs that take hours
        args.parser.check_output("--csv", args.csv, [".csv"])
        if args.dry_run and (args.figure or args.csv or args.markdown or args.latex or args.tables is not None):
            args.parser.error("--dry-run prints no tables; omit the options of the report")
        if args.report and (args.launcher or args.max_parallel):
            args.parser.error("--report starts no runs; omit --launcher and --max-parallel")
        if args.memory and args.file and "=" in args.file:
            args.file, args.overrides = None, [args.file, *args.overrides]
        if args.effect and not args.memory:
            args.parser.error("--effect requires --memory; set effect in FILE.yaml")
        if (args.file is None) == (args.memory is None):
            args.parser.error("give a FILE.yaml, or --memory NAME with --config")

    def run(self, args: Namespace) -> int:
        from stackexp.sweeps.controls import write_question
        from stackexp.sweeps.verdict import load_verdicts

        self._check_arguments(args)
        if args.memory:
            args.parser.require_config(args)
            args.file, overrides = write_question(args.config, args.overrides, args.memory, args.effect), []
        elif args.config:
            raise ConfigError(f"verdict: --config: {args.file} names its config; remove one of them")
        else:
            overrides = args.overrides
        verdicts = load_verdicts(Path(args.file), overrides, args.budget)
        if args.figure and len(verdicts) > 1:
            raise ConfigError(f"verdict: --figure: {args.file} has {len(verdicts)} questions, and a figure draws one")
        verdicts[0].check()
        for verdict in verdicts[1:] if not args.report else ():
            verdict.check_arms()  # the questions of `each` share the points of their tuning
        if args.dry_run:
            from stackexp.reports.pair_plan import format_runs

            print("\n\n".join(map(format_runs, verdicts)))
            return 0
        from stackexp.reports.interventions import list_unmeasured
        from stackexp.reports.training_data import open_pairs

        parallel = args.max_parallel
        if args.launcher == "slurm" and parallel is not None:  # each question has jobs of its own
            parallel //= len(verdicts)
            if not parallel:
                raise ConfigError(f"verdict: --max-parallel: expected at least {len(verdicts)}, one for each question")
        for verdict in verdicts if not args.report else ():
            is_complete = verdict.run(args.launcher or "local", parallel, open_pairs)
            if is_complete and verdict.config.interventions_chunks and list_unmeasured(verdict):
                from stackexp.inspection.pairs import measure_pairs  # imports torch, which takes seconds

                measure_pairs(verdict)
        args.verdicts = verdicts
        return super().run(args)
