"""A driver as a process of its own, with the trials of sweep_trial.py: `python sweep_driver.py SWEEP PARALLEL RETRIES`.

Exit codes as the command line's.
"""

import sys
from pathlib import Path

from stackexp import cli
from stackexp.sweeps import grid
from stackexp.sweeps.display import Lines
from stackexp.sweeps.driver import Driver, Fixed
from stackexp.sweeps.local import LocalLauncher


def fake_command(trial: object) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("sweep_trial.py")), str(trial.folder.path)]


def main(argv: list[str]) -> int:
    sweep = grid.read(argv[0])
    launcher = LocalLauncher(sweep.trials, int(argv[1]), fake_command)
    Driver(sweep.folder, Fixed(sweep.trials), launcher, int(argv[2]), Lines(sweep.config.objective)).run()
    return 0


if __name__ == "__main__":
    cli.VERBS["drive"] = main
    sys.exit(cli.main(["drive", *sys.argv[1:]]))
