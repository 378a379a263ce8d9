"""Evaluate every set of a stage; after a kill, only the remaining sets."""

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from tqdm import tqdm

import stackexp
from stackexp.config.experiment import ExperimentConfig
from stackexp.datamodules.base import ExperimentData
from stackexp.errors import RunError
from stackexp.evaluation.chunk_losses import write_chunk_losses
from stackexp.evaluation.request import Sets, Stage, hash_values, list_figure_options
from stackexp.files import append_json_line, read_json_lines, write_json_lines
from stackexp.models import checkpoints
from stackexp.modules.base import TrainingModule
from stackexp.progress_bar import open_bar
from stackexp.training.processes import Processes

QUIET_SECONDS = 10  # at least, between two lines of progress; a shorter evaluation prints nothing but its table


class PartialResults:
    """The scored sets of an evaluation in a JSON Lines file: {"key": ..., "set": name, "figures": {...}}.

    `keys` maps each set to a hash of everything its scores depend on, so several evaluations can share a file. Without
    a path nothing is saved.
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
        """Delete this evaluation's lines, and the file if it then has no lines."""
        if self.path is None:
            return
        lines, own = read_json_lines(self.path, skip_damaged=True), set(self._keys.values())
        if kept := [line for line in lines if line["key"] not in own]:
            write_json_lines(self.path, kept)
        else:
            self.path.unlink(missing_ok=True)


class ResumableEvaluation(pl.Callback):
    """An evaluation that saves each scored set next to `output`, until the scores of all sets are written.

    Rank 0 saves each set once it is scored, and shows the progress: a bar in a terminal, otherwise lines.
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
        self._is_shown = config.logging.progress_bar
        self._bar: tqdm | None = None
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
        try:
            evaluate(module, self._data, verbose=False)
        finally:
            if self._bar is not None:
                self._bar.close()
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
        """Start the bar."""
        self._started, self._shown_at, self._saved = time.monotonic(), 0.0, 0
        batches = trainer.num_val_batches if self._stage == "validate" else trainer.num_test_batches
        self._num_sets = len(batches)
        if self._is_shown and trainer.is_global_zero and sys.stderr.isatty():
            self._bar = open_bar(total=sum(batches), unit="batch")

    def on_validation_batch_end(self, trainer: pl.Trainer, module: TrainingModule, *_: Any) -> None:
        """Save and show the sets that are complete."""
        if not trainer.is_global_zero:
            return
        for name, figures in list(module.set_metrics.items())[self._saved :]:
            self._saved += 1
            self._write_chunk_losses(name, module)
            self._partial.add(name, figures)
            self._show(name, figures)
        if self._bar is not None:
            self._bar.update()

    def _write_chunk_losses(self, name: str, module: TrainingModule) -> None:
        if self._is_first and self._output is not None and name in module.chunk_losses:
            write_chunk_losses(self._output, name, module.chunk_losses[name])

    on_test_start = on_validation_start  # type: ignore[assignment]
    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def _show(self, name: str, figures: dict[str, float]) -> None:
        seconds = time.monotonic() - self._started
        if self._bar is not None:
            self._bar.set_description(name, refresh=False)
        elif self._is_shown and seconds > self._shown_at + QUIET_SECONDS:
            self._shown_at = seconds
            count, figure = f"{self._saved}/{self._num_sets}", "accuracy" if "accuracy" in figures else "loss"
            print(f"{count} {name}: {figure} {figures[figure]:.4f}, {seconds:.0f} s", file=sys.stderr, flush=True)


def compute_keys(
    stage: Stage, config: ExperimentConfig, data: ExperimentData, processes: Processes, checkpoint: Path
) -> dict[str, str]:
    """Return for each set a hash of the checkpoint, the set's contents, and the options that change its scores."""
    table = "" if data.token_bytes is None else hashlib.sha256(data.token_bytes.tobytes()).hexdigest()
    identity = processes.run_on_first(lambda: identify_checkpoint(checkpoint))
    common = [*list_figure_options(config), stackexp.__version__, table, identity]
    return {opened.name: hash_values([*common, opened.name, opened.identity]) for opened in data.sets(stage)}


def identify_checkpoint(checkpoint: Path) -> list:
    """Return the key of the weights, sizes and times of the checkpoint's files, and a hash of its state.

    Raises RunError if it is missing.
    """
    path, key = checkpoints.split_path(checkpoint)
    if not path.exists():
        raise RunError(f"{path}: no such checkpoint; give a folder in a run's checkpoints/, `last` or `best`")
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    state = path / checkpoints.STATE
    return [key, *stats, hashlib.sha256(state.read_bytes()).hexdigest() if state.is_file() else None]
