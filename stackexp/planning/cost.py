"""Predict size, speed, time and memory of a training run, for `plan`, `match` and the dry run of a sweep."""

import bisect
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from stackexp.config.compose import compose, to_yaml
from stackexp.config.data import ShardsConfig
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.fields import get_field
from stackexp.errors import ConfigError, RunError
from stackexp.planning.devices import (
    DEFAULT_DEVICE,
    DEFAULT_MFU,
    DEVICES,
    MIN_PARAMETERS,
    NOT_ESTIMATED,
    can_estimate_speed,
)
from stackexp.planning.memory_use import (
    MemoryUse,
    build_meta_model,
    compute_memory_use,
    compute_optimizer_bytes,
    sum_bytes,
)
from stackexp.tables import RULE, format_table


@dataclass(frozen=True)
class TrainingPlan:
    """The predicted cost of a run at a model FLOPs utilization of `mfu` of the dense bfloat16 peak.

    FLOPs are those of `Transformer.flops_per_token`. Recomputation by activation checkpointing does not count, so a run
    with it reaches a lower `mfu`.
    """

    config: ExperimentConfig
    device: str  # a key of DEVICES
    mfu: float
    parameters: int
    memory_parameters: int  # parameters of the memories, included in `parameters`
    flops_per_token: float

    @property
    def strategy(self) -> str:
        """The strategy, with `auto` resolved."""
        trainer = self.config.trainer
        return {"auto": "ddp" if trainer.world_size > 1 else "single"}.get(trainer.strategy, trainer.strategy)

    @property
    def tokens(self) -> int:
        """Training tokens of the run."""
        return self.config.total_tokens

    @property
    def flops(self) -> float:
        """Training FLOPs of the run."""
        return self.flops_per_token * self.tokens

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput of all devices; None if it is not estimated, because FLOPs do not determine it."""
        if self.parameters < MIN_PARAMETERS or not can_estimate_speed(self.config):
            return None
        return self.mfu * DEVICES[self.device].peak_flops * self.config.trainer.world_size / self.flops_per_token

    @property
    def hours(self) -> float | None:
        """Duration of the run; None if it is not estimated."""
        speed = self.tokens_per_second
        return None if speed is None else self.tokens / speed / 3600

    @property
    def gpu_hours(self) -> float | None:
        """Duration of the run times the number of devices; None if it is not estimated."""
        return None if self.hours is None else self.hours * self.config.trainer.world_size

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint: weights, optimizer state and averaged weights."""
        return sum_bytes(build_meta_model(self.config).parameters()) + compute_optimizer_bytes(self.config, ranks=1)

    @cached_property
    def training(self) -> MemoryUse:
        """Bytes per rank in training. Raises RunError if a memory between layers depends on tensor values."""
        return compute_memory_use(self.config, is_training=True)

    @cached_property
    def validation(self) -> MemoryUse | None:
        """Bytes per rank in validation, None without validation sets. Raises the errors of `training`.

        For formal languages it is that of the test, which has the longest strings.
        """
        data = self.config.data
        if isinstance(data, ShardsConfig) and not data.validation:
            return None
        return compute_memory_use(self.config, is_training=False)

    @property
    def peak(self) -> int:
        """Bytes per rank in training or validation, whichever is larger."""
        return max(self.training.peak, self.validation.peak if self.validation else 0)

    @property
    def usable_bytes(self) -> int:
        """Bytes per rank available to tensors."""
        return DEVICES[self.device].usable_bytes

    @property
    def fits(self) -> bool:
        """Return True if the run fits into the device's memory."""
        return self.peak <= self.usable_bytes


def make_plan(config: ExperimentConfig, device: str = DEFAULT_DEVICE, mfu: float = DEFAULT_MFU) -> TrainingPlan:
    """Return the plan of a config. Its memory is computed at first access, which takes seconds."""
    model = build_meta_model(config)
    return TrainingPlan(
        config=config,
        device=device,
        mfu=mfu,
        parameters=model.num_parameters(),
        memory_parameters=model.num_memory_parameters(),
        flops_per_token=model.flops_per_token(config.data.context_length),
    )


def format_bytes(size: int) -> str:
    """Format a number of bytes: 74.35 GiB, 512.00 MiB."""
    return f"{size / 2**30:,.2f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:,.2f} MiB"


KIND_NAMES = {"optimizer": "optimizer state", "gathered": "gathered and cast weights"}
"""Names in the table of those fields of `MemoryUse` that have another one there."""


def format_plan(plan: TrainingPlan) -> str:
    """Return two tables: the run, and the memory of a rank."""
    phases = {"training": plan.training} | ({"validation": plan.validation} if plan.validation else {})
    kinds = vars(plan.training)
    rows = [(KIND_NAMES.get(k, k), *(format_bytes(getattr(m, k)) for m in phases.values())) for k in kinds]
    peak = (f"peak, of {format_bytes(plan.usable_bytes)} usable", *(format_bytes(m.peak) for m in phases.values()))
    memory = format_table([*rows, RULE, peak], header=["memory per rank, at most", *phases], align="<>>")
    return f"{format_table(_build_run_rows(plan))}\n\n{memory}"


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


