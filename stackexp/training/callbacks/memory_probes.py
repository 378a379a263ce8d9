"""Measurements of the memory, every few steps."""

# mypy: disable-error-code="override, attr-defined, assignment"
# Lightning types its hooks for any module, and declares no trainer.datamodule.

from typing import Any

import lightning.pytorch as pl

from stackexp.modules.base import TrainingModule


class MemoryProbes(pl.Callback):
    """Sets `module.probe` for the micro-batches of the first step and of every `interval`-th step.

    The module then logs memory/push, pop, no_op, entropy, occupancy and read_share for each layer.
    """

    def __init__(self, interval: int):
        self._interval = interval

    def on_train_batch_start(self, trainer: pl.Trainer, module: TrainingModule, *_: Any) -> None:
        """Set `module.probe` for the micro-batches of a probed step."""
        step = trainer.global_step + 1
        module.probe = step == 1 or step % self._interval == 0

    def on_validation_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Turn probes off."""
        module.probe = False
