"""What starts trials, and the command of a trial."""

import sys
from typing import Protocol

from stackexp.sweeps.trials import Trial


class Launcher(Protocol):
    """Starts trials in the background. The driver writes a trial's config.yaml before, and judges its exit code after;
    a trial that is started again goes on from its own checkpoint."""

    def start(self, trials: list[Trial]) -> None:
        """Begin these, their output appended to each one's log.txt. Returns at once."""

    def ended(self) -> list[tuple[Trial, int]]:
        """Those that ended since the last call, with the exit code of fit (negative: killed by that signal)."""

    def free(self) -> int:
        """How many more trials may be started now."""

    def cancel(self, trial: Trial) -> None:
        """SIGTERM to one trial: it saves and ends with 75. Returns at once."""

    def stop(self) -> None:
        """SIGTERM to all (they save and end with 75), wait for them, SIGKILL after a grace time."""


def fit_command(trial: Trial) -> list[str]:
    """Begin the trial, or go on from its checkpoint; ends at once if it has a result."""
    config, folder = str(trial.folder.config), str(trial.folder.path)
    return [sys.executable, "-m", "stackexp", "fit", "--config", config, "--run", folder]
