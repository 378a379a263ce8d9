"""The progress of an evaluation, on standard error."""

# mypy: disable-error-code="override, attr-defined, assignment"
# Lightning types its hooks for any module, and declares no trainer.datamodule.

import sys
import time

import lightning.pytorch as pl
from tqdm import tqdm

from stackexp.evaluation.partial_results import PartialResults
from stackexp.modules.base import TrainingModule

QUIET_SECONDS = 10  # a shorter evaluation prints nothing but its table
MANY_SETS = 40  # with this many sets, lines are QUIET_SECONDS apart


class EvaluationProgress(pl.Callback):
    """Saves each set in `partial` once it is scored, and shows the progress; works on rank 0 only.

    Shows a progress bar in a terminal, otherwise one line per set.
    """

    def __init__(self, partial: PartialResults, is_shown: bool):
        self._partial, self._is_shown = partial, is_shown
        self._scored: set[str] = set()
        self._bar: tqdm | None = None

    def _start(self, trainer: pl.Trainer, batches: list[int | float]) -> None:
        self._started, self._sets, self._shown_at = time.monotonic(), len(batches), 0.0
        if self._is_shown and trainer.is_global_zero and sys.stderr.isatty():
            self._bar = tqdm(total=sum(batches), unit="batch", file=sys.stderr, dynamic_ncols=True)

    def _advance(self, trainer: pl.Trainer, module: TrainingModule, name: str) -> None:
        if not trainer.is_global_zero:
            return
        if self._bar is not None:
            self._bar.set_description(name, refresh=False)
            self._bar.update()
        for scored in module.set_metrics.keys() - self._scored:
            self._scored.add(scored)
            self._partial.add(scored, module.set_metrics[scored])
            self._show(scored, module.set_metrics[scored])

    def _show(self, name: str, figures: dict[str, float]) -> None:
        seconds, pause = time.monotonic() - self._started, QUIET_SECONDS if self._sets >= MANY_SETS else 0
        if self._is_shown and self._bar is None and seconds > max(QUIET_SECONDS, self._shown_at + pause):
            self._shown_at = seconds
            count, figure = f"{len(self._scored)}/{self._sets}", "accuracy" if "accuracy" in figures else "loss"
            print(f"{count} {name}: {figure} {figures[figure]:.4f}, {seconds:.0f} s", file=sys.stderr, flush=True)

    def _end(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def on_validation_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Start the bar."""
        self._start(trainer, trainer.num_val_batches)

    def on_test_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Start the bar."""
        self._start(trainer, trainer.num_test_batches)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, module: TrainingModule, _o: object, _b: object, _i: int, dataloader_idx: int = 0
    ) -> None:
        """Save and show the sets that are complete."""
        self._advance(trainer, module, trainer.datamodule.set_names("validate")[dataloader_idx])

    def on_test_batch_end(
        self, trainer: pl.Trainer, module: TrainingModule, _o: object, _b: object, _i: int, dataloader_idx: int = 0
    ) -> None:
        """Save and show the sets that are complete."""
        self._advance(trainer, module, trainer.datamodule.set_names("test")[dataloader_idx])

    on_validation_end = on_test_end = on_exception = _end
