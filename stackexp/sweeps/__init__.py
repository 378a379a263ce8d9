"""Sweeps: several runs of one study. Their run folders are the only record.

This module imports little, because every `fit` asks if its config is run as a sweep.
"""

from collections.abc import Sequence

from stackexp.config.layers import list_config_names, list_shipped


def is_run_as_fit(names: Sequence[str]) -> bool:
    """Return True if `fit --config` names one shipped config that has a sweep of the same name."""
    return len(names) == 1 and names[0] in list_shipped("sweep") and names[0] in list_config_names()
