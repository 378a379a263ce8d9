"""When to save, and when to save and stop."""

import logging
import signal
import time
from multiprocessing import resource_tracker
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from stackexp.config.trainer import TrainerConfig
from stackexp.errors import Stopped, first_line
from stackexp.models.checkpoints import CheckpointWriter
from stackexp.runs import AVERAGE_LOSS, RunFolder, checkpoint_name, remove

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
log = logging.getLogger(__name__)


class StopRequest:
    """SIGTERM, SIGUSR1 (Slurm's warning) or the end of `max_time`, counted from now."""

    def __init__(self, max_time: str | None):
        self._reason: str | None = None
        self._max_time = max_time
        self._deadline = time.monotonic() + seconds(max_time) if max_time else None
        for number in SIGNALS:
            signal.signal(number, self._note)
        _start_resource_tracker()

    def _note(self, number: int, _: Any) -> None:
        self._reason = signal.Signals(number).name

    @property
    def reason(self) -> str | None:
        """Why this process should stop, if it should."""
        if self._reason is None and self._deadline is not None and time.monotonic() > self._deadline:
            self._reason = f"trainer.max_time {self._max_time} is over"
        return self._reason


def _start_resource_tracker() -> None:
    """Python starts it when it shares memory. Slurm may signal every process of a task, and SIGUSR1 would end it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def seconds(max_time: str) -> int:
    """DD:HH:MM:SS -> seconds."""
    days, hours, minutes, rest = map(int, max_time.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


class Wishes(pl.Callback):
    """At the end of a step, what each process wishes, for all of them to hear of in one reduction with the metrics."""

    def __init__(self, stop: StopRequest, checkpoint_minutes: float | None):
        self._stop, self._minutes = stop, checkpoint_minutes
        self._saved_at = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        overdue = self._minutes is not None and time.monotonic() - self._saved_at > 60 * self._minutes
        module.step_metrics.request("stop", self._stop.reason is not None)
        module.step_metrics.request("save", overdue)

    def on_save_checkpoint(self, *_: Any) -> None:
        self._saved_at = time.monotonic()

    def on_validation_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        """An evaluation can be long: stop within it. Resumed, the run makes it up first."""
        batch_idx = args[2]
        if batch_idx % 16 == 0:
            wish = torch.tensor(float(self._stop.reason is not None), device=module.device)
            if dist.is_initialized():
                dist.all_reduce(wish)
            if wish:
                raise Stopped(self._stop.reason or "another process was told to stop")

    on_test_batch_end = on_validation_batch_end


def misses_a_validation(folder: RunFolder, step: int, config: TrainerConfig, data: pl.LightningDataModule) -> bool:
    """Whether the run was stopped or killed after this step, but before its validation had been recorded."""
    if not config.val_check_interval or step % config.val_check_interval or not data.set_names("validate"):
        return False
    recorded = [line for line in folder.read_metrics() if line["step"] == step]
    return any("loss/train" in line for line in recorded) and not any(AVERAGE_LOSS in line for line in recorded)


class StepCheckpoint(pl.callbacks.Checkpoint):
    """<step>/ every `checkpoint_interval` steps, after `checkpoint_minutes`, after the last step, and before stopping.

    The newest `keep_checkpoints` stay, and the best: the one of the lowest mean validation loss. Only ever between two
    optimizer steps, never inside an accumulation. Where a validation is due at the same step it comes after; a run
    resumed from there makes it up first. All processes decide alike: saving is collective.
    """

    def __init__(self, folder: RunFolder, config: TrainerConfig, stop: StopRequest):
        self._folder, self._config, self._stop = folder, config, stop
        self._writer = CheckpointWriter()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        if trainer.strategy.broadcast(misses_a_validation(self._folder, self._step, self._config, trainer.datamodule)):
            val_loop = trainer.fit_loop.epoch_loop.val_loop
            val_loop.restarting = False  # or the batches of the validation before, told by the checkpoint, are left out
            trainer.validating = True  # as Lightning itself does between two steps
            val_loop.run()
            trainer.training = True
        trainer.fit_loop.epoch_loop.max_steps = self._config.max_steps

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step:
            return  # a micro-batch that did not end a step
        self._step, wishes = trainer.global_step, module.step_metrics.requests
        last = self._step == self._config.max_steps
        if self._step % self._config.checkpoint_interval == 0 or last or wishes:
            path = self._folder.checkpoints / checkpoint_name(self._step)
            trainer.save_checkpoint(path, storage_options={"writer": self._writer, "then": self._forget_old})
        if "stop" in wishes and not last:
            self._writer.wait()
            raise Stopped(self._stop.reason or "another process was told to stop")

    def _forget_old(self) -> None:
        best = self._folder.best_checkpoint()
        for old in self._folder.saved()[: -self._config.keep_checkpoints]:
            if old != best:
                remove(old)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._writer.wait()
        if trainer.is_global_zero:
            self._forget_old()  # once more, after the last validation

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        """What was begun before the failure is still worth having, if it can be finished."""
        # Stopped: in all processes, at the same place. Otherwise one that is needed for it may be gone.
        if isinstance(exception, Stopped) or not dist.is_initialized():
            try:
                self._writer.wait()
            except Exception as error:
                log.warning("the checkpoint under way could not be finished: %s", first_line(error))
