"""Tokens and floating-point operations per second."""

import time
from typing import Any

import lightning.pytorch as pl
import torch

from stackexp.planning.devices import DEVICES


class Throughput(pl.Callback):
    """throughput/tokens_per_second over all devices, and MFU where the card's peak is known, else FLOP/s.

    Timed between the ends of consecutive optimizer steps: loading and saving included, validation left out. FLOPs come
    from the model's structure (`flops_per_token`); what activation checkpointing computes again is not counted.
    """

    def __init__(self) -> None:
        self._flops_per_token: dict[int, float] = {}  # by the length of the sequences

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._since = time.perf_counter()
        self._step, self._tokens = trainer.global_step, module.tokens
        self._peak = peak_flops(module.device) * trainer.world_size

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step:
            return
        now = time.perf_counter()
        tokens_per_second = (module.tokens - self._tokens) / (now - self._since)
        flops = tokens_per_second * self._flops_of(module)
        self._since, self._step, self._tokens = now, trainer.global_step, module.tokens
        module.step_metrics.add("throughput/tokens_per_second", torch.tensor(tokens_per_second, device=module.device))
        tag, value = ("throughput/mfu", flops / self._peak) if self._peak else ("throughput/flops_per_second", flops)
        module.step_metrics.add(tag, torch.tensor(value, device=module.device))

    def _flops_of(self, module: pl.LightningModule) -> float:
        length = module.sequence_length
        if length not in self._flops_per_token:
            self._flops_per_token[length] = module.model.flops_per_token(length)
        return self._flops_per_token[length]


def peak_flops(device: torch.device) -> float:
    """bfloat16 peak of the card in FLOP/s; 0.0 where it is not known, as on a CPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((device.peak_flops for device in DEVICES.values() if device.card in name), 0.0)
