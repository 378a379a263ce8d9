"""Requests to `validate` and `test`, and their evaluation: set by set, so that after a kill only the rest is scored."""

import dataclasses
import hashlib
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl

import stackexp
from stackexp.config import compose
from stackexp.config.affects import changes_scores, flatten_config
from stackexp.config.experiment import ExperimentConfig
from stackexp.datamodules.base import ExperimentData
from stackexp.errors import FolderBusyError, RunError
from stackexp.evaluation.scores import write_chunk_losses
from stackexp.files import append_json_line, compute_sha256, hash_values, read_json_lines
from stackexp.models import checkpoints
from stackexp.modules.base import TrainingModule
from stackexp.runs import DATE_FORMAT, EMA, MANIFEST, RunFolder, split_path
from stackexp.terminal import open_bar
from stackexp.training.processes import Processes

Stage = Literal["validate", "test"]
Sets = dict[str, dict[str, float]]  # set -> figure -> value
QUIET_SECONDS = 10
"""A log file gets lines of progress only after this time; a terminal shows the bar at once."""


@dataclasses.dataclass(frozen=True)
class EvaluationRequest:
    """A request to score the checkpoint of a run, or `ckpt_path`, on the config's sets, or on `sets`.

    Without `out`, the scores go to <run>/<stage>.json. Other checkpoints, sets and options that change the scores
    use a separate file: <stage>-<checkpoint>-<sets>-<hash of options and paths>.json.
    """

    stage: Stage
    config: ExperimentConfig
    run: RunFolder | None = None
    ckpt_path: str | None = None
    sets: tuple[str, ...] = ()
    out: Path | None = None
    overrides: tuple[str, ...] = ()
    as_json: bool = False
    """Print the record in `output` instead of a table."""

    @cached_property
    def output(self) -> Path | None:
        """Return the JSON file for the scores, or None."""
        if self.out or not self.run:
            return self.out
        names = "+".join(item.partition("=")[0] for item in self.sets)
        is_short, has_paths = len(names) < 80, any("=" in item for item in self.sets)
        path = Path(self.ckpt_path or "")
        label = "-".join(path.parts[-2:]) if path.name == EMA else path.stem
        is_path = self.ckpt_path not in (None, "best", "last", EMA)
        folder, _ = split_path(path)
        if is_path and folder.exists() and not self.run.has_checkpoint(folder):
            label += f"-{hash_values([str(path.resolve())])[:8]}"  # of another run, which has the same steps
        parts = [label, names.replace("/", "-") if is_short else ""]
        if not (self.has_run_options and is_short) or has_paths:
            parts.append(hash_values([*self._list_options(self.config), self.sets])[:8])
        return self.run.path / ("-".join([self.stage, *filter(None, parts)]) + ".json")

    @property
    def should_write_events(self) -> bool:
        """Return True if TensorBoard gets the scores.

        This requires the run's own options, complete groups, and new names for sets given on the command line.
        """
        if self.out or not self.run or "tensorboard" not in self.config.logging.loggers:
            return False
        _, named = self._list_options(self.config)
        sets = {name: path for name, _, path in (item.partition("=") for item in self.sets)}
        is_ambiguous = any("/" in name or (path and name in named) for name, path in sets.items())
        return self.has_run_options and not is_ambiguous

    def write_events(self, write: Callable[[Path], None]) -> None:
        """Call `write` with the run folder, unless it is training: TensorBoard would ignore its older event file."""
        assert self.run is not None
        try:
            with self.run.lock():
                write(self.run.path)
        except FolderBusyError:
            print(f"note: {self.run.path} is in use, so TensorBoard does not get the scores", file=sys.stderr)

    @cached_property
    def run_config(self) -> ExperimentConfig:
        """Return the config of the run, without overrides."""
        assert self.run is not None
        return compose.load_config(self.run.config)

    @cached_property
    def has_run_options(self) -> bool:
        """Return True if no option that changes scores differs from the config of the run."""
        return self._list_options(self.config) == self._list_options(self.run_config)

    def _list_options(self, config: ExperimentConfig) -> list[Any]:
        """Return the options that change scores, and the paths of the config's sets for this stage."""
        section = "validation" if self.stage == "validate" else "test"
        return [list_figure_options(config), getattr(config.data, section, {})]


def describe_evaluation(request: EvaluationRequest, checkpoint: Path) -> dict[str, Any]:
    """Return the first fields of every JSON record of an evaluation: checkpoint, step, overrides, paths and time.

    The step is None for a file, and for averaged weights, whose scores are not those of the step. The paths are those
    of the sets that were requested as NAME=PATH.
    """
    return {
        "checkpoint": str(checkpoint),
        "step": checkpoints.load_state(checkpoint)["global_step"] if checkpoint.is_dir() else None,
        "overrides": list(request.overrides),
        "paths": {name: path for name, _, path in (item.partition("=") for item in request.sets) if path},
        "time": time.strftime(DATE_FORMAT),
    }


def list_figure_options(config: ExperimentConfig) -> list[Any]:
    """Return the options that change the scores of a set, apart from the checkpoint and the contents of the set."""
    options = flatten_config(config)
    return [[key, options[key]] for key in sorted(options) if changes_scores(options, key)]


def hash_validation(config: ExperimentConfig, data: ExperimentData) -> str:
    """Return a hash of everything but the weights that determines the scores of a validation during training."""
    sets = [[dataset.name, dataset.identity] for dataset in data.sets("validate")]
    return hash_values([list_figure_options(config), data.eval_limit, sets])


def identify_checkpoint(checkpoint: Path) -> list:
    """Return the key of the weights and a hash of the checkpoint's manifest, or the size and time of a weights file.

    Raises RunError if the checkpoint is missing.
    """
    path, key = split_path(checkpoint)
    if not path.exists():
        raise RunError(f"{path}: no such checkpoint; give a folder in a run's checkpoints/")
    if path.is_dir():
        manifest = path / MANIFEST  # has the hashes of all files, which are verified before the weights are used
        return [key, compute_sha256(manifest) if manifest.is_file() else None]
    return [key, path.name, path.stat().st_size, path.stat().st_mtime_ns]


# Evaluation, set by set


class PartialResults:
    """The scored sets of an evaluation in a JSON Lines file: {"key": ..., "set": name, "figures": {...}}.

    `keys` maps each set to a hash of everything its scores depend on. A line with another key is of another evaluation
    and is ignored. Without a path nothing is saved.
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
            append_json_line(self.path, {"key": self._keys[name], "set": name, "figures": figures})

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
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set without a type
        evaluate = trainer.validate if self._stage == "validate" else trainer.test
        delay = 0 if sys.stderr.isatty() else QUIET_SECONDS
        callbacks.append(self)
        self._data.skipped_sets = frozenset(self._scored)
        try:
            with open_bar(unit="batch", delay=delay, disable=not self._is_shown) as self._bar:
                evaluate(module, self._data, verbose=False)
        finally:
            self._data.skipped_sets = frozenset()
            callbacks.remove(self)  # the next evaluation with this trainer may be of other weights
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
