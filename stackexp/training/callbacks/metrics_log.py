"""The run folder's metrics.jsonl, the loggers that receive its lines, and the progress on standard error."""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import Logger

from stackexp.config.affects import flatten_config, select_options
from stackexp.config.compose import to_yaml
from stackexp.config.experiment import ExperimentConfig, LoggingConfig
from stackexp.errors import first_line
from stackexp.files import replace_non_finite
from stackexp.metric_tags import AVERAGE_LOSS, TOKENS_PER_SECOND, TRAIN_LOSS
from stackexp.modules.base import TrainingModule
from stackexp.runs import RunFolder
from stackexp.terminal import format_duration
from stackexp.training.callbacks.steps import StepCallback
from stackexp.training.loggers import (
    FINAL_LOSS,
    RunTensorBoard,
    SentLines,
    build_layout,
    close_logger,
    find_sent_lines,
    open_logger,
    send_line,
)

log = logging.getLogger(__name__)


class MetricsLog(StepCallback):
    """Writes one line per optimizer step (all of `module.step_metrics`) and one line per validation to metrics.jsonl.

    A step's line is written before its checkpoint, so no checkpoint is ahead of the log. `loggers` receive the same
    lines. If a logger fails, one warning is logged, and it receives nothing more in this session.
    """

    def __init__(
        self,
        run: RunFolder,
        config: ExperimentConfig,
        loggers: Sequence[Logger] = (),
        list_score_tags: Callable[[list[str]], list[str]] = lambda names: [],
    ):
        """Create the log; `list_score_tags` returns the tags of the HParams tab for the names of validation sets."""
        self._run, self._config, self._list_score_tags = run, config, list_score_tags
        self._loggers = list(loggers)
        self._sent: dict[Logger, SentLines] = {}  # by sessions before this one
        self._repeats_validation = False
        self.last_line: dict[str, Any] = {}

    def open_loggers(self, trainer: pl.Trainer) -> None:
        """Open the loggers on rank 0, and give the trainer those that could be opened, for the user's callbacks."""
        if trainer.is_global_zero:
            self._call_loggers(lambda logger: open_logger(logger, self._config, self._run))
            trainer.loggers = list(self._loggers)

    def on_load_checkpoint(self, trainer: pl.Trainer, module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        """Repeat a validation that came after the checkpoint if callbacks of the user need its scores, again."""
        is_validated = checkpoint["stackexp"].get("is_validated", False)
        self._repeats_validation = bool(self._config.trainer.callbacks) and not is_validated

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Open the log, and delete lines and checkpoints that are newer than the checkpoint the run resumes from."""
        super().on_train_start(trainer, module)
        if not trainer.is_global_zero:
            return
        self._call_loggers(self._find_sent_lines)
        self._run.truncate_after(self._step, AVERAGE_LOSS if self._repeats_validation else None)
        self._file = open(self._run.metrics, "a", encoding="utf-8")  # noqa: SIM115
        self._call_loggers(lambda logger: self._start_logger(logger, trainer))

    def _find_sent_lines(self, logger: Logger) -> None:
        self._sent[logger] = find_sent_lines(logger, self._run)

    def _start_logger(self, logger: Logger, trainer: pl.Trainer) -> None:
        if isinstance(logger, RunTensorBoard):
            names = [dataset.name for dataset in trainer.datamodule.sets("validate")]
            sessions = json.dumps(self._run.read_sessions(), indent=2)
            texts = {"config": to_yaml(self._config), "environment": sessions}
            hyperparameters = select_options(flatten_config(self._config), ["training", "continuation"])
            tags = [TRAIN_LOSS, FINAL_LOSS, *self._list_score_tags(names)]
            logger.start(build_layout(self._config.data.objective, names), texts, hyperparameters, tags)
        for line in self._run.read_metrics():
            self._send(logger, line)

    def on_step_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        self.write(trainer, module, module.step_metrics.drain())

    def on_validation_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        if trainer.state.fn == "fit":
            self.write(trainer, module, module.tag_validation_scores() | module.validation_probes.drain())

    def write(self, trainer: pl.Trainer, module: TrainingModule, metrics: dict[str, float]) -> None:
        """Write a line for the current step on rank 0."""
        if not trainer.is_global_zero:
            return
        line = {"step": trainer.global_step, "tokens": module.tokens, "time": round(time.time(), 3)} | metrics
        self.last_line = self.last_line | line
        self._file.write(json.dumps(replace_non_finite(line)) + "\n")
        self._file.flush()
        self._call_loggers(lambda logger: self._send(logger, line))

    def _send(self, logger: Logger, line: dict[str, Any]) -> None:
        """Send a line, unless a session before this one has sent it; a resumed run repeats lines."""
        if not self._sent[logger].includes(line):
            send_line(logger, line)

    def _call_loggers(self, call: Callable[[Logger], None]) -> None:
        for logger in list(self._loggers):
            try:
                call(logger)
            except Exception as error:  # from any library; a failing logger must not end the run
                self._loggers.remove(logger)
                text = "logging.loggers: %s: %s; nothing more is sent to it, but %s has every line"
                log.warning(text, type(logger).__name__, first_line(error), self._run.metrics)

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        """Flush the log to disk, so that no checkpoint is ahead of it."""
        if trainer.is_global_zero and trainer.state.fn == "fit":
            os.fsync(self._file.fileno())

    def finish(self, step: int, scores: dict[str, float], train_loss: float, sample: str | None) -> None:
        """Close the log, and send the final scores after `step` and the text sample to the loggers."""
        self._file.close()

        def finish(logger: Logger) -> None:
            if isinstance(logger, RunTensorBoard):  # the event files of the final evaluation have the scores
                logger.log_text("sample", sample or "")
                logger.finish(train_loss, step)
            else:
                logger.log_metrics(scores | {FINAL_LOSS: train_loss}, step=step)
            close_logger(logger, is_finished=True)

        self._call_loggers(finish)

    def on_exception(self, *_: Any) -> None:
        self._call_loggers(lambda logger: close_logger(logger, is_finished=False))


STEPS = "fit: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class Progress(pl.callbacks.TQDMProgressBar):
    """Lightning's progress bar, with step, loss, tokens/s and time left, and a bar of its own for each validation.

    Without a terminal, or with `logging.progress_bar` false, prints a line after the first and the last step, after
    each validation, and every `log_interval_seconds`. Everything goes to standard error.
    """

    def __init__(self, config: LoggingConfig, metrics_log: MetricsLog):
        super().__init__()
        self._metrics_log, self._interval = metrics_log, config.log_interval_seconds
        self._has_bar = config.progress_bar and sys.stderr.isatty()
        if not self._has_bar:
            self.disable()

    def init_train_tqdm(self) -> Tqdm:
        """Return a bar of optimizer steps; Lightning's counts micro-batches."""
        steps = {"total": self.trainer.max_steps, "initial": self.trainer.global_step}
        return Tqdm(**steps, **self._bar_options, bar_format=STEPS, smoothing=0)

    def init_validation_tqdm(self) -> Tqdm:
        """Return the bar of a validation during training."""
        return Tqdm(desc=self.validation_description, position=1, leave=False, **self._bar_options)

    @property
    def validation_description(self) -> str:
        """Return the text before the bar of a validation."""
        return "validating"

    @property
    def _bar_options(self) -> dict[str, Any]:
        return {"disable": self.is_disabled, "dynamic_ncols": True, "file": sys.stderr}

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        super().on_train_start(trainer, module)
        self._step, self._first_step, self._printed_at = trainer.global_step, trainer.global_step + 1, -self._interval

    def on_train_epoch_start(self, *_: Any) -> None:
        """Keep the bar, which shows all steps."""

    def on_train_epoch_end(self, *_: Any) -> None:
        """Keep the text."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Advance the bar after a step, or print a line if it is due."""
        if trainer.global_step == self._step or not trainer.is_global_zero:
            return
        line, now = self._metrics_log.last_line, time.monotonic()
        self._step = step = trainer.global_step
        if step == self._first_step:
            self._first_step_ended_at = now
        text = f"loss {line[TRAIN_LOSS]:.3f}, {line[TOKENS_PER_SECOND]:,.0f} tokens/s"
        if step not in (self._first_step, trainer.max_steps):
            # The first step compiles kernels, so the mean speed excludes it.
            seconds_per_step = (now - self._first_step_ended_at) / (step - self._first_step)
            text += f", {format_duration(seconds_per_step * (trainer.max_steps - step))} left"
        if self.is_enabled:
            self.train_progress_bar.set_postfix_str(text, refresh=False)
            self.train_progress_bar.update()
        elif now - self._printed_at >= self._interval or step == trainer.max_steps:
            self._printed_at = now
            self._print(trainer, text)

    def on_validation_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Close the bar of the validation, or print the mean validation loss."""
        self.val_progress_bar.close()
        self.reset_dataloader_idx_tracker()
        is_due = self.is_disabled and trainer.state.fn == "fit" and trainer.is_global_zero
        if is_due and AVERAGE_LOSS in self._metrics_log.last_line:
            self._print(trainer, f"validation loss {self._metrics_log.last_line[AVERAGE_LOSS]:.4f}")

    def on_train_end(self, *_: Any) -> None:
        """Close the bars; the final evaluation has a bar for all sets."""
        for bar in (self._val_progress_bar, self._train_progress_bar):
            if bar is not None:
                bar.close()
        self.disable()

    def on_exception(self, *_: Any) -> None:
        self.on_train_end()

    @staticmethod
    def _print(trainer: pl.Trainer, text: str) -> None:
        with contextlib.suppress(OSError):  # the reader of a pipe has exited, as after Ctrl-C in `fit 2>&1 | tee log`
            print(f"step {trainer.global_step}/{trainer.max_steps}: {text}", file=sys.stderr, flush=True)
