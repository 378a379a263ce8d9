"""Requests to `validate` and `test`: the checkpoint and sets to score, and the output file."""

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
from stackexp.errors import FolderBusyError
from stackexp.models import checkpoints
from stackexp.runs import RunFolder

Stage = Literal["validate", "test"]
Sets = dict[str, dict[str, float]]  # set -> figure -> value
DataModule = Any  # a LightningDataModule with sets(stage), set_names(stage), skipped_sets, tokenizer and token_bytes


@dataclasses.dataclass(frozen=True)
class EvaluationRequest:
    """A request to score the checkpoint of a run, or `ckpt_path`, on the config's sets, or on `sets`.

    Without `out`, the figures go to <run>/<stage>.json. Other checkpoints, sets and options that change the figures
    use a separate file: <stage>-<checkpoint>-<sets>-<hash of options and paths>.json.
    """

    stage: Stage
    config: ExperimentConfig
    run: RunFolder | None = None
    ckpt_path: str | None = None
    sets: tuple[str, ...] = ()
    out: Path | None = None
    overrides: tuple[str, ...] = ()

    @cached_property
    def output(self) -> Path | None:
        """Return the JSON file for the figures, or None."""
        if self.out or not self.run:
            return self.out
        names, has_paths = "+".join(item.partition("=")[0] for item in self.sets), self._has_paths
        parts = [Path(self.ckpt_path or "").stem, names.replace("/", "-") if len(names) < 80 else ""]
        if not self.has_run_options or has_paths or len(names) >= 80:
            parts.append(hash_values([list_figure_options(self.config), self.config_sets, self.sets])[:8])
        return self.run.path / ("-".join([self.stage, *filter(None, parts)]) + ".json")

    @property
    def _has_paths(self) -> bool:
        return any("=" in item for item in self.sets)

    @property
    def config_sets(self) -> dict[str, str]:
        """Return the paths of the config's sets for this stage."""
        return getattr(self.config.data, "validation" if self.stage == "validate" else "test", {})

    @property
    def should_write_events(self) -> bool:
        """Return True if TensorBoard gets the figures.

        That requires the run's own options, complete groups, and sets of the command line with names of their own.
        """
        if self.out or not self.run or not self.config.logging.tensorboard:
            return False
        names = {name: path for name, _, path in (item.partition("=") for item in self.sets)}
        is_ambiguous = any("/" in name or (path and name in self.config_sets) for name, path in names.items())
        return self.has_run_options and not is_ambiguous

    @contextlib.contextmanager
    def open_event_folder(self) -> Iterator[Path]:
        """Lock and return the run folder, or return <run>/<stage> while the run is training.

        TensorBoard reads one event file of a folder at a time, and would never return to that of the running fit.
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
        """Return True if no option that changes figures differs from the config of the run."""
        own = dataclasses.replace(self, config=self.run_config)
        options = [(list_figure_options(request.config), request.config_sets) for request in (own, self)]
        return options[0] == options[1]


def describe_evaluation(request: EvaluationRequest, checkpoint: Path) -> dict[str, Any]:
    """Return what every JSON record of an evaluation begins with: checkpoint, step, overrides and time."""
    return {
        "checkpoint": str(checkpoint),
        "step": checkpoints.load_state(checkpoint)["global_step"] if checkpoint.is_dir() else None,
        "overrides": list(request.overrides),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def list_figure_options(config: ExperimentConfig) -> list[Any]:
    """Return the options that change the figures of a set, besides the checkpoint and the contents of the set."""
    options = flatten_config(config)
    return [[key, options[key]] for key in sorted(options) if changes_scores(options, key)]


def hash_values(values: list[Any]) -> str:
    """Return a SHA-256 of values that JSON can represent."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
