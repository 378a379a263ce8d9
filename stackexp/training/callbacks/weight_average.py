"""Update the moving average of the weights after each optimizer step."""

import lightning.pytorch as pl

from stackexp.modules.base import TrainingModule
from stackexp.training.callbacks.step import StepCallback


class AverageWeights(StepCallback):
    """Updates `module.weight_average`, which the checkpoint of the same step then includes."""

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Start the average at the initial weights; a resumed run has loaded it already."""
        super().on_train_start(trainer, module)
        self._average = module.weight_average

    def on_step_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Include the weights of the step."""
        self._average.update(trainer.global_step)
