"""`stackexp plan`: memory, time and cost of a training run, before it is paid for."""

import json
from typing import TYPE_CHECKING, Any

from stackexp.config.devices import DEVICES, HEADROOM
from stackexp.config.names import nearest
from stackexp.errors import RunError
from stackexp.verbs.parser import Parser

if TYPE_CHECKING:
    from stackexp.models.cost import Plan

EXAMPLES = [
    "plan --config pretrain/stacktrans-7b trainer=fsdp trainer.num_nodes=8",
    "plan --config pretrain/stacktrans-360m --device a100 --mfu 0.35 --json",
]
ABOUT = f"""\
Memory is of one rank, counted on tensors without numbers; what CUDA, NCCL and cuBLAS take for themselves and what the
allocator cannot use is not in it: {HEADROOM:.0%} of the device is kept free for that. Exits with 1 if it does not fit.
"""
KINDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer's state",
    "gathered": "gathered and cast weights",
    "activations": "activations",
    "stack": "stack",
    "logits": "logits",
}


def main(argv: list[str]) -> int:
    """Print the plan of a config. Raises ConfigError for the command line, RunError if it does not fit."""
    parser = Parser(
        "plan", "What a training run will take.", EXAMPLES, "--config NAME_OR_PATH [OPTIONS] [KEY=VALUE ...]", ABOUT
    )
    parser.add_argument("--config", action="append", metavar="NAME_OR_PATH")
    parser.add_argument("--device", default="h100", metavar="NAME", help=f"{', '.join(DEVICES)}; default: %(default)s")
    parser.add_argument("--mfu", type=float, default=0.4, help="model FLOPs utilisation (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    options, overrides = parser.split(argv)
    if not options.config:
        parser.error("--config NAME_OR_PATH is missing; `configs list` shows the names")
    if options.device not in DEVICES:
        known = ", ".join(DEVICES)
        parser.error(f"--device: expected one of {known}, found {options.device!r}{nearest(options.device, DEVICES)}")
    if not 0 < options.mfu <= 1:
        parser.error(f"--mfu: expected a number above 0, up to 1, found {options.mfu}")
    from stackexp.config.compose import compose

    config = compose(options.config, overrides)
    from stackexp.models.cost import GIB, plan
    from stackexp.models.remedies import remedies

    planned = plan(config, options.device, options.mfu)
    print(json.dumps(as_dict(planned), indent=2) if options.json else report(planned), flush=True)
    if not planned.fits:
        excess = (planned.peak - planned.room) / GIB
        raise RunError(
            f"plan: {planned.peak / GIB:.1f} GiB on each {options.device} are {excess:.1f} GiB more than fit into its "
            f"{planned.room / GIB:.1f} GiB; {remedies(planned)}"
        )
    return 0


def as_dict(plan: "Plan") -> dict[str, Any]:
    """A plan as plain numbers: bytes, FLOPs, tokens, hours."""
    trainer = plan.config.trainer
    names = ("parameters", "memory_parameters", "flops_per_token", "flops", "tokens", "tokens_per_second", "hours")
    return {
        "name": plan.config.name,
        "device": plan.device,
        "devices": trainer.devices,
        "num_nodes": trainer.num_nodes,
        "strategy": plan.strategy,
        "precision": trainer.precision,
        "mfu": plan.mfu,
        **{name: getattr(plan, name) for name in (*names, "gpu_hours", "checkpoint_bytes", "peak", "room", "fits")},
        "training": vars(plan.training),
        "validation": vars(plan.validation) if plan.validation else None,
    }


def report(plan: "Plan") -> str:
    """A plan as two tables: the run, and the memory of a rank."""
    from stackexp.reports.tables import table

    memory = _memory(plan)
    aligned = "<" + ">" * (len(memory[0]) - 1)
    return f"{table(_run(plan))}\n\n{table(memory, aligned, rules=(1, 1 + len(KINDS)))}"


def _run(plan: "Plan") -> list[tuple[str, str]]:
    config, trainer = plan.config, plan.config.trainer
    count = f"{trainer.num_nodes} x {trainer.devices}" if trainer.num_nodes > 1 else f"{trainer.devices}"
    kept = trainer.keep_checkpoints + 1
    return [
        ("run", f"{config.name} on {count} {plan.device}, {plan.strategy}, {trainer.precision}"),
        ("parameters", f"{plan.parameters:,}, {plan.memory_parameters:,} of them in the memory"),
        ("steps", f"{trainer.max_steps:,} of {config.data.global_batch_tokens:,} tokens, {plan.tokens:,} in all"),
        (
            "a step",
            f"{config.accumulate_grad_batches} micro-batches of {config.data.micro_batch_size} x "
            f"{config.data.context_length:,} tokens on each device",
        ),
        ("FLOPs", f"{plan.flops_per_token:.3e} per token, {plan.flops:.3e} in all"),
        ("speed", f"{plan.tokens_per_second:,.0f} tokens/s at an MFU of {plan.mfu:.0%}"),
        ("time", f"{_duration(plan.hours)}, {plan.gpu_hours:,.1f} GPU-hours"),
        ("checkpoint", f"{_size(plan.checkpoint_bytes)}, up to {kept} kept: {_size(kept * plan.checkpoint_bytes)}"),
    ]


def _memory(plan: "Plan") -> list[list[str]]:
    phases = {"training": plan.training} | ({"validation": plan.validation} if plan.validation else {})
    rows = [["memory of a rank, at most", *phases]]
    rows += [[name, *(_size(getattr(m, kind)) for m in phases.values())] for kind, name in KINDS.items()]
    return [*rows, [f"peak, of {_size(plan.room)} usable", *(_size(m.peak) for m in phases.values())]]


def _size(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.2f} MiB"


def _duration(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 3600:,.1f} seconds"
