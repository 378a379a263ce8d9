"""FSDP2: each rank holds a shard of every weight, and gathers the weights of a block to compute with them."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from stackexp.config.trainer import TrainerConfig


def build_mesh(device_type: str, trainer: TrainerConfig) -> DeviceMesh:
    """Build the device mesh of a strategy; requires a process group.

    fsdp: one dimension, `shard`, of all devices. hsdp: `replicate` = num_nodes and `shard` = devices.
    """
    if trainer.strategy == "hsdp":
        return init_device_mesh(
            device_type, (trainer.num_nodes, trainer.devices), mesh_dim_names=("replicate", "shard")
        )
    return init_device_mesh(device_type, (trainer.world_size,), mesh_dim_names=("shard",))


def shard_model(model: nn.Module, mesh: DeviceMesh, trainer: TrainerConfig) -> None:
    """Shard a decoder in place: one unit per block; embedding, last norm and head in the root unit.

    With bf16-mixed, blocks are gathered in bfloat16 and gradients are reduced in float32. The root unit and memories,
    which form units of their own, stay in float32, so that the residual stream equals that of autocast on one device:
    a gate near 1 in bfloat16 would move in steps of 0.4 %.
    """
    policy = MixedPrecisionPolicy()
    if trainer.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for memory in getattr(model, "memories", ()):
            fully_shard(memory, mesh=mesh, reshard_after_forward=False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=trainer.reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


@contextlib.contextmanager
def full_parameters(module: nn.Module, *, keep_values: bool = False) -> Iterator[None]:
    """Replace the sharded parameters of a module by full CPU tensors within the context; then shard them again.

    The tensors are uninitialized without `keep_values`. Every rank must write the same values. So weights do not depend
    on the number of ranks, and only one module at a time is held in full.
    """
    sharded = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    for owner, name, parameter in sharded:
        full = parameter.full_tensor().cpu() if keep_values else torch.empty(parameter.shape, dtype=parameter.dtype)
        owner._parameters[name] = nn.Parameter(full.detach())
    try:
        yield
    finally:
        for owner, name, parameter in sharded:
            full, owner._parameters[name] = owner._parameters[name], parameter
            copy_full_(parameter, full)


def copy_full_(tensor: Tensor, full: Tensor) -> None:
    """Copy a full tensor, the same on every rank, into a tensor of the same shape, sharded or not."""
    full = full.detach()
    if isinstance(tensor, DTensor):
        full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
        tensor = tensor.to_local()
    tensor.detach().copy_(full)
