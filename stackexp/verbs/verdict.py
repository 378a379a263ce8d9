"""Decide whether a memory helps."""

from argparse import Namespace
from pathlib import Path

from stackexp.errors import ConfigError
from stackexp.verbs.parser import Parser, at_least
from stackexp.verbs.report import ReportVerb, argument


class Verdict(ReportVerb):
    """Decide which arms of a comparison lower the loss: tune all equally, then train pairs until each is decided.

    A file names the arms, the effect in question and the search. With --memory and --config, a file with the usual
    controls is written first. The same command continues after a stop. Results are valid after any number of pairs.
    """

    builder = "reports.verdict:build_verdict"
    source = argument("file", "FILE.yaml", "the arms, the effect and the search", nargs="?", type=Path)
    options = (
        ("--memory", {"metavar": "NAME", "help": "compare this memory with the usual controls"}),
        ("--report", {"action": "store_true", "help": "only read finished runs"}),
        ("--dry-run", {"action": "store_true", "help": "only print the number of runs and the time left"}),
        ("--launcher", {"choices": ["local", "slurm"], "default": "local", "help": "default: local"}),
        ("--max-parallel", {"type": at_least(1), "metavar": "N", "help": "runs at once (default: as many as fit)"}),
    )
    examples = ("verdict mine.yaml --dry-run", "verdict --memory queue --config ablation/small")

    def add_arguments(self, parser: Parser) -> None:
        super().add_arguments(parser)
        parser.add_config()

    def run(self, args: Namespace) -> int:
        from stackexp.sweeps.controls import write_question
        from stackexp.sweeps.verdict import load_verdict

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
        verdict = load_verdict(args.file, overrides)
        verdict.check()
        if args.dry_run:
            from stackexp.reports.verdict import format_plan

            print(format_plan(verdict))
            return 0
        if not args.report:
            is_complete = verdict.run(args.launcher, args.max_parallel)
            if is_complete and verdict.config.interventions_chunks:
                from stackexp.inspection.pairs import measure_pairs

                measure_pairs(verdict)
        args.verdict, args.parameters = verdict, ["verdict"]
        return super().run(args)
