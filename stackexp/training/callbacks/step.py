"""The base class of callbacks that act once per optimizer step."""

from typing import Any

import lightning.pytorch as pl

from stackexp.modules.base import TrainingModule


class StepCallback(pl.Callback):
    """A callback whose `on_step_end` is called after each optimizer step, not after each micro-batch."""

    _saved_step = -1  # the step of the newest checkpoint

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Start counting steps. A resumed run already has a checkpoint of its current step."""
        self._step, self._saved_step = trainer.global_step, trainer.global_step or -1

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        """Record the step of the checkpoint."""
        self._saved_step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, module: TrainingModule, *_: Any) -> None:
        """Call `on_step_end` if the micro-batch was the last of a step."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self.on_step_end(trainer, module)

    def on_step_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Act after an optimizer step."""
        raise NotImplementedError
