"""A trial: one run of a sweep, in a run folder named by the values searched and the hash of the resolved config."""

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
    """Two trials are equal if their folders are."""

    folder: RunFolder
    config: ExperimentConfig = field(compare=False)
    values: dict[str, Any] = field(compare=False)  # searched key -> value

    @property
    def name(self) -> str:
        return self.folder.path.name

    @property
    def log(self) -> Path:
        """What all its attempts printed."""
        return self.folder.path / "log.txt"

    @property
    def failure(self) -> Path:
        """How its last failed attempt ended: exit_code, cause, attempts, time."""
        return self.folder.path / "failure.json"

    @property
    def pruned(self) -> Path:
        """Written when the search gives it up: step, value, time."""
        return self.folder.path / "pruned.json"


def config_hash(config: ExperimentConfig) -> str:
    """8 hexadecimal digits of what in a config shapes its figures and is not the schema's default.

    So a trial stays the same when the schema gets another option.
    """
    tree = without_defaults(config, exclude=NOT_IN_RESULTS)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:8]
