"""Measure the stack steps of all layers, without the rest of the model, against a lower bound of bytes and FLOPs.

Without --config the quickstart is measured.
"""

from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser, at_least

USAGE = "[OPTIONS] [KEY=VALUE ...]"
EXAMPLES = ("bench stack --config pretrain/stacktrans-360m --out stack.json",)


def add_arguments(parser: Parser) -> None:
    parser.add_config()
    steps = "timed rounds (default: %(default)s)"
    parser.add_argument("--steps", type=at_least(1), default=100, metavar="N", help=steps)
    out = "also write hardware, versions and all measurements here"
    parser.add_argument("--out", type=Path, metavar="FILE.json", help=out)


def run(args: Namespace) -> int:
    args.parser.check_output("--out", args.out, [".json"])
    args.config = args.config or ["quickstart"]
    from stackexp.config.compose import compose

    config = compose(args.config, args.overrides)
    memory = config.model.memory
    if getattr(memory, "kind", None) != "stack" or memory.axis != "depth":
        args.parser.error("requires a stack over the depth; set model.memory=stacktrans")
    from stackexp.benchmarking import stack_step
    from stackexp.benchmarking.harness import choose_device, write_record

    rows = list(stack_step.measure(config, args.steps, choose_device()))
    print(stack_step.format_rows(rows))
    write_record(args.out, rows, configs=args.config, overrides=args.overrides)
    return 0
