"""Learning rate schedules: functions from the optimizer step, 1 to `max_steps`, to a factor of the peak rate."""

import math
from collections.abc import Callable

from stackexp.config.optimizer import CosineConfig, LinearConfig, ScheduleConfig, WarmupStableDecayConfig

Schedule = Callable[[int], float]


def build_cosine(config: CosineConfig, max_steps: int) -> Schedule:
    """Build warmup, then a half cosine to `final_fraction` at `max_steps`."""
    decay_steps = max_steps - config.warmup_steps
    return _build(config, max_steps, decay_steps, lambda progress: 0.5 * (1 + math.cos(math.pi * progress)))


def build_linear(config: LinearConfig, max_steps: int) -> Schedule:
    """Build warmup, then a linear decay to `final_fraction` at `max_steps`."""
    return _build(config, max_steps, max_steps - config.warmup_steps, lambda progress: 1 - progress)


def build_warmup_stable_decay(config: WarmupStableDecayConfig, max_steps: int) -> Schedule:
    """Build warmup, a constant rate, and a decay over the last steps (SmolLM's recipes)."""
    shapes = {"linear": lambda progress: 1 - progress, "one_minus_sqrt": lambda progress: 1 - math.sqrt(progress)}
    return _build(config, max_steps, config.count_decay_steps(max_steps), shapes[config.decay])


def _build(config: ScheduleConfig, max_steps: int, decay_steps: int, shape: Callable[[float], float]) -> Schedule:
    """Build linear warmup from 0 to 1, then a constant 1, then a decay over the last `decay_steps`.

    The decay is final_fraction + (1 - final_fraction) * shape, with `shape` a function of the progress from 0 to 1.
    """

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return step / config.warmup_steps
        if step <= max_steps - decay_steps:
            return 1.0
        progress = min(1.0, (step - (max_steps - decay_steps)) / decay_steps)
        return config.final_fraction + (1 - config.final_fraction) * shape(progress)

    return factor
