"""Callbacks that act once per optimizer step: requests, throughput, missed validations."""

import time
from functools import cache
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from stackexp.config.trainer import TrainerConfig
from stackexp.metric_tags import AVERAGE_LOSS, TOKENS_PER_SECOND, TRAIN_LOSS
from stackexp.modules.base import TrainingModule
from stackexp.planning.devices import DEVICES
from stackexp.runs import RunFolder
from stackexp.training.lightning_internals import run_validation, set_max_steps
from stackexp.training.signals import StopRequest


class StepCallback(pl.Callback):
    """A callback whose `on_step_end` is called after each optimizer step, not after each micro-batch."""

    _step = _saved_step = -1  # the current step and that of the newest checkpoint; -1 before `on_train_start`

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Start counting steps. A resumed run already has a checkpoint of its current step."""
        self._step, self._saved_step = trainer.global_step, trainer.global_step or -1

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        self._saved_step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, module: TrainingModule, *_: Any) -> None:
        """Call `on_step_end` if the micro-batch was the last of a step."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self.on_step_end(trainer, module)

    def on_step_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Act after an optimizer step."""
        raise NotImplementedError


class StepRequests(StepCallback):
    """Shares stop and save requests across ranks, in the same all-reduce as the step metrics.

    "stop" is set if the `StopRequest` of any rank is set; "save" is set `checkpoint_interval_minutes` after the last
    checkpoint.
    """

    def __init__(self, stop: StopRequest, checkpoint_interval_minutes: float | None = None):
        self._stop, self._minutes = stop, checkpoint_interval_minutes
        self._saved_at = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, module: TrainingModule, *args: Any) -> None:
        self._stop.note_progress()
        super().on_train_batch_end(trainer, module, *args)

    def on_step_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
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
        if trainer.state.fn != "fit" or self._saved_step == trainer.global_step:
            raise_if_stopped(self._stop, module.device)

    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]


def raise_if_stopped(stop: StopRequest, device: torch.device) -> None:
    """Raise the stop error on all ranks if any rank has a request. Every rank must call this, as it is collective."""
    is_requested = stop.is_set
    if dist.is_initialized():
        num_requests = torch.tensor(float(is_requested), device=device)
        dist.all_reduce(num_requests)
        is_requested = bool(num_requests)
    if is_requested:
        raise stop.build_error()


class Throughput(StepCallback):
    """Logs train/tokens_per_second over all devices, and MFU (FLOP/s if the GPU's peak is unknown).

    Measures the time between the ends of two optimizer steps. It includes loading and saving, but neither validation
    nor benchmarks. FLOPs follow from the model's structure (`flops_per_token`); recomputed activations do not count.
    """

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        super().on_train_start(trainer, module)
        self._since, self._tokens = time.perf_counter(), module.tokens
        self._flops_per_token = cache(module.model.flops_per_token)  # lengths may vary from step to step
        self._peak = get_peak_flops(module.device) * trainer.world_size

    def on_validation_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        self.restart()

    def restart(self) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        now = time.perf_counter()
        tokens_per_second = (module.tokens - self._tokens) / (now - self._since)
        flops = tokens_per_second * self._flops_per_token(module.sequence_length)
        self._since, self._tokens = now, module.tokens
        tag, value = ("train/mfu", flops / self._peak) if self._peak else ("train/flops_per_second", flops)
        module.step_metrics.add(TOKENS_PER_SECOND, tokens_per_second)
        module.step_metrics.add(tag, value)


def get_peak_flops(device: torch.device) -> float:
    """Return the GPU's peak bfloat16 FLOP/s, or 0.0 for CPUs and unknown GPUs."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((known.peak_flops for known in DEVICES.values() if known.card in name), 0.0)


class MissedValidation(pl.Callback):
    """Validates before the next step if the log contains the last step but not the validation due after it.

    A run can also resume after its last step. Then only this validation or the final evaluation is missing.
    """

    def __init__(self, folder: RunFolder, config: TrainerConfig, start_step: int):
        self._folder, self._config, self._start_step = folder, config, start_step
        self._is_due = self._needs_scores = False

    def on_load_checkpoint(self, trainer: pl.Trainer, module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        """Decide if a validation is due at any step, and if callbacks of the user need its scores.

        Lightning validates when a callback ends the run. `MetricsLog` deletes the line of a validation to be repeated.
        """
        state, logged = checkpoint["stackexp"], self._folder.find_logged_tags(checkpoint["global_step"])
        self._is_due = state.get("is_ended", False) or AVERAGE_LOSS in logged
        self._needs_scores = bool(self._config.callbacks) and not state.get("is_validated", False)

    def on_fit_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Make Lightning start a fit that has no steps left."""
        if self._start_step == self._config.max_steps:
            set_max_steps(trainer, self._config.max_steps + 1)

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        if trainer.strategy.broadcast(self.is_missing(trainer.global_step, trainer.datamodule)):
            run_validation(trainer)
        set_max_steps(trainer, self._config.max_steps)

    def is_missing(self, step: int, data: Any) -> bool:
        """Return True if a validation was due after `step`, but the run ended before it was logged.

        The log of a branch does not have the step. It repeats the validation only if callbacks need the scores.
        """
        interval = self._config.val_check_interval
        is_due = self._is_due or (interval and step % interval == 0)
        if not is_due or not data.list_set_names("validate"):
            return False
        logged = self._folder.find_logged_tags(step)
        return (self._needs_scores or TRAIN_LOSS in logged) and AVERAGE_LOSS not in logged
