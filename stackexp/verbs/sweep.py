"""`stackexp sweep`: many runs of one study."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from stackexp.config.suggestions import nearest
from stackexp.errors import ConfigError, RunError
from stackexp.verbs.parser import Parser

USAGES = {
    "run": "SWEEP [--launcher local|slurm] [--max-parallel N] [--retries N] [--dry-run] [KEY=VALUE ...]",
    "status": "SWEEP [KEY=VALUE ...]",
    "stop": "SWEEP [KEY=VALUE ...]",
    "results": "SWEEP [--figures FOLDER] [--markdown | --json] [KEY=VALUE ...]",
}
PURPOSES = {
    "run": "Do what is missing of a sweep: start trials, go on with stopped ones, try failed ones again.",
    "status": "How each trial stands, and why it failed.",
    "stop": "Tell the drivers of a sweep to stop: their trials save and end.",
    "results": "The finished trials by their objective, the best first.",
}
EXAMPLES = {
    "run": ["sweep run quick_grid", "sweep run stack_grid --dry-run", "sweep run mine.yaml --max-parallel 4 seed=1"],
    "status": ["sweep status quick_grid", "sweep status runs/quick_grid"],
    "stop": ["sweep stop quick_grid"],
    "results": ["sweep results stack_grid --figures figures/", "sweep results quick_grid --markdown"],
}
ABOUT = """\
SWEEP is a shipped name (stack_grid, ablation, scaling, quick_grid, formal_table), a YAML file, or a sweep's folder in
runs/. KEY=VALUE lies on the base config of every trial. The run folders are the only record: the same command does
what is missing, with any number of drivers at once.
"""
STOP_SECONDS = 180
"""How long `sweep stop` waits for the drivers."""


def main(argv: list[str]) -> int:
    """Run `sweep run|status|stop|results`. Raises ConfigError before anything has been started, else RunError."""
    if argv[:1] in ([], ["-h"], ["--help"]):
        examples = [example for some in EXAMPLES.values() for example in some]
        parser = Parser("sweep", "Many runs of one study.", examples, "run|status|stop|results SWEEP [OPTIONS]", ABOUT)
        parser.parse_args(argv or ["--help"])
    if argv[0] not in USAGES:
        raise ConfigError(f"sweep: expected {', '.join(USAGES)}, found {argv[0]!r}{nearest(argv[0], USAGES)}")
    verb = argv[0]
    parser = Parser(f"sweep {verb}", PURPOSES[verb], EXAMPLES[verb], USAGES[verb], ABOUT)
    _add_options(parser, verb)
    options, rest = parser.split(argv[1:])
    if not rest or rest[0].startswith("-") or "=" in rest[0]:
        parser.error("SWEEP is missing: a shipped name, a YAML file or a sweep's folder")
    for name in ("max_parallel", "retries"):
        least, value = int(name == "max_parallel"), getattr(options, name, None)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')}: expected an integer >= {least}, found {value}")
    from stackexp.sweeps import grid

    sweep = grid.read(rest[0], rest[1:])
    if verb != "run" and not rest[1:] and (sweep.folder / grid.COPY).is_file():
        sweep = grid.read(str(sweep.folder))  # as it was last run, with the overrides it was given
    return {"run": _run, "status": _status, "stop": _stop, "results": _results}[verb](sweep, options)


def _add_options(parser: Parser, verb: str) -> None:
    if verb == "run":
        parser.add_argument("--launcher", choices=["local", "slurm"], default="local", help="default: local")
        parser.add_argument(
            "--max-parallel", type=int, metavar="N", help="trials at once (default: what there is room for)"
        )
        parser.add_argument("--retries", type=int, metavar="N", help="of a trial that fails (default: as in the YAML)")
        parser.add_argument("--dry-run", action="store_true", help="only print the trials and what is left to pay for")
    if verb == "results":
        parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw loss against H, d_s, S as PNG and PDF")
        form = parser.add_mutually_exclusive_group()
        form.add_argument("--markdown", action="store_true")
        form.add_argument("--json", action="store_true")


def _run(sweep: Any, options: argparse.Namespace) -> int:
    from stackexp.files import write_atomically
    from stackexp.sweeps import grid
    from stackexp.sweeps.search import Study, ends

    trials = sweep.trials
    search = sweep.config.search
    for values in ends(search) if search else []:
        sweep.trial(values, grid.label(values))
    if options.dry_run:
        return _dry_run(sweep)
    if search and options.launcher == "slurm" and not options.max_parallel:
        raise ConfigError(
            "sweep run: a search on Slurm needs --max-parallel N: each next trial is chosen by what is known"
        )
    from stackexp.sweeps.display import display
    from stackexp.sweeps.driver import Driver, Fixed

    retries = sweep.config.retries if options.retries is None else options.retries
    source = Study(sweep, options.max_parallel) if search else Fixed(trials)
    launcher = _launcher(sweep, options)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(sweep.folder / grid.COPY, sweep.copy())
    print(f"sweep folder  {sweep.folder}")
    with display(sweep.config.objective) as shown:
        Driver(sweep.folder, source, launcher, retries, shown).run()
    print(
        f"\nresults:  python -m stackexp sweep results {sweep.folder}\ncurves:   tensorboard --logdir {sweep.folder}",
        flush=True,
    )
    return 0


def _launcher(sweep: Any, options: argparse.Namespace) -> Any:
    if options.launcher == "slurm":
        from stackexp.sweeps.slurm import SlurmLauncher

        return SlurmLauncher(sweep.folder, sweep.config.resources, options.max_parallel)
    from stackexp.sweeps.local import LocalLauncher

    of_search = [] if sweep.config.search is None else [sweep.any_trial] * sweep.config.search.trials
    return LocalLauncher(of_search or sweep.trials, options.max_parallel)


def _statuses(sweep: Any) -> list[Any]:
    from stackexp.sweeps import status

    return [status.read(trial, sweep.config.objective) for trial in sweep.trials]


def _dry_run(sweep: Any) -> int:
    from stackexp.planning.cost import plan
    from stackexp.reports.tables import table
    from stackexp.sweeps.display import summary
    from stackexp.sweeps.status import State

    statuses, typical = _statuses(sweep), plan(sweep.any_trial.config)
    total = left = 0.0
    rows = [["trial", "state", "steps", "tokens", "GPU-hours", "left"]]
    for status in statuses:
        config = status.trial.config
        hours = plan(config).gpu_hours
        settled = status.state in (State.DONE, State.PRUNED)
        remaining = 0.0 if settled else hours * (1 - status.step / config.trainer.max_steps)
        total, left = total + hours, left + remaining
        figures = [f"{config.trainer.max_steps:,}", f"{config.total_tokens:,}", _hours(hours), _hours(remaining)]
        rows.append([status.trial.name, status.state, *figures])
    if sweep.config.search:
        more = max(0, sweep.config.search.trials - len(statuses))
        total, left = total + more * typical.gpu_hours, left + more * typical.gpu_hours
        rows.append([f"{more} more", "unchosen", "", "", *[_hours(more * typical.gpu_hours)] * 2])
    print(table(rows, align="<<>>>>", rules=(1,)))
    at = f"on {typical.device} at {typical.mfu:.0%} of its FLOP/s"
    print(f"\n{summary(statuses)}; {_hours(total)} GPU-hours in all, {_hours(left)} left, {at}")
    return 0


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.3g}"


def _status(sweep: Any, _: argparse.Namespace) -> int:
    from stackexp.reports.tables import table
    from stackexp.sweeps.display import COLUMNS, cells_of, summary
    from stackexp.sweeps.driver import has_driver

    statuses, jobs = _statuses(sweep), _jobs(sweep)
    rows = [[*cells_of(status)[:-1], str(jobs.get(status.trial.name, status.cause))] for status in statuses]
    print(table([COLUMNS, *rows], align="<<>>>>>><", rules=(1,)))
    print(f"\n{sweep.folder}: {summary(statuses)}; {'a' if has_driver(sweep.folder) else 'no'} driver is at work")
    return 0


def _jobs(sweep: Any) -> dict[str, Any]:
    """Name of the trial -> its job in Slurm's queue, if this machine knows of one."""
    from stackexp.sweeps import slurm

    if not slurm.available():
        return {}
    try:
        return slurm.jobs(sweep.folder)
    except slurm.NoAnswer as error:
        print(f"{error}\n")
        return {}


