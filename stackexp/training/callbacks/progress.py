"""The progress of a run on standard error: a bar in a terminal, otherwise a line every few seconds."""

import contextlib
import sys
import time
from typing import Any

import lightning.pytorch as pl
from tqdm import tqdm

from stackexp.config.experiment import LoggingConfig
from stackexp.metric_tags import AVERAGE_LOSS, TOKENS_PER_SECOND, TRAIN_LOSS
from stackexp.modules.base import TrainingModule
from stackexp.progress_bar import open_bar
from stackexp.terminal import format_duration
from stackexp.training.callbacks.metrics_log import MetricsLog
from stackexp.training.callbacks.step import StepCallback

STEPS = "fit: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class Progress(StepCallback):
    """Shows step, loss, tokens/s and time left on rank 0. In a terminal, a validation has a bar of its own.

    Without a terminal, or with `logging.progress_bar` false, prints a line after the first and the last step, after
    each validation, and every `log_interval_seconds`.
    """

    def __init__(self, config: LoggingConfig, metrics_log: MetricsLog):
        self._metrics_log, self._interval = metrics_log, config.log_interval_seconds
        self._has_bar = config.progress_bar and sys.stderr.isatty()
        self._bar: tqdm | None = None
        self._validation: tqdm | None = None

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Open the bar."""
        super().on_train_start(trainer, module)
        self._first_step, self._printed_at = trainer.global_step + 1, -self._interval
        if self._has_bar and trainer.is_global_zero:
            self._bar = open_bar(total=trainer.max_steps, initial=trainer.global_step, bar_format=STEPS, smoothing=0)

    def on_step_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Advance the bar, or print a line if it is due."""
        line, step, now = self._metrics_log.last_line, trainer.global_step, time.monotonic()
        if not trainer.is_global_zero:
            return
        if step == self._first_step:
            self._first_step_ended_at = now
        text = f"loss {line[TRAIN_LOSS]:.3f}, {line[TOKENS_PER_SECOND]:,.0f} tokens/s"
        if step not in (self._first_step, trainer.max_steps):
            # The first step compiles kernels, so the mean speed excludes it.
            seconds_per_step = (now - self._first_step_ended_at) / (step - self._first_step)
            text += f", {format_duration(seconds_per_step * (trainer.max_steps - step))} left"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif now - self._printed_at >= self._interval or step == trainer.max_steps:
            self._printed_at = now
            self._print(trainer, text)

    def on_validation_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Open the bar of a validation during training."""
        if self._bar is not None:
            total = sum(trainer.num_val_batches)
            self._validation = open_bar(total=total, unit="batch", desc="validating", leave=False, position=1)

    def on_validation_batch_end(self, *_: Any) -> None:
        """Advance the bar of the validation."""
        if self._validation is not None:
            self._validation.update()

    def on_validation_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Close the bar of the validation, or print the mean validation loss."""
        if self._validation is not None:
            self._validation.close()
            self._validation = None
        elif trainer.state.fn == "fit" and trainer.is_global_zero and AVERAGE_LOSS in self._metrics_log.last_line:
            self._print(trainer, f"validation loss {self._metrics_log.last_line[AVERAGE_LOSS]:.4f}")

    def on_train_end(self, *_: Any) -> None:
        """Close the bars."""
        for bar in (self._validation, self._bar):
            if bar is not None:
                bar.close()
        self._validation = self._bar = None

    def on_exception(self, *_: Any) -> None:
        """Close the bars."""
        self.on_train_end()

    @staticmethod
    def _print(trainer: pl.Trainer, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more, as after Ctrl-C in `fit 2>&1 | tee log`
            print(f"step {trainer.global_step}/{trainer.max_steps}: {text}", file=sys.stderr, flush=True)
