"""A driver process with the trials of sweep_trial.py: `python sweep_driver.py SWEEP PARALLEL RETRIES`."""

import sys
from argparse import Namespace
from pathlib import Path

from stackexp import cli
from stackexp.sweeps import driver
from stackexp.sweeps.display import Display
from stackexp.sweeps.launchers.local import LocalLauncher
from stackexp.sweeps.schema import Resources
from stackexp.sweeps.sweep import load_sweep
from stackexp.sweeps.trials import Trial
from stackexp.verbs.parser import Parser, Verb


def build_fake_command(trial: Trial) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("sweep_trial.py")), str(trial.folder.path)]


class Drive(Verb):
    """Run a sweep with fake trials."""

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("sweep")
        parser.add_argument("parallel", type=int)
        parser.add_argument("retries", type=int)

    def run(self, args: Namespace) -> int:
        driver.POLL_SECONDS, driver.RECHECK_SECONDS = 0.1, 1
        sweep = load_sweep(args.sweep)
        launcher = LocalLauncher(sweep.folder, sweep.trials, Resources(), args.parallel, build_fake_command)
        with Display(sweep.config.objective) as display:
            source, show = driver.TrialSource(sweep.trials), display.update
            driver.Driver(sweep.folder, source, launcher, retries=args.retries, show_progress=show).run()
        return 0


if __name__ == "__main__":
    sys.modules["stackexp.verbs.drive"] = sys.modules["__main__"]  # a verb: errors and exit codes as the program's
    cli.VERBS["drive"] = "run a sweep with fake trials"
    sys.exit(cli.main(["drive", *sys.argv[1:]]))
