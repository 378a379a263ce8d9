"""Options of the learning rate schedule."""

from dataclasses import dataclass
from typing import Literal, Optional

from stackexp.config.fields import Problems, at_least, within
from stackexp.config.registry import register
from stackexp.config.trainer import TrainerConfig


@dataclass
class ScheduleConfig:
    """A linear warm-up from 0 over `warmup_steps`, then what the kind says, down to `final_fraction` of the peak."""

    kind: str = "cosine"
    warmup_steps: int = at_least(0, 200)
    final_fraction: float = within(0, 1, 0.1)

    def problems(self, trainer: TrainerConfig) -> Problems:
        if self.warmup_steps >= trainer.max_steps:
            yield "warmup_steps", f"must be smaller than trainer.max_steps {trainer.max_steps}"


@register("schedule", "cosine", builds="stackexp.modules.schedules:build_cosine")
@dataclass
class CosineConfig(ScheduleConfig):
    kind: str = "cosine"


@register("schedule", "linear", builds="stackexp.modules.schedules:build_linear")
@dataclass
class LinearConfig(ScheduleConfig):
    kind: str = "linear"


@register("schedule", "wsd", builds="stackexp.modules.schedules:build_warmup_stable_decay")
@dataclass
class WarmupStableDecayConfig(ScheduleConfig):
    """Warm-up, constant, then a decay over the last `decay_steps`: linear or 1 - sqrt."""

    kind: str = "wsd"
    final_fraction: float = within(0, 1, 0.0)
    decay_steps: Optional[int] = at_least(1, None)  # None: decay_fraction of trainer.max_steps
    decay_fraction: float = within(0, 1, 0.2)
    decay: Literal["linear", "one_minus_sqrt"] = "one_minus_sqrt"

    def problems(self, trainer: TrainerConfig) -> Problems:
        yield from super().problems(trainer)
        if self.warmup_steps + self.decay_steps_of(trainer.max_steps) > trainer.max_steps:
            yield "decay_steps", f"warmup_steps + decay_steps exceed trainer.max_steps {trainer.max_steps}"

    def decay_steps_of(self, max_steps: int) -> int:
        """How many of `max_steps` the decay takes."""
        return self.decay_steps or max(1, round(self.decay_fraction * max_steps))
