"""Writes the run folder while the run goes on: metrics.jsonl, and TensorBoard's copy of it."""

import contextlib
import json
import os
import time
from typing import Any

import lightning.pytorch as pl

from stackexp.callbacks.tensorboard import TensorBoardCopy
from stackexp.modules.metrics import group_averages, macro_average
from stackexp.runs import RunFolder


class RunRecord(pl.Callback):
    """One line per optimizer step, from what module and callbacks put into `module.step_metrics`; one per validation.

    A line is in the file before the step's checkpoint is written, so no checkpoint is ahead of its record.
    """

    def __init__(self, run: RunFolder, tensorboard: bool):
        self._run = run
        self._wants_tensorboard = tensorboard
        self._tensorboard: TensorBoardCopy | None = None
        self._recorded_steps = 0
        self.last_line: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._recorded_steps = trainer.global_step
        if trainer.is_global_zero:
            trainer.datamodule.tokenizer.save(str(self._run.tokenizer))
            self.open(trainer.global_step)

    def open(self, step: int) -> None:
        """Go on after `step`: what was recorded or saved beyond it is forgotten."""
        self._run.forget_after(step)
        self._file = open(self._run.metrics, "a", encoding="utf-8")  # noqa: SIM115
        if self._wants_tensorboard:
            self._tensorboard = TensorBoardCopy(self._run.path, list(self._run.read_metrics()))

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self._recorded_steps:
            return  # a micro-batch that did not end a step
        self._recorded_steps = trainer.global_step
        self._write(trainer, module, module.step_metrics.drain())

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._write(trainer, module, set_tags("validation", module.set_metrics))

    def _write(self, trainer: pl.Trainer, module: pl.LightningModule, metrics: dict[str, float]) -> None:
        if not trainer.is_global_zero:
            return
        step = trainer.global_step
        tokens = step * module.config.data.global_batch_tokens
        line = {"step": step, "tokens": tokens, "time": round(time.time(), 3)} | metrics
        self.last_line = self.last_line | line
        self._file.write(json.dumps(line) + "\n")
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


FIGURES = ("loss", "perplexity", "bits_per_byte")


def set_tags(prefix: str, sets: dict[str, dict[str, float]]) -> dict[str, float]:
    """`<prefix>/<figure>/<set>` for every set, and first their unweighted mean, as the set `average`.

    The sets of a group such as v2 have `v2/<set>`, the loss, and the group `v2/average/<figure>` (not under the
    prefix while fitting, as `validate` writes the same tags).
    """
    if not sets:
        return {}
    lead = "" if prefix == "validation" else f"{prefix}/"
    plain = {"average": macro_average(sets)} | {name: s for name, s in sets.items() if "/" not in name}
    tags = {f"{prefix}/{figure}/{name}": s[figure] for name, s in plain.items() for figure in FIGURES if figure in s}
    return tags | {lead + tag: value for tag, value in group_tags(sets).items()}


def group_tags(sets: dict[str, dict[str, float]]) -> dict[str, float]:
    """`v2/<set>`, the loss, for the sets of groups, and `v2/average/<figure>`."""
    tags = {name: s["loss"] for name, s in sets.items() if "/" in name}
    for group, average in group_averages(sets).items():
        tags |= {f"{group}/average/{key}": value for key, value in average.items() if key != "sets"}
    return tags
