"""FSDP2: each process holds a part of every weight and gathers a block's weights while it computes with them."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stackexp.config.trainer import TrainerConfig
from stackexp.models.transformer import Transformer


def build_mesh(device_type: str, trainer: TrainerConfig) -> DeviceMesh:
    """fsdp: all devices, [shard]. hsdp: [replicate = num_nodes, shard = devices]. Needs a process group."""
    if trainer.strategy == "hsdp":
        return init_device_mesh(
            device_type, (trainer.num_nodes, trainer.devices), mesh_dim_names=("replicate", "shard")
        )
    return init_device_mesh(device_type, (trainer.num_nodes * trainer.devices,), mesh_dim_names=("shard",))


def shard_model(model: Transformer, mesh: DeviceMesh, trainer: TrainerConfig) -> None:
    """Shard a decoder in place: each block by itself; embedding, last norm and head with the root.

    With bf16-mixed, blocks are gathered in bfloat16 and gradients reduced in float32; the root stays in float32, so
    that the residual stream is what it is under autocast on one device. With `compile`, each block is compiled.
    """
    policy = MixedPrecisionPolicy()
    if trainer.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in model.layers:
        if trainer.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=trainer.reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
