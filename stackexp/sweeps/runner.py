"""Run a sweep, and report its status and cost."""

from stackexp.errors import ConfigError
from stackexp.files import write_atomically
from stackexp.planning.cost import plan
from stackexp.reports.tables import format_table
from stackexp.sweeps.control import has_driver
from stackexp.sweeps.display import ALIGN, COLUMNS, format_status, format_summary, open_display
from stackexp.sweeps.driver import Driver, FixedTrials
from stackexp.sweeps.launchers import LAUNCHERS, load_launcher
from stackexp.sweeps.search import Study
from stackexp.sweeps.status import State, read_status
from stackexp.sweeps.sweep import COPY, Sweep


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


def format_dry_run(sweep: Sweep) -> str:
    """Return the trials of a sweep with their estimated cost, and what is left of it, in GPU-hours."""
    statuses = [read_status(trial, sweep.config.objective) for trial in sweep.trials]
    base = plan(sweep.base_trial.config)
    total = left = 0.0
    rows = []
    for status in statuses:
        config = status.trial.config
        hours = plan(config).gpu_hours
        is_settled = status.state in (State.DONE, State.PRUNED)
        remaining = 0.0 if is_settled else hours * (1 - status.step / config.trainer.max_steps)
        total, left = total + hours, left + remaining
        costs = [f"{config.trainer.max_steps:,}", f"{config.total_tokens:,}", *map(_format_hours, (hours, remaining))]
        rows.append([status.trial.name, status.state, *costs])
    if sweep.config.search:
        count = max(0, sweep.config.search.trials - len(statuses))
        hours = count * base.gpu_hours
        total, left = total + hours, left + hours
        rows.append([f"{count} more", "not chosen", "", "", *[_format_hours(hours)] * 2])
    header = ["trial", "state", "steps", "tokens", "GPU-hours", "left"]
    summary = (
        f"{format_summary(statuses)}; {_format_hours(total)} GPU-hours in total, {_format_hours(left)} left, "
        f"on {base.device} at {base.mfu:.0%} of its FLOP/s"
    )
    return f"{format_table(rows, header=header, align='<<>>>>')}\n\n{summary}"


def format_sweep_status(sweep: Sweep) -> str:
    """Return one row for each trial: its state, its progress, and its queued job or the cause of its failure."""
    statuses = [read_status(trial, sweep.config.objective) for trial in sweep.trials]
    jobs = {
        name: job for launcher in LAUNCHERS for name, job in load_launcher(launcher).find_jobs(sweep.folder).items()
    }
    rows = [[*format_status(status)[:-1], jobs.get(status.trial.name, status.cause)] for status in statuses]
    drivers = "a driver is running" if has_driver(sweep.folder) else "no driver is running"
    summary = f"{sweep.folder}: {format_summary(statuses)}; {drivers}"
    return f"{format_table(rows, header=COLUMNS, align=ALIGN)}\n\n{summary}"


def _format_hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.3g}"
