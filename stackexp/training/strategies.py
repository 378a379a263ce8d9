"""Lightning strategies for one device, DDP and FSDP2, which save checkpoints with `stackexp.models.checkpoints`."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from stackexp.config.experiment import ExperimentConfig
from stackexp.models import checkpoints
from stackexp.models.checkpoints import CheckpointWriter


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
