"""Format a plan as tables or as a dictionary, and describe the size of a config."""

from typing import Any

from stackexp.config.compose import to_yaml
from stackexp.config.experiment import ExperimentConfig
from stackexp.planning.cost import MIN_PARAMETERS, Plan, format_bytes, make_plan
from stackexp.tables import RULE, format_table

KINDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered": "gathered and cast weights",
    "activations": "activations",
    "stack": "stack",
    "logits": "logits",
}
"""The fields of `MemoryUse` and their names in the table."""


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain numbers: bytes, FLOPs, tokens, hours."""
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
        **{name: getattr(plan, name) for name in (*names, "gpu_hours", "checkpoint_bytes", "peak")},
        "room": plan.usable_bytes,
        "fits": plan.fits,
        "training": vars(plan.training),
        "validation": vars(plan.validation) if plan.validation else None,
    }


def format_plan(plan: Plan) -> str:
    """Return two tables: the run, and the memory of a rank."""
    return f"{format_table(_build_run_rows(plan))}\n\n{_format_memory(plan)}"


def describe_config(config: ExperimentConfig) -> str:
    """Return a resolved config as YAML, followed by its size and cost."""
    plan = make_plan(config)
    memory, about = plan.memory_parameters, "about " if config.data.lengths_vary else ""
    rows = [
        ("parameters", f"{plan.parameters:,} = {plan.parameters - memory:,} backbone + {memory:,} memory"),
        ("tokens", f"{config.total_tokens:,}"),
        ("steps", f"{config.trainer.max_steps:,} of {about}{config.data.global_batch_tokens:,} tokens"),
        _build_flops_row(plan),
    ]
    return f"{to_yaml(config)}\n{format_table(rows)}"


def _build_run_rows(plan: Plan) -> list[tuple[str, str]]:
    config, trainer = plan.config, plan.config.trainer
    count = f"{trainer.num_nodes} x {trainer.devices}" if trainer.num_nodes > 1 else f"{trainer.devices}"
    num_checkpoints = trainer.keep_checkpoints + 1
    all_checkpoints = format_bytes(num_checkpoints * plan.checkpoint_bytes)
    about, up_to = ("about ", "up to ") if config.data.lengths_vary else ("", "")
    num_passes = config.accumulate_grad_batches
    micro_batches = f"{num_passes} micro-batch{'es' * (num_passes != 1)} of {config.micro_batch_size}"
    tokens = f"{about}{config.data.global_batch_tokens:,} tokens, {plan.tokens:,} in total"
    rows = [
        ("run", f"{config.name} on {count} {plan.device}, {plan.strategy}, {trainer.precision}"),
        ("parameters", f"{plan.parameters:,}, including {plan.memory_parameters:,} of the memory"),
        ("steps", f"{trainer.max_steps:,} of {tokens}"),
        ("one step", f"{micro_batches} x {up_to}{config.data.context_length:,} tokens on each device"),
        _build_flops_row(plan),
    ]
    if plan.tokens_per_second is None or plan.hours is None or plan.gpu_hours is None:
        reason = f"not estimated on CPUs or below {MIN_PARAMETERS // 10**6}M parameters; run fit to measure"
        rows.append(("speed", reason))
    else:
        hours = plan.hours
        duration = f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 3600:,.1f} seconds"
        rows.append(("speed", f"{plan.tokens_per_second:,.0f} tokens/s at an MFU of {plan.mfu:.0%}"))
        rows.append(("time", f"{duration}, {plan.gpu_hours:,.1f} GPU-hours"))
    kept = f"{format_bytes(plan.checkpoint_bytes)}, up to {num_checkpoints} kept: {all_checkpoints}"
    return [*rows, ("checkpoint", kept)]


def _build_flops_row(plan: Plan) -> tuple[str, str]:
    return "FLOPs", f"{plan.flops_per_token:.3e} per token, {plan.flops:.3e} in total"


def _format_memory(plan: Plan) -> str:
    phases = {"training": plan.training} | ({"validation": plan.validation} if plan.validation else {})
    rows = [(name, *(format_bytes(getattr(m, kind)) for m in phases.values())) for kind, name in KINDS.items()]
    peak = (f"peak, of {format_bytes(plan.usable_bytes)} usable", *(format_bytes(m.peak) for m in phases.values()))
    return format_table([*rows, RULE, peak], header=["memory per rank, at most", *phases], align="<>>")