def _stop(sweep: Any, _: argparse.Namespace) -> int:
    from stackexp.sweeps.display import summary
    from stackexp.sweeps.driver import has_driver, order_stop
    from stackexp.sweeps.slurm import SlurmLauncher

    if not has_driver(sweep.folder):
        if _jobs(sweep):
            print(f"{sweep.folder}: no driver is at work; its jobs are told to stop and to save", flush=True)
            SlurmLauncher(sweep.folder, sweep.config.resources, None).stop()
            print(summary(_statuses(sweep)))
            return 0
        print(f"{sweep.folder}: no driver is at work; {summary(_statuses(sweep))}")
        return 0
    order_stop(sweep.folder)
    print(f"{sweep.folder}: told to stop; waiting for running trials to save", flush=True)
    deadline = time.monotonic() + STOP_SECONDS
    while has_driver(sweep.folder):
        if time.monotonic() > deadline:
            raise RunError(f"{sweep.folder}: a driver is still at work after {STOP_SECONDS} s; see `sweep status`")
        time.sleep(0.2)
    print(summary(_statuses(sweep)))
    return 0


def _results(sweep: Any, options: argparse.Namespace) -> int:
    from stackexp.reports import sweeps as report

    rows = report.collect(sweep)
    if not rows:
        raise RunError(f"{sweep.folder}: no trial is done yet; `sweep status` shows how they stand")
    if options.json:
        print(json.dumps([row.as_dict() for row in rows], indent=2))
    else:
        print(report.results_table(sweep, rows, markdown=options.markdown))
    for path in report.draw(sweep, rows, options.figures) if options.figures else []:
        print(path)
    return 0
