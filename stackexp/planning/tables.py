"""A plan for the terminal, and as plain numbers."""

from typing import Any

from stackexp.planning.cost import Plan, readable
from stackexp.tables import table

KINDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer's state",
    "gathered": "gathered and cast weights",
    "activations": "activations",
    "stack": "stack",
    "logits": "logits",
}


def as_dict(plan: Plan) -> dict[str, Any]:
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


def report(plan: Plan) -> str:
    """A plan as two tables: the run, and the memory of a rank."""
    memory = _memory(plan)
    aligned = "<" + ">" * (len(memory[0]) - 1)
    return f"{table(_run(plan))}\n\n{table(memory, aligned, rules=(1, 1 + len(KINDS)))}"


def _run(plan: Plan) -> list[tuple[str, str]]:
    config, trainer = plan.config, plan.config.trainer
    count = f"{trainer.num_nodes} x {trainer.devices}" if trainer.num_nodes > 1 else f"{trainer.devices}"
    kept = trainer.keep_checkpoints + 1
    about, up_to = ("about ", "up to ") if config.data.lengths_vary else ("", "")
    tokens = f"{about}{config.data.global_batch_tokens:,} tokens, {plan.tokens:,} in all"
    return [
        ("run", f"{config.name} on {count} {plan.device}, {plan.strategy}, {trainer.precision}"),
        ("parameters", f"{plan.parameters:,}, {plan.memory_parameters:,} of them in the memory"),
        ("steps", f"{trainer.max_steps:,} of {tokens}"),
        (
            "a step",
            f"{config.accumulate_grad_batches} micro-batches of {config.micro_batch_size} x "
            f"{up_to}{config.data.context_length:,} tokens on each device",
        ),
        ("FLOPs", f"{plan.flops_per_token:.3e} per token, {plan.flops:.3e} in all"),
        ("speed", f"{plan.tokens_per_second:,.0f} tokens/s at an MFU of {plan.mfu:.0%}"),
        ("time", f"{_duration(plan.hours)}, {plan.gpu_hours:,.1f} GPU-hours"),
        (
            "checkpoint",
            f"{readable(plan.checkpoint_bytes)}, up to {kept} kept: {readable(kept * plan.checkpoint_bytes)}",
        ),
    ]


def _memory(plan: Plan) -> list[list[str]]:
    phases = {"training": plan.training} | ({"validation": plan.validation} if plan.validation else {})
    rows = [["memory of a rank, at most", *phases]]
    rows += [[name, *(readable(getattr(m, kind)) for m in phases.values())] for kind, name in KINDS.items()]
    return [*rows, [f"peak, of {readable(plan.room)} usable", *(readable(m.peak) for m in phases.values())]]


def _duration(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 3600:,.1f} seconds"
