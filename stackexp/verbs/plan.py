"""Predict the cost of a run, and find models of equal cost."""

import math
from argparse import Namespace
from pathlib import Path

from stackexp.errors import RunError
from stackexp.planning.devices import DEFAULT_DEVICE, DEFAULT_MFU, DEVICES
from stackexp.verbs.parser import Parser, Verb, count

MATCHED = {"parameters": "parameters", "flops": "training FLOPs per token", "memory": "peak bytes per rank"}
VARIED = ("intermediate_size", "hidden_size", "num_layers")


class Plan(Verb):
    """Predict memory, time and cost of a training run.

    Memory is per rank, measured on tensors without values. It excludes CUDA, NCCL, cuBLAS and fragmentation, for which
    6% of the device is reserved. Exits with 1 if the run does not fit.

    With --effect and --runs, print instead how many pairs of runs find a difference in loss, from the noise between the
    seeds of finished runs.
    """

    examples = (
        "plan --config pretrain/stacktrans-7b trainer=fsdp trainer.num_nodes=8",
        "plan --config pretrain/stacktrans-360m --device a100 --mfu 0.35",
        "plan --effect 0.01 --runs docs/results/ablation_small --baseline transformer_wide",
    )

    def add_arguments(self, parser: Parser) -> None:
        parser.add_config()
        add = parser.add_argument
        add("--device", default=DEFAULT_DEVICE, choices=DEVICES, help="type of GPU (default: %(default)s)")
        add("--mfu", type=float, default=DEFAULT_MFU, help="model FLOPs utilization (default: %(default)s)")
        add("--effect", type=float, metavar="NATS", help="print the pairs that find this difference in loss")
        add("--runs", nargs="+", metavar="RUNS", type=Path, help="finished runs that show the noise, with --effect")
        add("--baseline", metavar="ARM", help="the arm that the others are paired with (default: as `report ablation`)")
        add("--arms", **count(1, "arms that one verdict compares with the baseline, with --effect (default: 1)"))

    def run(self, args: Namespace) -> int:
        """Print the plan of a config. Raises ConfigError for mistakes, RunError if the run does not fit."""
        if args.effect is not None or args.runs:
            return _plan_pairs(args)
        if args.baseline or args.arms:
            args.parser.error(f"--{'baseline' if args.baseline else 'arms'} requires --effect and --runs")
        args.parser.require_config(args)
        if not 0 < args.mfu <= 1:
            args.parser.error(f"--mfu: expected a number above 0, up to 1, found {args.mfu}")
        from stackexp.config.compose import compose

        config = compose(args.config, args.overrides)
        from stackexp.planning.cost import format_bytes, format_plan, make_plan, suggest_changes

        plan = make_plan(config, args.device, args.mfu)
        print(format_plan(plan), flush=True)
        if not plan.fits:
            excess = format_bytes(plan.peak - plan.usable_bytes)
            raise RunError(
                f"plan: {format_bytes(plan.peak)} per {args.device} exceeds the usable "
                f"{format_bytes(plan.usable_bytes)} by {excess}; {suggest_changes(plan)}"
            )
        return 0


def _plan_pairs(args: Namespace) -> int:
    if args.effect is None or not args.runs:
        args.parser.error("--effect requires --runs, and --runs requires --effect")
    if not 0 < args.effect < math.inf:
        args.parser.error(f"--effect: expected a finite number above 0, found {args.effect}")
    unused = {"--config": args.config, "--device": args.device != DEFAULT_DEVICE}
    unused |= {"--mfu": args.mfu != DEFAULT_MFU} | dict.fromkeys(args.overrides, True)
    for option in (option for option, is_given in unused.items() if is_given):
        args.parser.error(f"--effect plans from --runs and has no {option}; omit it")
    from stackexp.reports.pair_plan import build_pair_plan
    from stackexp.reports.report import format_report

    print(format_report(build_pair_plan(args.runs, args.effect, args.baseline, args.arms or 1), "terminal"))
    return 0


class Match(Verb):
    """Find the width or depth at which a model equals another one in parameters, FLOPs or memory.

    A memory adds parameters and FLOPs, so a fair baseline is wider than the model with the memory.
    """

    examples = (
        "match --config ablation/transformer --to ablation/stacktrans --by parameters",
        "match --config quickstart model.memory=null --to quickstart --by flops --vary hidden_size",
    )

    def add_arguments(self, parser: Parser) -> None:
        parser.add_config()
        parser.add_argument("--to", action="append", default=[], metavar="NAME_OR_PATH", help="the model to equal")
        by = "quantity to match: parameters, training FLOPs per token, or peak memory (default: %(default)s)"
        parser.add_argument("--by", choices=MATCHED, default="parameters", help=by)
        vary = f"option of the model to change: {', '.join(VARIED)} (default: {VARIED[0]})"
        parser.add_argument("--vary", choices=VARIED, default=VARIED[0], metavar="OPTION", help=vary)

    def run(self, args: Namespace) -> int:
        if not args.config or not args.to:
            args.parser.error("give --config and --to; `configs list` shows the names")
        from stackexp.config.compose import compose

        config, to = compose(args.config, args.overrides), compose(args.to, [])
        if not hasattr(config.model, args.vary):
            args.parser.error(f"--vary {args.vary}: model.kind {config.model.kind} has no such option")
        from stackexp.planning.cost import QUANTITIES, match_models

        before, target = QUANTITIES[args.by](config), QUANTITIES[args.by](to)
        value, quantity = match_models(args.config, args.overrides, target, args.by, args.vary)
        print(f"{MATCHED[args.by]}: {before:,.0f}, to match {target:,.0f}")
        print(f"use model.{args.vary}={value}: {quantity:,.0f} ({quantity / target - 1:+.4%})")
        return 0
