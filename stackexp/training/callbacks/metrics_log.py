"""The run folder's metrics.jsonl, and its copies in TensorBoard and other services, written during training."""

import contextlib
import json
import os
import time
from typing import Any

import lightning.pytorch as pl

from stackexp.config.compose import to_yaml
from stackexp.config.experiment import ExperimentConfig
from stackexp.files import replace_non_finite
from stackexp.modules.base import TrainingModule
from stackexp.runs import RunFolder
from stackexp.training.callbacks.step import StepCallback
from stackexp.training.mirrors import Mirror
from stackexp.training.tensorboard import TensorBoardCopy, build_layout


class MetricsLog(StepCallback):
    """Writes one line per optimizer step (all of `module.step_metrics`) and one line per validation.

    A step's line is written before its checkpoint, so no checkpoint is ahead of the log.
    """

    def __init__(self, run: RunFolder, config: ExperimentConfig):
        self._run, self._config = run, config
        self._tensorboard: TensorBoardCopy | None = None
        self._mirrors: list[Mirror] = []
        self.last_line: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Open the log, and delete lines and checkpoints that are newer than the checkpoint the run resumes from."""
        super().on_train_start(trainer, module)
        if not trainer.is_global_zero:
            return
        self._run.truncate_after(self._step)
        self._file = open(self._run.metrics, "a", encoding="utf-8")  # noqa: SIM115
        if self._config.logging.tensorboard:
            self._tensorboard = self._open_tensorboard(trainer)
        self._mirrors = [Mirror(name, self._run, self._config) for name in self._config.logging.mirrors]

    def _open_tensorboard(self, trainer: pl.Trainer) -> TensorBoardCopy:
        set_names = [dataset.name for dataset in trainer.datamodule.sets("validate")]
        layout = build_layout(self._config.data.objective, set_names)
        sessions = json.dumps(self._run.read_sessions(), indent=2)
        texts = {"config": to_yaml(self._config), "environment": sessions}
        return TensorBoardCopy(self._run.path, list(self._run.read_metrics()), layout, texts)

    def on_step_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Log a step."""
        self.write(trainer, module, module.step_metrics.drain())

    def on_validation_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Log a validation."""
        if trainer.state.fn == "fit":
            self.write(trainer, module, module.validation_tags() | module.validation_probes.drain())

    def write(self, trainer: pl.Trainer, module: TrainingModule, metrics: dict[str, float]) -> None:
        """Write a line for the current step on rank 0."""
        if not trainer.is_global_zero:
            return
        line = {"step": trainer.global_step, "tokens": module.tokens, "time": round(time.time(), 3)} | metrics
        self.last_line = self.last_line | line
        self._file.write(json.dumps(replace_non_finite(line)) + "\n")
        self._file.flush()
        if self._tensorboard:
            self._tensorboard.write(line)
        for mirror in self._mirrors:
            mirror.write(line)

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        """Flush the log to disk, so that no checkpoint is ahead of it."""
        if trainer.is_global_zero and trainer.state.fn == "fit":
            os.fsync(self._file.fileno())

    def finish(
        self, hyperparameters: dict[str, Any], scores: dict[str, float], train_loss: float, sample: str | None
    ) -> None:
        """Close the log, and write hyperparameters, final scores and the text sample to the copies."""
        self._file.close()
        for mirror in self._mirrors:
            mirror.write({"step": self._config.trainer.max_steps, "time": time.time()} | scores)
            mirror.close(is_finished=True)
        if self._tensorboard:
            if sample is not None:
                self._tensorboard.write_text("sample", sample)
            self._tensorboard.finish(hyperparameters, scores, train_loss, self._config.trainer.max_steps)

    def on_exception(self, *_: Any) -> None:
        """Close the copies."""
        if self._tensorboard:
            with contextlib.suppress(OSError):  # a full disk, which already ends the run
                self._tensorboard.close()
        for mirror in self._mirrors:
            mirror.close(is_finished=False)
