"""Tokens and floating-point operations per second."""

import time
from functools import cache

import lightning.pytorch as pl
import torch

from stackexp.metric_tags import TOKENS_PER_SECOND
from stackexp.modules.base import TrainingModule
from stackexp.planning.cost import DEVICES
from stackexp.training.callbacks.step import StepCallback


class Throughput(StepCallback):
    """Logs train/tokens_per_second over all devices, and MFU (FLOP/s if the GPU's peak is unknown).

    Measures the time between the ends of two optimizer steps. It includes loading and saving, but neither validation
    nor benchmarks. FLOPs follow from the model's structure (`flops_per_token`); recomputed activations do not count.
    """

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Start the timer."""
        super().on_train_start(trainer, module)
        self._since, self._tokens = time.perf_counter(), module.tokens
        self._flops_per_token = cache(module.model.flops_per_token)  # lengths may vary from step to step
        self._peak = get_peak_flops(module.device) * trainer.world_size

    def on_validation_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Exclude the validation."""
        self.restart()

    def restart(self) -> None:
        """Restart the timer."""
        self._since = time.perf_counter()

    def on_step_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Log the throughput of a step."""
        now = time.perf_counter()
        tokens_per_second = (module.tokens - self._tokens) / (now - self._since)
        flops = tokens_per_second * self._flops_per_token(module.sequence_length)
        self._since, self._tokens = now, module.tokens
        tag, value = ("train/mfu", flops / self._peak) if self._peak else ("train/flops_per_second", flops)
        for name, number in ((TOKENS_PER_SECOND, tokens_per_second), (tag, value)):
            module.step_metrics.add(name, number)


def get_peak_flops(device: torch.device) -> float:
    """Return the GPU's peak bfloat16 FLOP/s, or 0.0 for CPUs and unknown GPUs."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((device.peak_flops for device in DEVICES.values() if device.card in name), 0.0)
