"""Predict size, speed, time and memory of a training run."""

from dataclasses import dataclass
from functools import cached_property

from stackexp.config.data import ShardsConfig
from stackexp.config.experiment import ExperimentConfig
from stackexp.planning.devices import DEVICES, Device
from stackexp.planning.memory_use import (
    MemoryUse,
    build_meta_model,
    compute_memory_use,
    compute_optimizer_bytes,
    sum_bytes,
)

MIN_PARAMETERS = 100_000_000
"""The speed of smaller models is not estimated: launches and memory traffic take most of their time."""


@dataclass(frozen=True)
class Plan:
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
        """Throughput of all devices; None for CPUs and small models, whose speed FLOPs do not determine."""
        if self.parameters < MIN_PARAMETERS or self.config.trainer.accelerator == "cpu":
            return None
        return self.mfu * self._device.peak_flops * self.config.trainer.world_size / self.flops_per_token

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
        """Bytes per rank in validation, None without validation sets. Raises the errors of `training`."""
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
        return self._device.usable_bytes

    @property
    def fits(self) -> bool:
        """Return True if the run fits into the device's memory."""
        return self.peak <= self.usable_bytes

    @property
    def _device(self) -> Device:
        return DEVICES[self.device]


def make_plan(config: ExperimentConfig, device: str = "h100", mfu: float = 0.4) -> Plan:
    """Return the plan of a config. Its memory is computed at first access, which takes seconds."""
    model = build_meta_model(config)
    return Plan(
        config=config,
        device=device,
        mfu=mfu,
        parameters=model.num_parameters(),
        memory_parameters=model.num_parameters(memory=True),
        flops_per_token=model.flops_per_token(config.data.context_length),
    )


def format_bytes(size: int) -> str:
    """Format a number of bytes: 74.35 GiB, 512.00 MiB."""
    return f"{size / 2**30:,.2f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:,.2f} MiB"
