"""Writes the run folder while the run goes on: metrics.jsonl, and TensorBoard's copy of it."""

import contextlib
import json
import os
import time
from typing import Any

import lightning.pytorch as pl

from stackexp.modules.metrics import finite
from stackexp.runs import RunFolder
from stackexp.training.callbacks.tensorboard import TensorBoardCopy


class RunRecord(pl.Callback):
    """One line per optimizer step, from what module and callbacks put into `module.step_metrics`; one per validation.

    A line is in the file before the step's checkpoint is written, so no checkpoint is ahead of its record.
    """

    def __init__(self, run: RunFolder, tensorboard: bool, objective: str):
        self._run, self._objective = run, objective
        self._wants_tensorboard = tensorboard
        self._tensorboard: TensorBoardCopy | None = None
        self._recorded_steps = 0
        self.last_line: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._recorded_steps = trainer.global_step
        if trainer.is_global_zero:
            if trainer.datamodule.tokenizer is not None:
                trainer.datamodule.tokenizer.save(str(self._run.tokenizer))
            self.open(trainer.global_step)

    def open(self, step: int) -> None:
        """Go on after `step`: what was recorded or saved beyond it is forgotten."""
        self._run.forget_after(step)
        self._file = open(self._run.metrics, "a", encoding="utf-8")  # noqa: SIM115
        if self._wants_tensorboard:
            self._tensorboard = TensorBoardCopy(self._run.path, list(self._run.read_metrics()), self._objective)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self._recorded_steps:
            return  # a micro-batch that did not end a step
        self._recorded_steps = trainer.global_step
        self._write(trainer, module, module.step_metrics.drain())

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._write(trainer, module, module.validation_tags())

    def _write(self, trainer: pl.Trainer, module: pl.LightningModule, metrics: dict[str, float]) -> None:
        if not trainer.is_global_zero:
            return
        line = {"step": trainer.global_step, "tokens": module.tokens, "time": round(time.time(), 3)} | metrics
        self.last_line = self.last_line | line
        self._file.write(json.dumps(finite(line)) + "\n")
        self._file.flush()
        if self._tensorboard:
            self._tensorboard.write(line)

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.state.fn == "fit":
            os.fsync(self._file.fileno())

    def finish(self, config: dict[str, Any], figures: dict[str, float], step: int) -> None:
        """After the run: hyperparameters with the final figures."""
        self._file.close()
        if self._tensorboard:
            self._tensorboard.finish(config, figures, step)

    def on_exception(self, *_: Any) -> None:
        if self._tensorboard:
            with contextlib.suppress(OSError):  # a full disk, which is what ends the run
                self._tensorboard.close()
