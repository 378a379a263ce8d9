"""Measurements of the memory, every few steps."""

from typing import Any

import lightning.pytorch as pl


class MemoryProbes(pl.Callback):
    """Sets `module.probe` for the micro-batches of the first step and of every `interval`-th step.

    The module then logs memory/push, pop, no_op, entropy, occupancy and read_share for each layer.
    """

    def __init__(self, interval: int):
        self._interval = interval

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step + 1
        module.probe = step == 1 or step % self._interval == 0

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.probe = False
