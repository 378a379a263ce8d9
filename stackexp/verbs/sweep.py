"""Run sweeps, and show, stop and compare their trials."""

import shlex
import signal
from argparse import Namespace

from stackexp.verbs.parser import Parser, Verb, count, flag
from stackexp.verbs.report import Grid


class Run(Verb):
    """Run the missing trials of a sweep: start new ones, resume stopped ones, retry failed ones.

    The overrides apply to the base config of every trial. The run folders are the only record: the same command runs
    the remaining trials, and any number of workers may run at once. With --launcher slurm, the workers are submitted as
    an array job.
    """

    examples = ("sweep run quick_grid", "sweep run stack_grid --dry-run", "sweep run mine.yaml --max-parallel 4 seed=1")

    def add_arguments(self, parser: Parser) -> None:
        parser.add_sweep()
        parser.add_argument("--launcher", choices=["local", "slurm"], default="local", help="default: local")
        parser.add_argument("--max-parallel", **count(1, "trials at once (default: as many as fit)"))
        parser.add_argument("--retries", **count(0, "retries of a failed trial (default: as in the YAML)"))
        dry_run = "print the trials and the remaining cost; with --launcher slurm, also the batch scripts"
        parser.add_argument("--dry-run", **flag(dry_run))
        parser.add_argument("--worker", **flag("run as a worker of a Slurm job, as batch scripts do"))

    def run(self, args: Namespace) -> int:
        if args.worker:  # the warning before the time limit waits until the worker handles it
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        from stackexp.sweeps.sweep import load_sweep

        sweep = load_sweep(args.sweep, args.overrides)
        sweep.check_trials()
        retries = sweep.config.retries if args.retries is None else args.retries
        if args.dry_run:
            from stackexp.sweeps.slurm import build_script, plan_arrays
            from stackexp.sweeps.status import format_dry_run

            print(format_dry_run(sweep))
            for array in plan_arrays(sweep, args.max_parallel, []) if args.launcher == "slurm" else []:
                print(f"\n{build_script(sweep, array, args.max_parallel, retries)}", end="")
            return 0
        from stackexp.sweeps.worker import run_job, run_sweep

        if args.worker:
            run_job(sweep, max_parallel=args.max_parallel, retries=retries)
            return 0
        run_sweep(sweep, launcher=args.launcher, max_parallel=args.max_parallel, retries=retries)
        folder = shlex.quote(str(sweep.folder))
        print(f"\nresults:  python -m stackexp sweep results {folder}", flush=True)
        print(f"curves:   tensorboard --logdir {folder}", flush=True)
        return 0


class Status(Verb):
    """Show the state of each trial of a sweep, and why trials failed."""

    examples = ("sweep status quick_grid", "sweep status runs/quick_grid")

    def add_arguments(self, parser: Parser) -> None:
        parser.add_sweep()

    def run(self, args: Namespace) -> int:
        from stackexp.sweeps.sweep import load_last_run

        sweep = load_last_run(args.sweep, args.overrides)
        sweep.check_trials()
        from stackexp.sweeps.status import format_sweep_status, read_statuses

        print(format_sweep_status(sweep, read_statuses(sweep)))
        return 0


class Stop(Verb):
    """Stop a sweep: its running trials save a checkpoint and exit; `sweep run` resumes them."""

    examples = ("sweep stop quick_grid",)

    def add_arguments(self, parser: Parser) -> None:
        parser.add_sweep()

    def run(self, args: Namespace) -> int:
        from stackexp.sweeps.sweep import load_last_run

        sweep = load_last_run(args.sweep, args.overrides)
        from stackexp.sweeps.status import format_summary, read_statuses
        from stackexp.sweeps.worker import stop_sweep

        stop_sweep(sweep)
        print(format_summary(read_statuses(sweep)))
        return 0


class Results(Grid):
    """Compare the finished trials of a sweep by its objective, the best first. `--figure` draws them."""

    examples = ("sweep results stack_grid", "sweep results quick_grid --markdown")
