"""A progress bar of optimizer steps."""

# mypy: disable-error-code="override, attr-defined, assignment"
# Lightning types its hooks for any module, and declares no trainer.datamodule.

import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from stackexp.modules.base import TrainingModule
from stackexp.training.callbacks.metrics_log import MetricsLog


class StepProgress(ProgressBar):
    """Shows steps, time left, loss and tokens/s of the last step, and the set that is being validated."""

    def __init__(self, metrics_log: MetricsLog):
        super().__init__()
        self._metrics_log = metrics_log
        self._is_enabled = True
        self._bar: tqdm | None = None

    def disable(self) -> None:
        """Disable the bar; Lightning calls this on all ranks but the first."""
        self._is_enabled = False

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Open the bar."""
        self._bar = tqdm(
            total=trainer.max_steps,
            initial=trainer.global_step,
            desc="fit",
            unit="step",
            file=sys.stdout,
            disable=not self._is_enabled,
            dynamic_ncols=True,
            smoothing=0.1,
        )

    def on_train_batch_end(self, trainer: pl.Trainer, module: TrainingModule, *_: Any) -> None:
        """Advance the bar after each step."""
        line = self._metrics_log.last_line
        if self._bar is not None and trainer.global_step > self._bar.n and "loss/train" in line:
            speed = line["throughput/tokens_per_second"]
            self._bar.set_postfix_str(f"loss {line['loss/train']:.3f}, {speed:,.0f} tokens/s", refresh=False)
            self._bar.update(trainer.global_step - self._bar.n)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, module: TrainingModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Show the set that is validated."""
        if self._bar is not None and batch_idx == 0:
            self._bar.set_description(f"validating {trainer.datamodule.set_names('validate')[dataloader_idx]}")

    def on_validation_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Show that training continues."""
        if self._bar is not None:
            self._bar.set_description("fit")

    def on_train_end(self, *_: Any) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def on_exception(self, *_: Any) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
