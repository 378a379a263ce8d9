"""FSDP2: each rank holds a shard of every weight and gathers the weights of a block while it computes with them."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stackexp.config.trainer import TrainerConfig
from stackexp.models.transformer import Transformer

GRAPHS_PER_LAYER = 4  # torch.compile: training, evaluation, and both with probes


def build_mesh(device_type: str, trainer: TrainerConfig) -> DeviceMesh:
    """Build the device mesh of a strategy; requires a process group.

    fsdp: one dimension, `shard`, of all devices. hsdp: `replicate` = num_nodes and `shard` = devices.
    """
    if trainer.strategy == "hsdp":
        return init_device_mesh(
            device_type, (trainer.num_nodes, trainer.devices), mesh_dim_names=("replicate", "shard")
        )
    return init_device_mesh(device_type, (trainer.world_size,), mesh_dim_names=("shard",))


def shard_model(model: Transformer, mesh: DeviceMesh, trainer: TrainerConfig) -> None:
    """Shard a decoder in place: one unit per block; embedding, last norm and head in the root unit.

    With bf16-mixed, blocks are gathered in bfloat16 and gradients are reduced in float32. The root unit stays in
    float32, so that the residual stream equals that of autocast on one device. With `trainer.compile`, each block is
    compiled.
    """
    policy = MixedPrecisionPolicy()
    if trainer.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if trainer.compile:  # the stack of each layer has another size, so each needs graphs of its own
        limit = GRAPHS_PER_LAYER * len(model.layers)
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    for layer in model.layers:
        if trainer.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=trainer.reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
