"""How a run is spread over devices: Lightning's strategies, all with the same checkpoints (`checkpoints.py`)."""

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
    """single, ddp, fsdp or hsdp; auto is single on one device, else ddp."""
    trainer = config.trainer
    processes = trainer.devices * trainer.num_nodes
    if trainer.sharded:
        return Sharded(data_parallel_size=processes, tensor_parallel_size=1)
    if trainer.strategy == "ddp" or processes > 1:
        return Replicated()
    return Single(torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type))


class _OurCheckpoints:
    """Mixed into a strategy: weights and optimizer go through torch.distributed.checkpoint, in the background."""

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False  # `load_checkpoint` has done so

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        pass

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Begin to write; `storage_options`: {"writer": CheckpointWriter, "then": what to do once it is in place}."""
        writer: CheckpointWriter = storage_options["writer"]
        writer.save(Path(filepath), self._tensors(), checkpoint, storage_options["then"])

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(checkpoint_path)
        state = checkpoints.read(path)
        tensors = self._tensors()
        checkpoints.load_tensors(tensors, path)
        set_model_state_dict(self.lightning_module.model, tensors["model"])
        set_optimizer_state_dict(self.lightning_module.model, self.optimizers[0], tensors["optimizer"])
        return state

    def _tensors(self) -> dict[str, Any]:
        model, (optimizer,) = self.lightning_module.model, self.optimizers
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


class Single(_OurCheckpoints, SingleDeviceStrategy):
    """One device."""


class Replicated(_OurCheckpoints, DDPStrategy):
    """A copy of the model on each device."""


class Sharded(_OurCheckpoints, ModelParallelStrategy):
    """FSDP2; `LanguageModeling.configure_model` shards."""
