"""Run the validation that was skipped because of a stop or kill, when the run resumes."""

from typing import Any

import lightning.pytorch as pl

from stackexp.config.trainer import TrainerConfig
from stackexp.metric_tags import AVERAGE_LOSS, TRAIN_LOSS
from stackexp.modules.base import TrainingModule
from stackexp.runs import RunFolder


class MissedValidation(pl.Callback):
    """Validates before the next step if the log contains the last step but not the validation due after it.

    A run can also resume after its last step. Then only this validation or the final evaluation is missing.
    """

    def __init__(self, folder: RunFolder, config: TrainerConfig, start_step: int):
        self._folder, self._config, self._start_step = folder, config, start_step

    def on_fit_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Make Lightning start a fit that has no steps left."""
        if self._start_step == self._config.max_steps:
            trainer.fit_loop.epoch_loop.max_steps += 1  # Lightning skips a fit without steps, hooks included

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Run the missed validation."""
        if trainer.strategy.broadcast(self.is_missing(trainer.global_step, trainer.datamodule)):
            val_loop = trainer.fit_loop.epoch_loop.val_loop
            val_loop.restarting = False  # otherwise Lightning skips the batches of the previous validation
            trainer.validating = True  # as Lightning itself does between two steps
            val_loop.run()
            trainer.training = True
        trainer.fit_loop.epoch_loop.max_steps = self._config.max_steps

    def is_missing(self, step: int, data: Any) -> bool:
        """Return True if a validation was due after `step`, but the run ended before it was logged."""
        interval = self._config.val_check_interval
        if not interval or step % interval or not data.list_set_names("validate"):
            return False
        logged = self._folder.find_logged_tags(step)
        return TRAIN_LOSS in logged and AVERAGE_LOSS not in logged
