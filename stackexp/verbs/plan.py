"""The verb `plan`."""

import json
from argparse import Namespace

from stackexp.errors import RunError
from stackexp.planning.devices import DEVICES
from stackexp.verbs.parser import Parser, Verb


class Plan(Verb):
    """Predict memory, time and cost of a training run.

    Memory is per rank, measured on tensors without values. It excludes CUDA, NCCL, cuBLAS and fragmentation, for which
    6% of the device is reserved. Exits with 1 if the run does not fit.
    """

    usage = "--config NAME_OR_PATH [OPTIONS] [KEY=VALUE ...]"
    examples = (
        "plan --config pretrain/stacktrans-7b trainer=fsdp trainer.num_nodes=8",
        "plan --config pretrain/stacktrans-360m --device a100 --mfu 0.35 --json",
    )

    def add_arguments(self, parser: Parser) -> None:
        parser.add_config()
        parser.add_argument("--device", default="h100", choices=DEVICES, help="type of GPU (default: %(default)s)")
        parser.add_argument("--mfu", type=float, default=0.4, help="model FLOPs utilization (default: %(default)s)")
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, args: Namespace) -> int:
        """Print the plan of a config. Raises ConfigError for mistakes, RunError if the run does not fit."""
        if not args.config:
            args.parser.error("--config NAME_OR_PATH is required; `configs list` shows the names")
        if not 0 < args.mfu <= 1:
            args.parser.error(f"--mfu: expected a number above 0, up to 1, found {args.mfu}")
        from stackexp.config.compose import compose

        config = compose(args.config, args.overrides)
        from stackexp.planning.cost import format_bytes, format_plan, make_plan, to_dict
        from stackexp.planning.suggestions import suggest_changes

        plan = make_plan(config, args.device, args.mfu)
        print(json.dumps(to_dict(plan), indent=2) if args.json else format_plan(plan), flush=True)
        if not plan.fits:
            excess = format_bytes(plan.peak - plan.usable_bytes)
            raise RunError(
                f"plan: {format_bytes(plan.peak)} per {args.device} exceeds the usable "
                f"{format_bytes(plan.usable_bytes)} by {excess}; {suggest_changes(plan)}"
            )
        return 0
