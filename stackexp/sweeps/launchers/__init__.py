"""The launchers of trials by name. To add one, write a module with a `Launcher` and add a line to LAUNCHERS."""

import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from stackexp.sweeps.schema import Resources
from stackexp.sweeps.trials import Trial

LAUNCHERS = {
    "local": "stackexp.sweeps.launchers.local:LocalLauncher",
    "slurm": "stackexp.sweeps.launchers.slurm:SlurmLauncher",
}

Command = Callable[[Trial], list[str]]


def build_fit_command(trial: Trial) -> list[str]:
    """Return the command that starts a trial or resumes it from its checkpoint; it ends at once if it has a result."""
    config, folder = str(trial.folder.config), str(trial.folder.path)
    return [sys.executable, "-m", "stackexp", "fit", "--config", config, "--run", folder]


class Launcher(Protocol):
    """Starts trials in the background.

    The driver writes a trial's config.yaml before the start and judges the exit code after the end. A trial that is
    started again resumes from its own checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        trials: list[Trial],
        resources: Resources,
        max_parallel: int | None = None,
        command: Command = build_fit_command,
    ) -> None:
        """Prepare to run trials of the sweep in `folder`. Raises ConfigError if this machine cannot run them."""

    def start(self, trials: list[Trial]) -> None:
        """Start these trials, appending their output to each one's log.txt. Returns at once."""

    def collect_ended(self) -> list[tuple[Trial, int]]:
        """Return the trials that ended since the last call and fit's exit codes (negative: killed by that signal)."""

    def count_free(self) -> int:
        """Return how many more trials may be started now."""

    def cancel(self, trial: Trial) -> None:
        """Send SIGTERM to one trial, which then saves and exits with 75. Returns at once."""

    def stop(self) -> None:
        """Send SIGTERM to all trials (they save and exit with 75) and wait for them; SIGKILL after a grace period."""

    @staticmethod
    def find_jobs(folder: Path) -> dict[str, str]:
        """Return {trial name: description} of the sweep's waiting and running jobs, with or without a driver."""


def load_launcher(name: str) -> type[Launcher]:
    """Import the launcher class of a name in LAUNCHERS."""
    return pkgutil.resolve_name(LAUNCHERS[name])
