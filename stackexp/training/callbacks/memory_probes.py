"""Asks the model, every so many steps, what its memory does."""

from typing import Any

import lightning.pytorch as pl


class StackProbes(pl.Callback):
    """Turns `module.probe` on for the micro-batches of every `interval`-th step, the first among them.

    The module then records, for each layer, memory/push, pop, no_op, entropy, occupancy and read_share.
    """

    def __init__(self, interval: int):
        self._interval = interval

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step + 1
        module.probe = step == 1 or step % self._interval == 0

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.probe = False
