"""Requests to stop or to save a checkpoint, shared so that all ranks act on them after the same step."""

import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from stackexp.modules.base import TrainingModule
from stackexp.training.callbacks.step import StepCallback
from stackexp.training.signals import StopRequest

MAX_BATCHES_PER_CHECK = 16  # each check for a stop is an all-reduce, so evaluations do not check after every batch
CHECK_SECONDS = 5.0  # target between two checks


class StepRequests(StepCallback):
    """Shares stop and save requests across ranks, in the same all-reduce as the step metrics.

    "stop" is set if the `StopRequest` of any rank is set; "save" is set `checkpoint_interval_minutes` after the last
    checkpoint.
    """

    def __init__(self, stop: StopRequest, checkpoint_interval_minutes: float | None = None):
        self._stop, self._minutes = stop, checkpoint_interval_minutes
        self._saved_at = time.monotonic()
        self._batches_per_check, self._batches_since_check, self._checked_at = 1, 0, time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, module: TrainingModule, *args: Any) -> None:
        """Record that a batch has ended."""
        self._stop.note_progress()
        super().on_train_batch_end(trainer, module, *args)

    def on_step_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Add the requests to the metrics of a step."""
        is_due = self._minutes is not None and time.monotonic() - self._saved_at > 60 * self._minutes
        module.step_metrics.request("stop", self._stop.is_set)
        module.step_metrics.request("save", is_due)

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        """Restart the timer of `checkpoint_interval_minutes`."""
        super().on_save_checkpoint(trainer)
        self._saved_at = time.monotonic()

    def on_validation_batch_end(self, *args: Any) -> None:
        """Stop within a validation, which can take long. The resumed run first repeats that validation.

        During training this requires a checkpoint of the same step. Without one, the run stops after the next step.
        """
        self._stop.note_progress()
        trainer, module = args[:2]
        if trainer.state.fn == "fit" and self._saved_step != trainer.global_step:
            return
        self._batches_since_check += 1
        if not dist.is_initialized() or self._batches_since_check >= self._batches_per_check:
            elapsed = time.monotonic() - self._checked_at
            seconds = raise_if_stopped(self._stop, module.device, elapsed)  # the same value on all ranks
            batches = int(self._batches_since_check * CHECK_SECONDS / max(seconds, 1e-9))
            self._batches_per_check = min(MAX_BATCHES_PER_CHECK, max(1, batches))
            self._batches_since_check, self._checked_at = 0, time.monotonic()

    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]


def raise_if_stopped(stop: StopRequest, device: torch.device, seconds: float = 0.0) -> float:
    """Raise the stop error on all ranks if any rank has a request; otherwise return `seconds`, averaged over ranks.

    This is a collective operation: every rank must call it.
    """
    requests, total, size = float(stop.is_set), seconds, 1
    if dist.is_initialized():
        shared, size = torch.tensor([requests, total], device=device), dist.get_world_size()
        dist.all_reduce(shared)
        requests, total = shared.tolist()
    if requests:
        raise stop.build_error()
    return total / size
