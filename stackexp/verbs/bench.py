"""Measure the cost of a memory."""

from argparse import Namespace
from pathlib import Path

from stackexp.config.layers import get_group_folder
from stackexp.config.yaml_files import list_yaml_names
from stackexp.errors import ConfigError, suggest_name
from stackexp.verbs.parser import Parser, Verb, count, flag, split_names

MEMORIES = list_yaml_names(get_group_folder("model.memory"))


class Efficiency(Verb):
    """Measure training, prefill, decode and memory of each variant, in multiples of the plain Transformer.

    The variants alternate with the Transformer in one process. Without --config the quickstart is measured.
    """

    examples = (
        "bench efficiency",
        "bench efficiency --config pretrain/stacktrans-360m data.micro_batch_size=8 --out efficiency.json",
    )

    def add_arguments(self, parser: Parser) -> None:
        parser.add_config()
        parser.add_argument("--steps", **count(1, "timed rounds", 100))
        out = "also write hardware, versions and all measurements here"
        parser.add_argument("--out", type=Path, metavar="FILE.json", help=out)
        parser.add_argument("--markdown", **flag("print a Markdown table"))
        parser.add_argument("--only", metavar="MEMORY,...", help=f"some of {', '.join(MEMORIES)} (default: all)")

    def run(self, args: Namespace) -> int:
        args.parser.check_output("--out", args.out, [".json"])
        args.config = args.config or ["quickstart"]
        wanted = list(MEMORIES) if args.only is None else split_names(args.only)
        if not wanted:
            args.parser.error("--only: name at least one memory")
        for name in wanted:
            if name not in MEMORIES:
                args.parser.error(
                    f"--only: unknown memory {name!r}{suggest_name(name, MEMORIES)}; choose {', '.join(MEMORIES)}"
                )
        from stackexp.config.compose import compose

        for name in ("null", *wanted):
            try:
                config = compose(args.config, [*args.overrides, f"model.memory={name}"])
            except ConfigError as error:
                raise ConfigError(f"bench efficiency: with model.memory={name}: {error}") from None
            if config.data.objective != "language_modeling":
                raise ConfigError(
                    f"bench efficiency: data.kind {config.data.kind} has no text; use a config of a language model"
                )
        from stackexp.benchmarking import choose_device, measure_efficiency, write_record
        from stackexp.reports.efficiency import build_cost_report
        from stackexp.reports.report import format_report

        rows = []
        for row in measure_efficiency(wanted, args.config, args.overrides, args.steps, choose_device()):
            rows.append(row)
            print(f"{row.get('error', 'measured')}: {row['model']} ({row['implementation']})", flush=True)
            record = write_record(args.out, rows, configs=args.config, overrides=args.overrides)
        print(f"\n{format_report(build_cost_report(record), 'markdown' if args.markdown else 'terminal')}")
        return 0
