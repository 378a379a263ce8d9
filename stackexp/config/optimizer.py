"""Options of the optimizer and of the learning rate schedule."""

from dataclasses import dataclass
from typing import Literal, Optional

from stackexp.config.fields import Errors, option
from stackexp.config.registry import register
from stackexp.config.trainer import TrainerConfig


@register("optimizer", "adamw", builds="stackexp.modules.optimizers:build_adamw")
@dataclass
class AdamWConfig:
    """AdamW. Norms, biases, embeddings and scalars have no weight decay."""

    kind: str = "adamw"
    lr: float = option(4e-4, above=0)
    """Peak learning rate."""
    memory_lr: Optional[float] = option(None, above=0)
    """Peak learning rate of the memory parameters; null takes lr."""
    beta1: float = option(0.9, min=0, below=1)
    """Decay of the first moment."""
    beta2: float = option(0.95, min=0, below=1)
    """Decay of the second moment."""
    eps: float = option(1e-5, above=0)
    """Epsilon of the denominator."""
    weight_decay: float = option(0.1, min=0)
    """Decoupled weight decay of all matrices."""


@register("optimizer", "muon", builds="stackexp.modules.optimizers:build_muon")
@dataclass
class MuonConfig(AdamWConfig):
    """Muon for the matrices between embedding and output projection (Jordan et al. 2024), AdamW for everything else.

    The updates of Muon are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so lr serves both. Not
    for sharded models: orthogonalization needs whole matrices.
    """

    kind: str = "muon"
    momentum: float = option(0.95, min=0, below=1)
    """Momentum of Muon."""


@dataclass
class ScheduleConfig:
    """Options of all schedules: linear warmup from 0, then a decay to `final_fraction` of the peak learning rate."""

    kind: str = "cosine"
    warmup_steps: int = option(200, min=0)
    """Steps of the linear warmup."""
    final_fraction: float = option(0.1, min=0, max=1)
    """Learning rate at the last step, relative to the peak."""

    def find_errors(self, trainer: TrainerConfig) -> Errors:
        """Yield the errors that involve several options of the schedule or the trainer."""
        if self.warmup_steps >= trainer.max_steps:
            yield "warmup_steps", f"{self.warmup_steps} must be smaller than trainer.max_steps {trainer.max_steps}"


@register("schedule", "cosine", builds="stackexp.modules.optimizers:build_cosine")
@dataclass
class CosineConfig(ScheduleConfig):
    """A cosine decay until the last step."""

    kind: str = "cosine"


@register("schedule", "linear", builds="stackexp.modules.optimizers:build_linear")
@dataclass
class LinearConfig(ScheduleConfig):
    """A linear decay until the last step."""

    kind: str = "linear"


@register("schedule", "wsd", builds="stackexp.modules.optimizers:build_warmup_stable_decay")
@dataclass
class WarmupStableDecayConfig(ScheduleConfig):
    """A constant learning rate, then a decay over the last `decay_steps`: linear, or 1 - sqrt."""

    kind: str = "wsd"
    final_fraction: float = option(0.0, min=0, max=1)
    """Learning rate at the last step, relative to the peak."""
    decay_steps: Optional[int] = option(None, min=1)
    """Steps of the final decay; null takes decay_fraction of trainer.max_steps."""
    decay_fraction: float = option(0.2, min=0, max=1)
    """Length of the final decay as a share of trainer.max_steps; 0: no decay."""
    decay: Literal["linear", "one_minus_sqrt"] = "one_minus_sqrt"
    """Shape of the final decay."""

    def find_errors(self, trainer: TrainerConfig) -> Errors:
        """Yield the errors that involve several options of the schedule or the trainer."""
        yield from super().find_errors(trainer)
        if self.warmup_steps + self.count_decay_steps(trainer.max_steps) > trainer.max_steps:
            name = "decay_fraction" if self.decay_steps is None else "decay_steps"
            yield name, f"warmup_steps and the decay exceed trainer.max_steps {trainer.max_steps}"

    def count_decay_steps(self, max_steps: int) -> int:
        """Return the number of decay steps in a run of `max_steps`, 0 only for `decay_fraction: 0`."""
        shortest = 1 if self.decay_fraction else 0
        return self.decay_steps or max(shortest, round(self.decay_fraction * max_steps))
