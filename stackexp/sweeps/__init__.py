"""Sweeps: several runs of one study. Their run folders are the only record.

This module lists the shipped sweeps. It imports little, because every `fit` asks if its config is run as a sweep.
"""

from collections.abc import Sequence
from pathlib import Path

from stackexp.config.layers import list_config_names
from stackexp.config.yaml_files import get_configs_folder, list_yaml_names


def get_shipped_folder() -> Path:
    """Return the folder of the shipped sweeps, next to the shipped configs."""
    return get_configs_folder().parent / "sweeps"


def list_shipped() -> tuple[str, ...]:
    """Return the names of the shipped sweeps, such as `ablation` and `formal/quick`."""
    return list_yaml_names(get_shipped_folder(), "**/*.yaml")


def is_run_as_fit(names: Sequence[str]) -> bool:
    """Return True if `fit --config` names one shipped config that has a sweep of the same name."""
    return len(names) == 1 and names[0] in list_shipped() and names[0] in list_config_names()