def _build_run_rows(plan: TrainingPlan) -> list[tuple[str, str]]:
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
        rows.append(("speed", f"{NOT_ESTIMATED}; run fit to measure"))
    else:
        hours = plan.hours
        duration = f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 3600:,.1f} seconds"
        rows.append(("speed", f"{plan.tokens_per_second:,.0f} tokens/s at an MFU of {plan.mfu:.0%}"))
        rows.append(("time", f"{duration}, {plan.gpu_hours:,.1f} GPU-hours"))
    kept = f"{format_bytes(plan.checkpoint_bytes)}, up to {num_checkpoints} kept: {all_checkpoints}"
    return [*rows, ("checkpoint", kept)]


def _build_flops_row(plan: TrainingPlan) -> tuple[str, str]:
    return "FLOPs", f"{plan.flops_per_token:.3e} per token, {plan.flops:.3e} in total"


# Changes to a run that does not fit into device memory

MAX_NODES = 64
CHANGED = (
    "trainer.activation_checkpointing",
    "data.micro_batch_size",
    "data.eval_batch_size",
    "trainer.strategy",
    "trainer.num_nodes",
)
"""The options to change, in this order."""

Change = tuple[str, TrainingPlan]
"""An override, such as `data.micro_batch_size=2`, and the plan with it."""


def suggest_changes(plan: TrainingPlan) -> str:
    """Return all single changes with which a run fits, with their peak memory, or else general advice."""
    single = []
    for key in CHANGED:
        change = next((change for change in _list_changes(plan, key) if change[1].fits), None)
        single += [f"{change[0]} ({format_bytes(change[1].peak)})"] if change else []
    for name in DEVICES:
        other = replace(plan, device=name)
        if other.usable_bytes > plan.usable_bytes and plan.peak <= other.usable_bytes:
            single.append(f"--device {name} ({format_bytes(other.usable_bytes)} usable)")
    if single:
        return f"any of these would fit: {', '.join(single)}"
    return f"it needs {format_bytes(plan.peak)}; use a smaller model, a shorter data.context_length or larger devices"


def _list_changes(plan: TrainingPlan, key: str) -> Iterator[Change]:
    """Yield the valid changes of an option that need less memory, the smallest first."""
    section, name = key.split(".")
    trainer = plan.config.trainer
    for value in _list_smaller_values(plan, key):
        override, values = f"{key}={str(value).lower()}", {name: value}
        if key == "trainer.strategy" and trainer.world_size == 1:
            override, values = "trainer=fsdp", values | {"devices": 8}  # the same as configs/trainer/fsdp.yaml
        config = replace(plan.config, **{section: replace(getattr(plan.config, section), **values)})
        if not any((*config.find_errors(), *config.trainer.find_errors())):
            yield override, replace(plan, config=config)


def _list_smaller_values(plan: TrainingPlan, key: str) -> list[Any]:
    trainer = plan.config.trainer
    if key == "trainer.activation_checkpointing":
        return [] if trainer.activation_checkpointing else [True]
    if key == "trainer.strategy":
        return [] if trainer.is_sharded else ["fsdp"]
    if key == "trainer.num_nodes":  # only fsdp needs less memory per device with more nodes
        counts = [trainer.num_nodes << i for i in range(1, MAX_NODES.bit_length())]
        return [count for count in counts if count <= MAX_NODES] if trainer.strategy == "fsdp" else []
    phase = plan.training if key == "data.micro_batch_size" else plan.validation
    # generated data have batch_size instead, which no change makes smaller: it would be another experiment
    size = getattr(plan.config.data, key.partition(".")[2], 1)
    return [size >> i for i in range(1, size.bit_length())] if phase and phase.peak > plan.usable_bytes else []


# The size at which two models cost the same

MAX_SIZE = 1 << 20
QUANTITIES: dict[str, Callable[[ExperimentConfig], float]] = {
    "parameters": lambda config: make_plan(config).parameters,
    "flops": lambda config: make_plan(config).flops_per_token,
    "memory": lambda config: make_plan(config).peak,
}


def match_models(names: list[str], overrides: list[str], target: float, by: str, vary: str) -> tuple[int, float]:
    """Return the value of model.`vary` at which the config of these names is closest to `target`, and its quantity.

    The config is composed for each value, because other options may follow from it: `num_slots: ${model.num_layers}`.

    Raises:
        RunError: The model is too large even at the smallest value, or a value breaks a rule of the config.
    """
    config = compose(names, overrides)
    step, largest = 1, get_field(type(config.model), vary)[1].get("max", MAX_SIZE)
    if vary == "hidden_size":  # RoPE requires an even head size
        memory = getattr(config.model, "memory", None)
        step = math.lcm(2 * getattr(config.model, "num_heads", 1), getattr(memory, "num_heads", 1))

    @functools.cache
    def measure(units: int) -> float:
        try:
            return QUANTITIES[by](compose(names, [*overrides, f"model.{vary}={units * step}"]))
        except ConfigError as error:
            raise RunError(f"match: {error}; vary another option") from error

    if measure(1) > target:
        raise RunError(f"match: no model.{vary} makes the model as small as the other one in {by}; vary another option")
    high = 2
    while measure(high) < target:
        high *= 2
        if high * step > largest:
            raise RunError(f"match: model.{vary} would have to exceed {largest}; vary another option")
    reached = bisect.bisect_left(range(high), target, lo=high // 2, key=measure)
    closest = min((max(1, reached - 1), reached), key=lambda units: abs(measure(units) - target))
    return closest * step, measure(closest)
