"""A profile of a few training steps: a Chrome trace and, on CUDA, a memory snapshot."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.profiler import ProfilerActivity, profile

from stackexp.errors import first_line
from stackexp.modules.base import TrainingModule

log = logging.getLogger(__name__)
MAX_MEMORY_EVENTS = 100_000  # allocations and frees in a memory snapshot


class Profiler(pl.Callback):
    """Profiles `steps`, such as "10-15", on rank 0, and writes the results to <run>/profile.

    trace-A-B.json opens in chrome://tracing and Perfetto, memory-A-B.pickle in PyTorch's memory viewer. A and B are
    the first and the last step in it; a resumed run writes files for its own steps. Profiled steps are slower.
    """

    def __init__(self, folder: Path, steps: str):
        self._folder = folder / "profile"
        self._first, self._last = map(int, steps.split("-"))
        self._begin = self._end = 0  # the steps profiled so far
        self._profile: profile | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: TrainingModule, *_: Any) -> None:
        is_due = self._first <= trainer.global_step + 1 <= self._last
        if not (trainer.is_global_zero and is_due and self._profile is None):
            return
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
        self._begin = self._end = trainer.global_step + 1
        self._profile = profile(activities=activities, profile_memory=True, record_shapes=True)
        self._profile.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: TrainingModule, *_: Any) -> None:
        self._end = trainer.global_step
        if trainer.global_step >= self._last:
            self._write()

    def on_train_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Write an incomplete profile if the run ends before the last profiled step."""
        self._write()

    def on_exception(self, trainer: pl.Trainer, module: TrainingModule, exception: BaseException) -> None:
        """Write an incomplete profile if a stop or an error ends the run."""
        try:
            self._write()
        except OSError as error:  # must not replace the exception that ends the run
            log.warning("%s: the profile could not be written: %s", self._folder, first_line(error))

    def _write(self) -> None:
        if self._profile is None:
            return
        finished, self._profile, self._last = self._profile, None, 0
        finished.stop()
        self._folder.mkdir(exist_ok=True)
        steps = f"{self._begin}-{self._end}"
        trace = self._folder / f"trace-{steps}.json"
        finished.export_chrome_trace(str(trace))
        log.info("profile of steps %s: %s", steps, trace)
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-{steps}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
