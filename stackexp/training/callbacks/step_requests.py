"""Requests to stop, or to save a checkpoint, that all ranks obey after the same step."""

# mypy: disable-error-code="override, attr-defined, assignment"
# Lightning types its hooks for any module, and declares no trainer.datamodule.

import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from stackexp.modules.base import TrainingModule
from stackexp.training.signals import StopRequest

BATCHES_BETWEEN_CHECKS = 16  # of an evaluation: each check is an all-reduce


class StepRequests(pl.Callback):
    """Shares stop and save requests across ranks, in the same all-reduce as the step metrics.

    "stop" follows the `StopRequest` of any rank, "save" is due `checkpoint_interval_minutes` after the last checkpoint.
    """

    def __init__(self, stop: StopRequest, checkpoint_interval_minutes: float | None):
        self._stop, self._minutes = stop, checkpoint_interval_minutes
        self._saved_at = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Start to count steps."""
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, module: TrainingModule, *_: Any) -> None:
        """Add the requests to the metrics of a step."""
        self._stop.note_progress()
        if trainer.global_step == self._step:
            return  # a micro-batch inside an accumulation
        self._step = trainer.global_step
        is_due = self._minutes is not None and time.monotonic() - self._saved_at > 60 * self._minutes
        module.step_metrics.request("stop", self._stop.is_set)
        module.step_metrics.request("save", is_due)

    def on_save_checkpoint(self, *_: Any) -> None:
        """Restart the clock of `checkpoint_interval_minutes`."""
        self._saved_at = time.monotonic()

    def on_validation_batch_end(self, trainer: pl.Trainer, module: TrainingModule, *args: Any) -> None:
        """Stop inside an evaluation, which can be long. The resumed run repeats it first."""
        self._stop.note_progress()
        batch_idx = args[2]
        if batch_idx % BATCHES_BETWEEN_CHECKS == 0:
            requested = torch.tensor(float(self._stop.is_set), device=module.device)
            if dist.is_initialized():
                dist.all_reduce(requested)
            if requested:
                raise self._stop.build_error()

    on_test_batch_end = on_validation_batch_end
