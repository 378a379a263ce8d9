"""Evaluate every set of a stage; after a kill, only the remaining sets."""

import hashlib
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

import stackexp
from stackexp.config.experiment import ExperimentConfig
from stackexp.datamodules.base import ExperimentData
from stackexp.evaluation.request import Sets, Stage, hash_values, identify_checkpoint, list_figure_options
from stackexp.evaluation.scores import write_chunk_losses
from stackexp.files import append_json_line, read_json_lines
from stackexp.modules.base import TrainingModule
from stackexp.terminal import open_bar
from stackexp.training.processes import Processes

QUIET_SECONDS = 10
"""A log file gets lines of progress only after this time; a terminal shows the bar at once."""


class PartialResults:
    """The scored sets of an evaluation in a JSON Lines file: {"key": ..., "set": name, "figures": {...}}.

    `keys` maps each set to a hash of everything its scores depend on. A line with another key is of another evaluation
    and is ignored.
    Without a path nothing is saved.
    """

    def __init__(self, path: Path | None, keys: dict[str, str]):
        self.path, self._keys = path, keys

    def load(self) -> Sets:
        """Return the scores of the scored sets. Raises OSError if the file could not be written later."""
        if self.path is None:
            return {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        open(self.path, "ab").close()
        if not self.path.stat().st_size:
            self.path.unlink()
        scored = {line["key"]: line["figures"] for line in read_json_lines(self.path, skip_damaged=True)}
        return {name: scored[key] for name, key in self._keys.items() if key in scored}

    def add(self, name: str, figures: dict[str, float]) -> None:
        """Save the scores of a set, and flush them to disk."""
        if self.path is not None:
            append_json_line(self.path, {"key": self._keys[name], "set": name, "figures": figures}, sync=True)

    def delete(self) -> None:
        """Delete the file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class ResumableEvaluation(pl.Callback):
    """An evaluation that saves each scored set next to `output`, until the scores of all sets are written.

    Rank 0 saves each set once it is scored, and shows the progress.
    """

    def __init__(
        self,
        stage: Stage,
        config: ExperimentConfig,
        data: ExperimentData,
        processes: Processes,
        checkpoint: Path,
        output: Path | None,
    ):
        data.setup(stage)
        self._stage, self._data = stage, data
        self._names = data.list_set_names(stage)
        self._output, self._is_first = output, processes.is_first
        path = output.with_suffix(".partial.jsonl") if output else None
        self._partial = PartialResults(path, compute_keys(stage, config, data, processes, checkpoint))
        self._scored: Sets = processes.run_on_first(self._partial.load)
        self._is_shown = config.logging.progress_bar and processes.is_first
        if self._scored and processes.is_first:
            count = f"{len(self._scored)} of {len(self._names)} sets"
            print(f"{path}: resuming, {count} are scored already", file=sys.stderr, flush=True)

    def run(self, trainer: pl.Trainer, module: TrainingModule, known: Sets | None = None) -> None:
        """Score the sets that are neither in `known` nor saved by an earlier, killed evaluation."""
        self._scored |= known or {}
        for name in known or {}:
            self._write_chunk_losses(name, module)
        if len(self._scored) == len(self._names):
            return
        trainer.callbacks.append(self)  # type: ignore[attr-defined]  # set by Lightning without a type
        self._data.skipped_sets = frozenset(self._scored)
        evaluate = trainer.validate if self._stage == "validate" else trainer.test
        delay = 0 if sys.stderr.isatty() else QUIET_SECONDS
        with open_bar(unit="batch", delay=delay, disable=not self._is_shown) as self._bar:
            evaluate(module, self._data, verbose=False)
        self._data.skipped_sets = frozenset()
        self._scored |= module.set_metrics

    @property
    def sets(self) -> Sets:
        """Return the scores of every set, in the order of the sets."""
        return {name: self._scored[name] for name in self._names}

    def delete_partial_results(self) -> None:
        """Delete the saved sets after the scores are written elsewhere. Call it on rank 0 only."""
        self._partial.delete()

    # Lightning's hooks

    def on_validation_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Set the length of the bar."""
        self._num_saved = 0
        self._bar.total = sum(trainer.num_val_batches if self._stage == "validate" else trainer.num_test_batches)

    def on_validation_batch_end(self, trainer: pl.Trainer, module: TrainingModule, *_: Any) -> None:
        """Save and show the sets that are complete."""
        if not trainer.is_global_zero:
            return
        for name, figures in list(module.set_metrics.items())[self._num_saved :]:
            self._num_saved += 1
            self._write_chunk_losses(name, module)
            self._partial.add(name, figures)
            figure = "accuracy" if "accuracy" in figures else "loss"
            self._bar.set_description(f"{name}: {figure} {figures[figure]:.4f}", refresh=False)
        self._bar.update()

    on_test_start = on_validation_start  # type: ignore[assignment]
    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def _write_chunk_losses(self, name: str, module: TrainingModule) -> None:
        if self._is_first and self._output is not None and name in module.chunk_losses:
            write_chunk_losses(self._output, name, module.chunk_losses[name])


def compute_keys(
    stage: Stage, config: ExperimentConfig, data: ExperimentData, processes: Processes, checkpoint: Path
) -> dict[str, str]:
    """Return for each set a hash of the checkpoint, the set's contents, and the options that change its scores."""
    table = "" if data.token_bytes is None else hashlib.sha256(data.token_bytes.tobytes()).hexdigest()
    identity = processes.run_on_first(lambda: identify_checkpoint(checkpoint))
    common = [*list_figure_options(config), stackexp.__version__, table, identity]
    return {opened.name: hash_values([*common, opened.name, opened.identity]) for opened in data.sets(stage)}
