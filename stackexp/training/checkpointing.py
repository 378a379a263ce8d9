"""Save and resume the checkpoints of a run, and choose where a run starts.

`StepCheckpoint` decides when to save. The strategy collects the tensors, `StepCheckpoint` everything else, and
`stackexp.models.checkpoints` writes both. On resume, they load them.
"""

import itertools
import json
import logging
import random
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from stackexp import runs
from stackexp.config.affects import find_changed_keys, flatten_config
from stackexp.config.compose import load_config, to_dict
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.trainer import TrainerConfig
from stackexp.config.yaml_files import flatten
from stackexp.datamodules.base import check_resumable
from stackexp.errors import DamagedCheckpointError, RunError, StoppedError, first_line
from stackexp.evaluation.request import hash_validation
from stackexp.metric_tags import AVERAGE_ACCURACY, AVERAGE_LOSS, TRAIN_LOSS
from stackexp.models import checkpoints
from stackexp.models.checkpoints import CHECKPOINT_VERSION, CheckpointWriter
from stackexp.modules.base import TrainingModule
from stackexp.runs import EMA, RunFolder, damaged_error, format_checkpoint_name, remove_checkpoint, write_validation
from stackexp.training.callbacks import data_record
from stackexp.training.callbacks.steps import StepCallback
from stackexp.training.lightning_internals import has_position, rescale_progress
from stackexp.training.signals import StopRequest
from stackexp.training.watchdog import restart_timeouts

log = logging.getLogger(__name__)


def build_strategy(config: ExperimentConfig, device_type: str) -> Strategy:
    """Build the strategy of `trainer.strategy`; auto is single on one device, else ddp."""
    trainer = config.trainer
    if trainer.is_sharded:
        return Sharded(data_parallel_size=trainer.world_size, tensor_parallel_size=1)
    if trainer.strategy == "ddp" or trainer.world_size > 1:
        return Replicated()
    return SingleDevice(torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type))


