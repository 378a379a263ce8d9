"""The progress of a run on standard error: a bar in a terminal, otherwise a line every few seconds."""

# mypy: disable-error-code="override, attr-defined, assignment"
# Lightning types its hooks for any module, and declares no trainer.datamodule.

import sys
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from stackexp.config.experiment import LoggingConfig
from stackexp.metric_tags import AVERAGE_LOSS, TOKENS_PER_SECOND, TRAIN_LOSS
from stackexp.modules.base import TrainingModule
from stackexp.training.callbacks.metrics_log import MetricsLog


def build_progress(config: LoggingConfig, metrics_log: MetricsLog) -> pl.Callback:
    """Build the bar, or the lines if the output is a file or `logging.progress_bar` is false."""
    if config.progress_bar and sys.stderr.isatty():
        return StepBar(metrics_log)
    return StepLines(metrics_log, config.log_interval_seconds)


class StepBar(ProgressBar):
    """Shows steps, time left, loss and tokens/s of the last step. A validation has a bar of its own.

    The time left is estimated without the first step, which compiles kernels.
    """

    def __init__(self, metrics_log: MetricsLog):
        super().__init__()
        self._metrics_log = metrics_log
        self._is_enabled = True
        self._bar: tqdm | None = None
        self._validation: tqdm | None = None
        self._validated_set = ""

    def disable(self) -> None:
        """Disable the bars; Lightning calls this on all ranks but the first."""
        self._is_enabled = False

    def _open(self, **options: Any) -> tqdm:
        return tqdm(file=sys.stderr, disable=not self._is_enabled, dynamic_ncols=True, smoothing=0, **options)

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Open the bar."""
        self._first_step = trainer.global_step + 1
        self._bar = self._open(total=trainer.max_steps, initial=trainer.global_step, desc="fit", unit="step")

    def on_train_batch_end(self, trainer: pl.Trainer, module: TrainingModule, *_: Any) -> None:
        """Advance the bar after each step."""
        line = self._metrics_log.last_line
        if self._bar is not None and trainer.global_step > self._bar.n and TRAIN_LOSS in line:
            speed = line[TOKENS_PER_SECOND]
            self._bar.set_postfix_str(f"loss {line[TRAIN_LOSS]:.3f}, {speed:,.0f} tokens/s", refresh=False)
            self._bar.update(trainer.global_step - self._bar.n)
            if trainer.global_step == self._first_step and self._is_enabled:
                self._bar.initial, now = self._bar.n, time.time()
                self._bar.start_t = self._bar.last_print_t = now

    def on_validation_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Open the bar of a validation during training."""
        if self._bar is not None:
            self._validation = self._open(total=sum(trainer.num_val_batches), unit="batch", leave=False, position=1)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, module: TrainingModule, _o: Any, _b: Any, _i: int, dataloader_idx: int = 0
    ) -> None:
        """Advance the bar of the validation."""
        if self._validation is not None:
            name = trainer.datamodule.set_names("validate")[dataloader_idx]
            self._validation.set_description(f"validating {name}", refresh=name != self._validated_set)
            self._validated_set = name
            self._validation.update()

    def on_validation_end(self, *_: Any) -> None:
        """Close the bar of the validation."""
        if self._validation is not None:
            self._validation.close()
            self._validation = None

    def on_train_end(self, *_: Any) -> None:
        """Close the bars."""
        self.on_validation_end()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    on_exception = on_train_end


class StepLines(pl.Callback):
    """Prints a line after the first and the last step, after each validation, and every `interval` seconds."""

    def __init__(self, metrics_log: MetricsLog, interval: float):
        self._metrics_log, self._interval = metrics_log, interval

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Start to count steps."""
        self._step, self._first = trainer.global_step, (trainer.global_step + 1, 0.0)
        self._printed_at = -self._interval

    def on_train_batch_end(self, trainer: pl.Trainer, module: TrainingModule, *_: Any) -> None:
        """Print a line if it is due."""
        line, step, now = self._metrics_log.last_line, trainer.global_step, time.monotonic()
        if step == self._step or not trainer.is_global_zero or TRAIN_LOSS not in line:
            return  # a micro-batch inside an accumulation, or another rank
        self._step = step
        if step == self._first[0]:
            self._first = (step, now)
        if now - self._printed_at >= self._interval or step == trainer.max_steps:
            self._printed_at = now
            text = f"loss {line[TRAIN_LOSS]:.3f}, {line[TOKENS_PER_SECOND]:,.0f} tokens/s"
            self._print(trainer, f"{text}{self._format_time_left(trainer, now)}")

    def _format_time_left(self, trainer: pl.Trainer, now: float) -> str:
        """Return the time left at the mean speed without the first step, which compiles kernels."""
        first, began = self._first
        if trainer.global_step in (first, trainer.max_steps):
            return ""
        seconds = (now - began) / (trainer.global_step - first) * (trainer.max_steps - trainer.global_step)
        return f", {format_duration(seconds)} left"

    def on_validation_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Print the mean validation loss."""
        if trainer.state.fn == "fit" and trainer.is_global_zero and AVERAGE_LOSS in self._metrics_log.last_line:
            self._print(trainer, f"validation loss {self._metrics_log.last_line[AVERAGE_LOSS]:.4f}")

    @staticmethod
    def _print(trainer: pl.Trainer, text: str) -> None:
        print(f"step {trainer.global_step}/{trainer.max_steps}: {text}", file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    """Format seconds with the two largest units: 42 s, 3 min 5 s, 2 h 10 min, 3 d 4 h."""
    values: list[str] = []
    rest = round(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or values or unit == "s":
            values.append(f"{count} {unit}")
    return " ".join(values[:2])
