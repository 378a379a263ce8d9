"""Choose where a run starts: in a new folder, or from a checkpoint that its config can resume."""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from stackexp import runs
from stackexp.config.affects import find_changed_keys, flatten_config
from stackexp.config.compose import load_config
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.yaml_files import flatten, upgrade_run_options
from stackexp.errors import DamagedCheckpointError, RunError
from stackexp.metric_tags import TRAIN_LOSS
from stackexp.models import checkpoints
from stackexp.runs import RunFolder

log = logging.getLogger(__name__)


class Start(NamedTuple):
    """The folder of a run, and the checkpoint and step it resumes from."""

    folder: RunFolder
    checkpoint: Path | None = None
    step: int = 0
    is_finished: bool = False
    newest: Path | None = None  # the newest checkpoint in the folder when this was chosen

    @property
    def is_branch(self) -> bool:
        """Return True if the checkpoint is that of another run."""
        return self.checkpoint is not None and not _contains(self.folder, self.checkpoint)


def find_start(
    config: ExperimentConfig, ckpt_path: str | None, run_folder: str | None, overridden: Collection[str] = ()
) -> Start:
    """Find where to start: in `run_folder`, from the checkpoint `ckpt_path` ("last" or a path), or in a new folder.

    Some options, such as trainer.max_steps, may change within a run, but only if their keys are in `overridden`.
    Raises RunError if there is nothing to resume, or if the config does not match the checkpoint's.
    """
    if run_folder:
        run = RunFolder(Path(run_folder))
        if run.is_finished:
            _check_finished(run, config)
            return Start(run, is_finished=True)
        run.create()
        has_checkpoint = run.newest_checkpoint() or any(run.checkpoints.glob("*.ckpt"))  # .ckpt is refused by name
        if not has_checkpoint and (parent := _find_parent(run)):
            return _resume(parent, run, config, overridden=flatten_config(config))  # accepted when it branched
        return _resume_newest(run, config, overridden) if has_checkpoint else Start(run)
    if ckpt_path is None:
        return Start(runs.allocate_run(config))
    if ckpt_path == "last":
        return _resume_newest(runs.find_unfinished_run(config), config, overridden)
    return _resume_path(Path(ckpt_path), config, overridden)


def _find_parent(run: RunFolder) -> Path | None:
    """Return the checkpoint that a run branched from, or None."""
    origins = (session.get("origin") or {} for session in run.read_sessions())
    return next((Path(origin["path"]) for origin in origins if origin.get("is_branch")), None)


def _contains(folder: RunFolder, checkpoint: Path) -> bool:
    return checkpoint.parent.resolve() == folder.checkpoints.resolve()


def _check_finished(run: RunFolder, config: ExperimentConfig) -> None:
    """Raise RunError if the config differs from that of the finished run."""
    ours, theirs = flatten_config(config), flatten_config(load_config(run.config))
    for key in find_changed_keys(ours, theirs, ["training", "continuation", "evaluation"]):
        newest = run.newest_checkpoint()
        branch = f", or branch from a checkpoint with --ckpt_path {newest}" if newest else ""
        raise RunError(
            f"{run.path}: this run is finished, with {key} {theirs.get(key)}; the config has {ours.get(key)}; choose "
            f"another --run{branch}"
        )


def _resume_newest(run: RunFolder, config: ExperimentConfig, overridden: Collection[str]) -> Start:
    """Resume the newest checkpoint that is not damaged, in the run's own folder."""
    paths = run.list_checkpoints()[::-1] or sorted(run.checkpoints.glob("*.ckpt"))
    for path, older in zip(paths, [*paths[1:], None], strict=True):
        try:
            return _resume(path, run, config, overridden)
        except DamagedCheckpointError as error:
            if older is None:
                raise
            log.warning("%s: damaged (%s); resuming from %s instead", path, error.reason, older.name)
    raise RunError(f"{run.checkpoints}: no checkpoint; start a new run")


def _resume_path(path: Path, config: ExperimentConfig, overridden: Collection[str]) -> Start:
    """Resume a checkpoint: in its own run if it is the newest of an unfinished run of this name, else in a branch."""
    if path.name == checkpoints.EMA:
        raise RunError(f"{path}: no such checkpoint; give a folder in a run's checkpoints/, or last")
    run = RunFolder(path.parent.parent)
    is_same_name = run.path.parent.resolve() == Path(config.logging.root, config.name).resolve()
    newest = run.newest_checkpoint()
    is_newest = newest is not None and newest.resolve() == path.resolve()
    if is_same_name and is_newest and run.config.is_file() and not run.is_finished:
        return _resume(path, run, config, overridden)
    return _resume(path, runs.allocate_run(config), config, overridden)


def _resume(path: Path, folder: RunFolder, config: ExperimentConfig, overridden: Collection[str]) -> Start:
    state = checkpoints.load_state(path)
    check_resumable(path, state, config, overridden)
    checkpoints.check_files(path)
    step, last, is_own = state["global_step"], config.trainer.max_steps, _contains(folder, path)
    if step > last or (step == last and not is_own):
        raise RunError(f"{path}: already at step {step} of trainer.max_steps {last}; raise trainer.max_steps")
    if is_own:
        _check_log(folder, step)
    return Start(folder, path, step, newest=folder.newest_checkpoint())


def _check_log(folder: RunFolder, step: int) -> None:
    """Raise RunError if metrics.jsonl lacks steps before the checkpoint, because final figures would be wrong."""
    logged = max((line["step"] for line in folder.read_metrics() if TRAIN_LOSS in line), default=0)
    if logged < step:
        raise RunError(
            f"{folder.metrics}: ends at step {logged}, but the checkpoint is at step {step}; restore the file, or "
            "branch into a new folder with --ckpt_path and another name=NAME"
        )


def check_resumable(
    path: Path, state: dict[str, Any], config: ExperimentConfig, overridden: Collection[str] = ()
) -> None:
    """Raise RunError, naming the first option that differs, if the config cannot resume the checkpoint's run.

    Options that may change within a run are logged if they are in `overridden`, and refused otherwise.
    """
    ours, theirs = flatten_config(config), flatten(upgrade_run_options(state["stackexp"]["config"]))
    for key in find_changed_keys(ours, theirs, ["training"]):
        kind = "different architecture" if key.startswith("model.") else "different run"
        raise RunError(
            f"{path}: {kind}: {key} is {theirs.get(key)} in the checkpoint, {ours.get(key)} in the config; "
            "resume with the run's own config.yaml, or start a new run"
        )
    for key in find_changed_keys(ours, theirs, ["continuation"]):
        before, now = theirs.get(key), ours.get(key)
        if key not in overridden:
            raise RunError(
                f"{path}: {key} is {before} in the checkpoint, {now} in the config; to change it from here on, add "
                f"the override {key}={now}"
            )
        log.warning("%s changes from %s to %s after step %s", key, before, now, state["global_step"])
