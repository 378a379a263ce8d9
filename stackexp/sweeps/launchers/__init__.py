"""The launchers of trials, by name. To add one, write its module and add a line to LAUNCHERS."""

import importlib

from stackexp.sweeps.launchers.base import Launcher

LAUNCHERS = {
    "local": "stackexp.sweeps.launchers.local:LocalLauncher",
    "slurm": "stackexp.sweeps.launchers.slurm:SlurmLauncher",
}


def load_launcher(name: str) -> type[Launcher]:
    """Import the launcher class of a name in LAUNCHERS."""
    module, _, attribute = LAUNCHERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
