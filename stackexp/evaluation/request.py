"""Requests to `validate` and `test`: the checkpoint and sets to score, the output file, and what scores depend on."""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from stackexp.config import compose
from stackexp.config.affects import changes_scores, flatten_config
from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import FolderBusyError, RunError
from stackexp.models import checkpoints
from stackexp.runs import RunFolder

Stage = Literal["validate", "test"]
Sets = dict[str, dict[str, float]]  # set -> figure -> value


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
        label = "-".join(path.parts[-2:]) if path.name == checkpoints.EMA else path.stem
        if self.ckpt_path and path.exists() and not path.resolve().is_relative_to(self.run.checkpoints.resolve()):
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
        if self.out or not self.run or not self.config.logging.tensorboard:
            return False
        _, named = self._list_options(self.config)
        sets = {name: path for name, _, path in (item.partition("=") for item in self.sets)}
        is_ambiguous = any("/" in name or (path and name in named) for name, path in sets.items())
        return self.has_run_options and not is_ambiguous

    @contextlib.contextmanager
    def open_event_folder(self) -> Iterator[Path]:
        """Lock and return the run folder, or return <run>/<stage> while the run is training.

        TensorBoard reads the event files of a folder one after the other; after a new one, it would ignore that of the
        running fit.
        """
        assert self.run is not None
        with contextlib.ExitStack() as stack:
            folder = self.run.path
            try:
                stack.enter_context(self.run.lock())
            except FolderBusyError:
                folder = folder / self.stage
            yield folder

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
    """Return the first fields of every JSON record of an evaluation: checkpoint, step, overrides and time."""
    return {
        "checkpoint": str(checkpoint),
        "step": checkpoints.load_state(checkpoint)["global_step"] if checkpoint.is_dir() else None,
        "overrides": list(request.overrides),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def list_figure_options(config: ExperimentConfig) -> list[Any]:
    """Return the options that change the scores of a set, apart from the checkpoint and the contents of the set."""
    options = flatten_config(config)
    return [[key, options[key]] for key in sorted(options) if changes_scores(options, key)]


def hash_values(values: list[Any]) -> str:
    """Return a SHA-256 of values that JSON can represent."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


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
