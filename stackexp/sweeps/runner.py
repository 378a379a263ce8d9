"""Run a sweep, and report its status."""

import dataclasses

from stackexp.errors import ConfigError
from stackexp.files import write_atomically
from stackexp.sweeps.control import has_driver
from stackexp.sweeps.display import ALIGN, COLUMNS, format_status, format_summary, open_display
from stackexp.sweeps.driver import Driver, FixedTrials
from stackexp.sweeps.launchers import LAUNCHERS, load_launcher
from stackexp.sweeps.search import Study
from stackexp.sweeps.status import Status, read_status
from stackexp.sweeps.sweep import COPY, Sweep
from stackexp.tables import format_table


def run_sweep(
    sweep: Sweep, *, launcher: str = "local", max_parallel: int | None = None, retries: int | None = None
) -> None:
    """Run the missing trials of a sweep with a launcher of LAUNCHERS.

    Raises ConfigError before anything is written, then what `Driver.run` raises.
    """
    search, trials = sweep.config.search, sweep.trials
    if search and launcher != "local" and not max_parallel:
        raise ConfigError(
            f"sweep run: --launcher {launcher}: a search requires --max-parallel N; it chooses each trial by the "
            "results so far"
        )
    retries = sweep.config.retries if retries is None else retries
    source = Study(sweep, max_parallel) if search else FixedTrials(trials)
    expected = [sweep.base_trial] * search.trials if search else trials
    launched = load_launcher(launcher)(sweep.folder, expected, sweep.config.resources, max_parallel)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(sweep.folder / COPY, sweep.to_yaml())
    print(f"sweep folder  {sweep.folder}", flush=True)
    with open_display(sweep.config.objective) as display:
        Driver(sweep.folder, source, launched, retries=retries, display=display).run()


def read_statuses(sweep: Sweep) -> list[Status]:
    """Return the status of each trial. Of a queued trial, `cause` names the job."""
    jobs = {
        name: job for launcher in LAUNCHERS for name, job in load_launcher(launcher).find_jobs(sweep.folder).items()
    }
    statuses = [read_status(trial, sweep.config.objective) for trial in sweep.trials]
    return [dataclasses.replace(s, cause=jobs.get(s.trial.name, s.cause)) for s in statuses]


def format_sweep_status(sweep: Sweep, statuses: list[Status]) -> str:
    """Return one row for each trial: its state, its progress, and its queued job or the cause of its failure."""
    rows = [format_status(status) for status in statuses]
    drivers = "a driver is running" if has_driver(sweep.folder) else "no driver is running"
    summary = f"{sweep.folder}: {format_summary(statuses)}; {drivers}"
    return f"{format_table(rows, header=COLUMNS, align=ALIGN)}\n\n{summary}"