class _DistributedCheckpoints:
    """A mixin that saves model and optimizer in the background, and loads them, with torch.distributed.checkpoint."""

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False

    # Lightning's own state has no tensors: `save_checkpoint` and `load_checkpoint` transfer them

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        pass

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Start writing a checkpoint; `storage_options` is {"writer": CheckpointWriter, "on_saved": callable}.

        Raises RunError if another callback than `StepCheckpoint` saves one.
        """
        if not storage_options:
            raise RunError(f"{filepath}: a callback cannot save checkpoints; set trainer.checkpoint_interval instead")
        writer: CheckpointWriter = storage_options["writer"]
        writer.save(Path(filepath), self._collect_tensors(), checkpoint, storage_options["on_saved"])

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(checkpoint_path)
        state = checkpoints.load_state(path)
        theirs, ours = state["pytorch-lightning_version"], pl.__version__
        if theirs != ours and self.is_global_zero:
            log.warning("%s: saved with Lightning %s, not %s; if this fails, install %s", path, theirs, ours, theirs)
        state["pytorch-lightning_version"] = ours  # Lightning would migrate the state of another version
        tensors = self._collect_tensors()
        checkpoints.load_tensors(tensors, path)
        set_model_state_dict(self.lightning_module.model, tensors["model"])
        set_optimizer_state_dict(self.lightning_module.model, self.optimizers[0], tensors["optimizer"])
        return state

    def _collect_tensors(self) -> dict[str, Any]:
        module, (optimizer,) = self.lightning_module, self.optimizers
        model, average = module.model, module.weight_average
        tensors = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        return tensors | ({EMA: average.tensors} if average else {})


class SingleDevice(_DistributedCheckpoints, SingleDeviceStrategy):
    """One device."""


class Replicated(_DistributedCheckpoints, DDPStrategy):
    """A copy of the model on each device (DDP)."""


class Sharded(_DistributedCheckpoints, ModelParallelStrategy):
    """A shard of every weight on each device (FSDP2); `TrainingModule.configure_model` shards the model."""


class StepCheckpoint(StepCallback, pl.callbacks.Checkpoint):
    """Saves <step>/ every `checkpoint_interval` steps, on request, after the last step, and before stopping.

    The last step is `max_steps`, or the step after which a callback sets `trainer.should_stop`.

    Keeps the newest `keep_checkpoints` and the best one, which has the lowest mean validation loss. Saves between two
    optimizer steps, before a validation that is due at the same step. Saving is a collective operation, so all ranks
    must make the same decision.

    A checkpoint also has the config, the tokens trained on, and the random states, which a resumed run restores.
    """

    def __init__(self, folder: RunFolder, config: TrainerConfig, stop: StopRequest):
        self._folder, self._config, self._stop = folder, config, stop
        self._writer = CheckpointWriter()
        self._tokenizer_sha256: str | None = None
        self._loaded: tuple[int, bool] | None = None  # step and `has_position` of the checkpoint that is resumed
        self._is_ended = False  # by a callback, before this session
        self._should_stop = False  # at the end of this step, because a callback has stopped within it

    def on_fit_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        # On a slow disk, writing a checkpoint can take longer than a timeout.
        self._writer.note_progress = lambda: restart_timeouts(trainer, self._stop)
        if trainer.is_global_zero:
            self._tokenizer_sha256 = self._folder.read_tokenizer_hash()

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Raise RunError for a training loader whose position would not be saved, or was not restored."""
        super().on_train_start(trainer, module)
        check_resumable(trainer.train_dataloader)
        if self._loaded:
            step, is_positioned = self._loaded
            needs_position = hasattr(trainer.train_dataloader, "load_state_dict")
            if trainer.global_step != step or (needs_position and not is_positioned):
                reason = f"{checkpoints.STATE} lacks its position in the training data, or counts other steps"
                raise damaged_error(Path(str(trainer.ckpt_path)), reason)
        trainer.should_stop |= self._is_ended

    def on_save_checkpoint(self, trainer: pl.Trainer, module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer)
        device = trainer.strategy.root_device
        checkpoint["stackexp"] = {
            "version": CHECKPOINT_VERSION,
            "config": to_dict(module.config),
            "accumulate_grad_batches": module.config.accumulate_grad_batches,
            "is_ended": trainer.should_stop,  # by a callback
            "is_validated": trainer.validating,  # callbacks have the scores of this step
            "tokens": module.tokens,
            "tokenizer_sha256": self._tokenizer_sha256,
            "python_rng": random.getstate(),
            "numpy_rng": [
                value.tolist() if isinstance(value, np.ndarray) else value for value in np.random.get_state()
            ],
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        }

    def on_load_checkpoint(self, trainer: pl.Trainer, module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        """Restore the random states, those of rank 0 on all ranks, and rescale the progress."""
        state = checkpoint["stackexp"]
        before, now = state["config"]["trainer"], self._config
        is_same = (before["max_steps"], before.get("callbacks", [])) == (now.max_steps, now.callbacks)
        is_own = _contains(self._folder, Path(str(trainer.ckpt_path)))
        self._is_ended = state.get("is_ended", False) and is_same and is_own
        self._loaded = checkpoint["global_step"], has_position(checkpoint)
        random.setstate(state["python_rng"])
        if "numpy_rng" in state:  # not in checkpoints of earlier versions
            np.random.set_state(tuple(state["numpy_rng"]))
        torch.set_rng_state(state["torch_rng"])
        cuda_rng = state["cuda_rng"]
        device = trainer.strategy.root_device  # `module` may still be on the CPU
        if cuda_rng is not None and device.type == "cuda":
            torch.cuda.set_rng_state(cuda_rng, device)
        rescale_progress(checkpoint, state["accumulate_grad_batches"], module.config.accumulate_grad_batches)

    def on_train_batch_end(self, trainer: pl.Trainer, module: TrainingModule, *args: Any) -> None:
        """Postpone a stop by a callback in the middle of a step, such as `Timer`, to its end, where it can be saved."""
        is_step_end = trainer.global_step != self._step
        self._should_stop |= trainer.should_stop
        trainer.should_stop = is_step_end and self._agree(trainer, self._should_stop)
        super().on_train_batch_end(trainer, module, *args)

    def _agree(self, trainer: pl.Trainer, should_stop: bool) -> bool:
        """Return True if a callback of the user has stopped any rank. Every rank calls this: all stop at one step."""
        has_own = bool(self._config.callbacks)
        return trainer.strategy.reduce_boolean_decision(should_stop, all=False) if has_own else should_stop

    def on_step_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Save if the step requires it, then stop if requested."""
        requests = module.step_metrics.requests
        is_last = self._step == self._config.max_steps
        if "stop" in requests:
            self._stop.end_grace_period()
        is_due = self._step % self._config.checkpoint_interval == 0
        if is_due or is_last or requests or trainer.should_stop:
            self._save(trainer)
        if "stop" in requests and not is_last:
            self._writer.wait()
            raise self._stop.build_error()

    def _save(self, trainer: pl.Trainer) -> None:
        path = self._folder.checkpoints / format_checkpoint_name(self._step)
        trainer.save_checkpoint(path, storage_options={"writer": self._writer, "on_saved": self._delete_old})

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Store the scores with the checkpoint of this step, if there is one, before they are logged."""
        path = self._folder.checkpoints / format_checkpoint_name(trainer.global_step)
        if trainer.state.fn != "fit":
            return
        self._writer.wait()
        if trainer.is_global_zero and path.is_dir():
            tags = module.tag_validation_scores()
            if AVERAGE_LOSS in tags:
                data = hash_validation(module.config, trainer.datamodule)
                write_validation(path, tags[AVERAGE_LOSS], tags.get(AVERAGE_ACCURACY), data)

    def on_validation_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Save the last step if a callback has ended the training in this validation, such as EarlyStopping."""
        if trainer.state.fn != "fit":
            return
        trainer.should_stop = self._agree(trainer, trainer.should_stop)
        if trainer.should_stop and self._saved_step != self._step:
            self._save(trainer)
            self.on_validation_epoch_end(trainer, module)

    def _delete_old(self) -> None:
        try:
            best = self._folder.best_checkpoint()
            for old in self._folder.list_checkpoints()[: -self._config.keep_checkpoints]:
                if old != best:
                    remove_checkpoint(old)
        except (OSError, RunError) as error:  # such as a file that another process reads over NFS
            log.warning("could not delete an old checkpoint: %s", first_line(error))

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._writer.wait()
        if trainer.is_global_zero:
            self._delete_old()  # again, because the last validation may have changed the best

    def on_exception(self, trainer: pl.Trainer, module: TrainingModule, exception: BaseException) -> None:
        """Finish the pending checkpoint, unless another rank may have died."""
        if isinstance(exception, StoppedError) or not dist.is_initialized():  # a stop is raised on all ranks
            try:
                self._writer.wait()
            except Exception as error:
                log.warning("could not finish the pending checkpoint: %s", first_line(error))


# Where a run starts: in a new folder, or from a checkpoint that its config can resume


class Start(NamedTuple):
    """The folder of a run, and the checkpoint, step and sources of training data that it resumes from."""

    folder: RunFolder
    checkpoint: Path | None = None
    step: int = 0
    is_finished: bool = False
    newest: Path | None = None  # the newest checkpoint in the folder when this was chosen
    sources: Mapping[str, str] | None = None  # {name: fingerprint}, for `check_sources`

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
        if run.newest_checkpoint():
            return _resume_newest(run, config, overridden)
        if parent := _find_parent(run):
            return _resume(parent, run, config, overridden=flatten_config(config))  # accepted when it branched
        return Start(run)
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
    if changed := find_changed_keys(ours, theirs, ["training", "continuation", "evaluation"]):
        key = changed[0]
        newest = run.newest_checkpoint()
        branch = f", or branch from a checkpoint with --ckpt_path {newest}" if newest else ""
        raise RunError(
            f"{run.path}: this run is finished, with {key} {theirs.get(key)}; the config has {ours.get(key)}; choose "
            f"another --run{branch}"
        )


def _resume_newest(run: RunFolder, config: ExperimentConfig, overridden: Collection[str]) -> Start:
    """Resume the newest checkpoint that is not damaged, in the run's own folder."""
    paths = run.list_checkpoints()[::-1]
    for path, older in itertools.pairwise(paths):
        try:
            return _resume(path, run, config, overridden)
        except DamagedCheckpointError as error:
            log.warning("%s: damaged (%s); resuming from %s instead", path, error.reason, older.name)
    return _resume(paths[-1], run, config, overridden)


def _resume_path(path: Path, config: ExperimentConfig, overridden: Collection[str]) -> Start:
    """Resume a checkpoint: in its own run if it is the newest of an unfinished run of this name, else in a branch."""
    if path.name == EMA:
        raise RunError(f"{path}: no such checkpoint; give a folder in a run's checkpoints/, or last")
    run = RunFolder(path.absolute().parent.parent)
    is_same_name = run.path.parent.resolve() == Path(config.logging.root, config.name).resolve()
    newest = run.newest_checkpoint()
    is_newest = newest is not None and newest.resolve() == path.resolve()
    if is_same_name and is_newest and run.config.is_file() and not run.is_finished:
        return _resume(path, run, config, overridden)
    return _resume(path, runs.allocate_run(config), config, overridden)


def _resume(path: Path, folder: RunFolder, config: ExperimentConfig, overridden: Collection[str]) -> Start:
    state = checkpoints.load_state(path)
    check_resumed_config(path, state, config, overridden)
    checkpoints.check_files(path)
    step, last, is_own = state["global_step"], config.trainer.max_steps, _contains(folder, path)
    if step > last or (step == last and not is_own):
        raise RunError(f"{path}: already at step {step} of trainer.max_steps {last}; raise trainer.max_steps")
    if is_own:
        _check_log(folder, step)
    sources = state.get(data_record.KEY, {}).get("sources")
    return Start(folder, path, step, newest=folder.newest_checkpoint(), sources=sources)


def _check_log(folder: RunFolder, step: int) -> None:
    """Raise RunError if metrics.jsonl lacks steps before the checkpoint, because final figures would be wrong."""
    logged = max((line["step"] for line in folder.read_metrics() if TRAIN_LOSS in line), default=0)
    if logged < step:
        raise RunError(
            f"{folder.metrics}: ends at step {logged}, but the checkpoint is at step {step}; restore the file, or "
            "branch into a new folder with --ckpt_path and another name=NAME"
        )


def check_resumed_config(
    path: Path, state: dict[str, Any], config: ExperimentConfig, overridden: Collection[str] = ()
) -> None:
    """Raise RunError, naming the first option that differs, if the config cannot resume the checkpoint's run.

    Options that may change within a run are logged if they are in `overridden`, and refused otherwise. Options of the
    evaluation are only logged.
    """
    ours, theirs = flatten_config(config), flatten(state["stackexp"]["config"])
    if changed := find_changed_keys(ours, theirs, ["training"]):
        key = changed[0]
        kind = "different architecture" if key.startswith("model.") else "different run"
        raise RunError(
            f"{path}: {kind}: {key} is {theirs.get(key)} in the checkpoint, {ours.get(key)} in the config; "
            "resume with the run's own config.yaml, or start a new run"
        )
    continuation = find_changed_keys(ours, theirs, ["continuation"])
    for key in [*continuation, *find_changed_keys(ours, theirs, ["evaluation"])]:
        before, now = theirs.get(key), ours.get(key)
        if key in continuation and key not in overridden:
            raise RunError(
                f"{path}: {key} is {before} in the checkpoint, {now} in the config; to change it from here on, add "
                f"the override {shlex.quote(f'{key}={json.dumps(now)}')}"
            )
        log.warning("%s changes from %s to %s after step %s", key, before, now, state["global_step"])
