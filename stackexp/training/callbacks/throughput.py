"""Tokens and floating-point operations per second."""

# mypy: disable-error-code="override, attr-defined, assignment"
# Lightning types its hooks for any module, and declares no trainer.datamodule.

import time
from typing import Any

import lightning.pytorch as pl
import torch

from stackexp.metric_tags import TOKENS_PER_SECOND
from stackexp.modules.base import TrainingModule
from stackexp.planning.devices import DEVICES


class Throughput(pl.Callback):
    """Logs train/tokens_per_second over all devices, and MFU, or FLOP/s if the card's peak is unknown.

    Times the interval between the ends of two optimizer steps. It includes loading and saving, but no validation. FLOPs
    come from the model's structure (`flops_per_token`), without what activation checkpointing computes again.
    """

    def __init__(self) -> None:
        self._flops_per_token: dict[int, float] = {}  # by sequence length

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Start the clock."""
        self._since = time.perf_counter()
        self._step, self._tokens = trainer.global_step, module.tokens
        self._peak = peak_flops(module.device) * trainer.world_size

    def on_validation_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Restart the clock."""
        self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, module: TrainingModule, *_: Any) -> None:
        """Log the throughput of a step."""
        if trainer.global_step == self._step:
            return  # a micro-batch inside an accumulation
        now = time.perf_counter()
        tokens_per_second = (module.tokens - self._tokens) / (now - self._since)
        flops = tokens_per_second * self._count_flops_per_token(module)
        self._since, self._step, self._tokens = now, trainer.global_step, module.tokens
        module.step_metrics.add(TOKENS_PER_SECOND, torch.tensor(tokens_per_second, device=module.device))
        tag, value = ("train/mfu", flops / self._peak) if self._peak else ("train/flops_per_second", flops)
        module.step_metrics.add(tag, torch.tensor(value, device=module.device))

    def _count_flops_per_token(self, module: TrainingModule) -> float:
        length = module.sequence_length
        if length not in self._flops_per_token:
            self._flops_per_token[length] = module.model.flops_per_token(length)
        return self._flops_per_token[length]


def peak_flops(device: torch.device) -> float:
    """Return the card's bfloat16 peak in FLOP/s, or 0.0 for a CPU and unknown cards."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((device.peak_flops for device in DEVICES.values() if device.card in name), 0.0)
