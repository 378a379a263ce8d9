"""Run and stop a sweep."""

import time
from collections.abc import Sequence

from stackexp.errors import ConfigError, RunError
from stackexp.files import write_atomically
from stackexp.sweeps.display import Display
from stackexp.sweeps.driver import Driver, TrialSource, has_driver, request_stop
from stackexp.sweeps.launchers import LAUNCHERS, load_launcher
from stackexp.sweeps.search import Study
from stackexp.sweeps.sweep import COPY, Sweep, load_sweep

STOP_SECONDS = 180
"""Time that `stop_sweep` waits for the drivers."""


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
    source = Study(sweep, max_parallel) if search else TrialSource(trials)
    expected = [sweep.base_trial] * search.trials if search else trials
    launched = load_launcher(launcher)(sweep.folder, expected, sweep.config.resources, max_parallel)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(sweep.folder / COPY, sweep.to_yaml())
    print(f"sweep folder  {sweep.folder}", flush=True)
    with Display(sweep.config.objective) as display:
        Driver(sweep.folder, source, launched, retries=retries, show_progress=display.update).run()


def run_as_fit(name: str, overrides: Sequence[str]) -> int:
    """Run a small sweep on a formal language as `fit --config NAME`: one trial after the other, then all scores.

    Returns the exit code. Raises what `run_sweep` raises; the same command resumes.
    """
    sweep = load_sweep(name, overrides)
    sweep.check_trials()
    from stackexp.evaluation.accuracy import format_curves, parse_accuracy

    run_sweep(sweep, max_parallel=1)
    results = [trial.folder.read_result().to_dict() for trial in sweep.trials]
    curves = {result["model"]: parse_accuracy(result) for result in results}
    print(f"\n{format_curves(sweep.trials[0].config.data, curves)}\n")
    print("\n".join(f"run folder: {trial.folder.path}" for trial in sweep.trials))
    print(f"curves:     tensorboard --logdir {sweep.folder}", flush=True)
    return 0


def stop_sweep(sweep: Sweep) -> None:
    """Stop the drivers of a sweep, or jobs that run without one; wait until their trials have saved.

    Raises RunError if a driver is still running after STOP_SECONDS.
    """
    if not has_driver(sweep.folder):
        print(f"{sweep.folder}: no driver is running", flush=True)
        for name in LAUNCHERS:
            launcher = load_launcher(name)
            if launcher.find_jobs(sweep.folder):
                print(f"stopping its {name} jobs: running trials save a checkpoint", flush=True)
                launcher(sweep.folder, [], sweep.config.resources).stop()
        return
    request_stop(sweep.folder)
    print(f"{sweep.folder}: stopping; waiting until running trials have saved a checkpoint", flush=True)
    deadline = time.monotonic() + STOP_SECONDS
    while has_driver(sweep.folder):
        if time.monotonic() > deadline:
            raise RunError(f"{sweep.folder}: a driver is still running after {STOP_SECONDS} s; see `sweep status`")
        time.sleep(0.2)
