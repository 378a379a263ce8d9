"""Choose the start of a run: a new folder, or a checkpoint that its config can resume."""

from pathlib import Path
from typing import Any, NamedTuple

from stackexp import runs
from stackexp.config.affects import changed_keys, flatten_config
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.renames import translate_options
from stackexp.config.yaml_files import flatten
from stackexp.errors import RunError
from stackexp.models import checkpoints
from stackexp.runs import RunFolder


class Start(NamedTuple):
    """The folder of a run, and the checkpoint and step it resumes from."""

    folder: RunFolder
    checkpoint: Path | None = None
    step: int = 0
    is_finished: bool = False


def find_start(config: ExperimentConfig, ckpt_path: str | None, run_folder: str | None) -> Start:
    """Find where to start: in `run_folder`, after `ckpt_path` ("last" or a path), or in a new folder.

    Raises RunError if there is nothing to resume, or if the config does not match the checkpoint.
    """
    if run_folder:
        run = RunFolder(Path(run_folder))
        if run.is_finished:
            return Start(run, is_finished=True)
        old_format = run.checkpoints.glob("*.ckpt")  # refused with a message
        newest = run.newest_checkpoint() or max(old_format, default=None)
        return _resume(config, newest, run) if newest else Start(run)
    if ckpt_path is None:
        return Start(runs.allocate_run(config))
    if ckpt_path == "last":
        run = runs.find_unfinished_run(config)
        return _resume(config, checkpoints.find_checkpoint(run, "last"), run)
    return _resume(config, Path(ckpt_path), None)


def _resume(config: ExperimentConfig, path: Path, folder: RunFolder | None) -> Start:
    """Resume `path` in `folder`, or else in the checkpoint's folder if that is an unfinished run of the same name."""
    state = checkpoints.load_state(path)
    check_resumable(path, state, config)
    checkpoints.check_files(path)
    if folder is None:
        folder = RunFolder(path.parent.parent)
        is_same_name = folder.path.parent.resolve() == Path(config.logging.root, config.name).resolve()
        if not (is_same_name and folder.config.is_file()) or folder.is_finished:
            folder = runs.allocate_run(
                config
            )  # a copied checkpoint, a branch with another name, or more steps of a finished run
    step, last = state["global_step"], config.trainer.max_steps
    if step > last or (step == last and not folder.config.is_file()):
        raise RunError(f"{path}: already at step {step} of trainer.max_steps {last}; raise trainer.max_steps")
    return Start(folder, path, step)


def check_resumable(path: Path, state: dict[str, Any], config: ExperimentConfig) -> None:
    """Raise RunError, naming the first option that differs, unless the config can resume the checkpoint's run."""
    ours, theirs = flatten_config(config), translate_options(flatten(state["stackexp"]["config"]))
    for key in changed_keys(ours, theirs, ["training"]):
        kind = "different architecture" if key.startswith("model.") else "different run"
        raise RunError(
            f"{path}: {kind}: {key} is {theirs.get(key)} in the checkpoint, {ours.get(key)} in the config; "
            "resume with the run's own config.yaml, or start a new run"
        )
