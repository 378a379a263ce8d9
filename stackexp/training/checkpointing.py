"""Save and resume the checkpoints of a run.

`StepCheckpoint` decides when to save. The strategy collects the tensors, `StepCheckpoint` everything else, and
`stackexp.models.checkpoints` writes both. On resume, they load them.
"""

import logging
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from stackexp.config.compose import to_dict
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.trainer import TrainerConfig
from stackexp.datamodules.base import check_resumable
from stackexp.errors import StoppedError, first_line
from stackexp.metric_tags import AVERAGE_ACCURACY, AVERAGE_LOSS
from stackexp.models import checkpoints
from stackexp.models.checkpoints import VERSION, CheckpointWriter
from stackexp.modules.base import TrainingModule
from stackexp.runs import RunFolder, format_checkpoint_name, remove_checkpoint, write_validation
from stackexp.training.callbacks.steps import StepCallback
from stackexp.training.lightning_internals import rescale_progress
from stackexp.training.signals import StopRequest
from stackexp.training.watchdog import note_progress

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
    lightning_restore_optimizer = False  # `load_checkpoint` restores it

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        pass

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Start writing a checkpoint; `storage_options` is {"writer": CheckpointWriter, "on_saved": callable}."""
        writer: CheckpointWriter = storage_options["writer"]
        writer.save(Path(filepath), self._collect_tensors(), checkpoint, storage_options["on_saved"])

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(checkpoint_path)
        state = checkpoints.load_state(path)
        tensors = self._collect_tensors()
        checkpoints.load_tensors(tensors, path)
        set_model_state_dict(self.lightning_module.model, tensors["model"])
        set_optimizer_state_dict(self.lightning_module.model, self.optimizers[0], tensors["optimizer"])
        return state

    def _collect_tensors(self) -> dict[str, Any]:
        module, (optimizer,) = self.lightning_module, self.optimizers
        model, average = module.model, module.weight_average
        tensors = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        return tensors | ({checkpoints.EMA: average.tensors} if average else {})


class SingleDevice(_DistributedCheckpoints, SingleDeviceStrategy):
    """One device."""


class Replicated(_DistributedCheckpoints, DDPStrategy):
    """A copy of the model on each device (DDP)."""


class Sharded(_DistributedCheckpoints, ModelParallelStrategy):
    """A shard of every weight on each device (FSDP2); `TrainingModule.configure_model` shards the model."""


class StepCheckpoint(StepCallback, pl.callbacks.Checkpoint):
    """Saves <step>/ every `checkpoint_interval` steps, on request, after the last step, and before stopping.

    Keeps the newest `keep_checkpoints` and the best one, which has the lowest mean validation loss. Saves between two
    optimizer steps, before a validation that is due at the same step. Saving is a collective operation, so all ranks
    must make the same decision.

    A checkpoint also has the config, the tokens trained on, and the random states, which a resumed run restores.
    """

    def __init__(self, folder: RunFolder, config: TrainerConfig, stop: StopRequest):
        self._folder, self._config, self._stop = folder, config, stop
        self._writer = CheckpointWriter()
        self._tokenizer_sha256: str | None = None

    def on_fit_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        # A slow disk writes a checkpoint for longer than a timeout
        self._writer.note_progress = lambda: note_progress(trainer, self._stop)
        if trainer.is_global_zero:
            self._tokenizer_sha256 = self._folder.read_tokenizer_hash()

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Raise RunError for a training loader whose position would not be saved."""
        super().on_train_start(trainer, module)
        check_resumable(trainer.train_dataloader)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer)
        device = trainer.strategy.root_device
        checkpoint["stackexp"] = {
            "version": VERSION,
            "config": to_dict(module.config),
            "accumulate_grad_batches": module.config.accumulate_grad_batches,
            "tokens": module.tokens,
            "tokenizer_sha256": self._tokenizer_sha256,
            "python_rng": random.getstate(),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        }

    def on_load_checkpoint(self, trainer: pl.Trainer, module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        """Restore the random states, those of rank 0 on all ranks, and rescale the progress."""
        state = checkpoint["stackexp"]
        random.setstate(state["python_rng"])
        torch.set_rng_state(state["torch_rng"])
        cuda_rng = state["cuda_rng"]
        device = trainer.strategy.root_device  # `module` may still be on the CPU
        if cuda_rng is not None and device.type == "cuda":
            torch.cuda.set_rng_state(cuda_rng, device)
        rescale_progress(checkpoint, state["accumulate_grad_batches"], module.config.accumulate_grad_batches)

    def on_step_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Save if the step requires it, then stop if requested."""
        requests = module.step_metrics.requests
        is_last = self._step == self._config.max_steps
        if "stop" in requests:
            self._stop.end_grace_period()
        if self._step % self._config.checkpoint_interval == 0 or is_last or requests:
            path = self._folder.checkpoints / format_checkpoint_name(self._step)
            trainer.save_checkpoint(path, storage_options={"writer": self._writer, "on_saved": self._delete_old})
        if "stop" in requests and not is_last:
            self._writer.wait()
            raise self._stop.build_error()

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Store the scores with the checkpoint of this step, if there is one, before they are logged."""
        path = self._folder.checkpoints / format_checkpoint_name(trainer.global_step)
        if trainer.state.fn != "fit":
            return
        self._writer.wait()
        if trainer.is_global_zero and path.is_dir():
            tags = module.validation_tags()
            if AVERAGE_LOSS in tags:
                write_validation(path, tags[AVERAGE_LOSS], tags.get(AVERAGE_ACCURACY))

    def _delete_old(self) -> None:
        best = self._folder.best_checkpoint()
        for old in self._folder.list_checkpoints()[: -self._config.keep_checkpoints]:
            if old != best:
                remove_checkpoint(old)

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
