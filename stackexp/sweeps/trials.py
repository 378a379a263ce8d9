"""A trial: one run of a sweep, in a run folder named by the values searched and the hash of the resolved config."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stackexp.config.experiment import ExperimentConfig
from stackexp.runs import RunFolder

NOT_HASHED = {
    "": ("name", "plugins", "beside", "logging"),
    "model": ("attention",),
    "data": ("micro_batch_size", "eval_batch_size", "num_workers"),
    "trainer": (
        *("accelerator", "devices", "num_nodes", "strategy", "reshard_after_forward", "compile"),
        *("activation_checkpointing", "recompute", "cross_entropy", "cross_entropy_chunk", "collective_timeout"),
        *("max_time", "checkpoint_interval", "checkpoint_minutes", "keep_checkpoints"),
    ),
}
"""Where a trial runs and what it keeps, by section: they change none of its figures, so it stays the same trial."""


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
    tree = _chosen(config)
    for section, keys in NOT_HASHED.items():
        for key in keys:
            (tree.get(section, {}) if section else tree).pop(key, None)  # not every kind of data has all
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:8]


def _chosen(value: Any) -> Any:
    """A section as plain dicts: the kinds, and all values that are not the defaults."""
    if isinstance(value, dict):
        return {key: _chosen(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    values = {field: getattr(value, field.name) for field in dataclasses.fields(value)}
    kept = {field.name: item for field, item in values.items() if field.name == "kind" or item != _default(field)}
    return {name: _chosen(item) for name, item in kept.items()}


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
