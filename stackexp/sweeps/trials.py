"""A trial: one run of a sweep, in a run folder named by the searched values and the hash of the config."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stackexp.config.affects import NOT_IN_RESULTS, without_defaults
from stackexp.config.experiment import ExperimentConfig
from stackexp.runs import RunFolder


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. `values` maps searched keys to values. Trials are equal if their folders are."""

    folder: RunFolder
    config: ExperimentConfig = field(compare=False)
    values: dict[str, Any] = field(compare=False)

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return self.folder.path.name

    @property
    def log(self) -> Path:
        """The output of all attempts."""
        return self.folder.path / "log.txt"

    @property
    def failure(self) -> Path:
        """The record of the last failed attempt; see `stackexp.sweeps.status.read_failure`."""
        return self.folder.path / "failure.json"

    @property
    def pruned(self) -> Path:
        """The record of a search that ended the trial early: step, value, time."""
        return self.folder.path / "pruned.json"


def config_hash(config: ExperimentConfig) -> str:
    """Return 8 hexadecimal digits that identify the options that affect the results.

    Options at their defaults are left out, so that a trial keeps its hash when the schema gets a new option.
    """
    tree = without_defaults(config, exclude=NOT_IN_RESULTS)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:8]
