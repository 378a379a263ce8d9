"""Run a small sweep with the command of a single run, as `fit --config formal/quick` does."""

from collections.abc import Sequence

from stackexp.config.layers import list_config_names
from stackexp.sweeps.sweep import list_shipped, load_sweep


def is_sweep(names: Sequence[str]) -> bool:
    """Return True if `fit --config` names one shipped config that has a sweep of the same name."""
    return len(names) == 1 and names[0] in list_shipped() and names[0] in list_config_names()


def run_as_fit(name: str, overrides: Sequence[str]) -> int:
    """Run the missing trials of a sweep on a formal language one after the other, then print the scores of all.

    Returns the exit code. Raises what `run_sweep` raises; the same command resumes.
    """
    sweep = load_sweep(name, overrides)
    sweep.check_trials()
    from stackexp.evaluation.accuracy import format_curves, parse_accuracy
    from stackexp.sweeps.runner import run_sweep

    run_sweep(sweep, max_parallel=1)
    results = [trial.folder.read_result().to_dict() for trial in sweep.trials]
    curves = {result["model"]: parse_accuracy(result) for result in results}
    print(f"\n{format_curves(sweep.trials[0].config.data, curves)}\n")
    print("\n".join(f"run folder: {trial.folder.path}" for trial in sweep.trials))
    print(f"curves:     tensorboard --logdir {sweep.folder}", flush=True)
    return 0
