"""Layers, the initialization of their weights (sharded or not), activation checkpointing, and sharding.

Layers do not initialize themselves: the model draws all weights in a fixed order.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from stackexp.config.model import TransformerConfig
from stackexp.config.trainer import TrainerConfig


class Linear(nn.Linear):
    """A linear map, by default without bias, that draws no random numbers when constructed."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Do nothing: the model initializes weight and bias."""


class Embedding(nn.Embedding):
    """An embedding that draws no random numbers when constructed."""

    def reset_parameters(self) -> None:
        """Do nothing: the model initializes the weight."""


class RMSNorm(nn.RMSNorm):
    """An RMSNorm with its weight in the dtype of the input."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., d]."""
        # FSDP gathers the weight in bfloat16; the fused kernel requires equal dtypes
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def apply_linears(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Return the output of several linear maps of x [..., d]; in compiled code, from one product.

    One product reads x once. In eager code, its backward pass would copy all gradients into one tensor first.
    """
    rows, outputs = x.shape[:-1].numel(), [linear.out_features for linear in linears]
    if not torch.compiler.is_compiling() or rows < sum(outputs):  # few rows: joining the weights costs more
        return tuple(linear(x) for linear in linears)
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return F.linear(x, torch.cat([linear.weight for linear in linears]), bias).split(outputs, -1)


class FeedForward(nn.Module):
    """A SwiGLU feed-forward network."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., d] to [..., d]."""
        gate, up = apply_linears(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


def widen(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def get_matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x, under autocast if it is enabled."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


def init_weight_(weight: Tensor, config: TransformerConfig, output_of_layer: int | None = None) -> None:
    """Initialize a weight [..., fan_in] in place.

    `init: fan_in` draws from a normal distribution truncated at 3 sigma, sigma = 1/sqrt(fan_in). A projection of layer
    `output_of_layer` back into the residual stream has sigma = 1/sqrt(2 fan_in (layer+1)). `init: normal` uses
    sigma = init_std for all weights.
    """
    if config.init == "normal":
        nn.init.normal_(weight, std=config.init_std)
        return
    scale = 1 if output_of_layer is None else 2 * (output_of_layer + 1)
    sigma = 1 / math.sqrt(weight.shape[-1] * scale)
    nn.init.trunc_normal_(weight, std=sigma, a=-3 * sigma, b=3 * sigma)


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


def init_backbone(model: nn.Module) -> None:
    """Initialize all parameters of a decoder except those of its memories, in a fixed order."""
    config = model.config
    if config.embedding_std is None:
        _init_linear(model.embedding, config)
    else:
        with full_parameters(model.embedding):
            nn.init.normal_(model.embedding.weight, std=config.embedding_std)
    for i, layer in enumerate(model.layers):
        attention, ffn = layer.attention, layer.feed_forward
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, ffn.gate_proj, ffn.up_proj):
            _init_linear(linear, config)
        for linear in (attention.o_proj, ffn.down_proj):
            _init_linear(linear, config, output_of_layer=i)
        nn.init.ones_(layer.attention_norm.weight)
        nn.init.ones_(layer.feed_forward_norm.weight)
    nn.init.ones_(model.norm.weight)
    if model.head:
        _init_linear(model.head, config)


def _init_linear(module: nn.Module, config: TransformerConfig, output_of_layer: int | None = None) -> None:
    with full_parameters(module):
        init_weight_(module.weight, config, output_of_layer)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


Recompute = bool | Literal["selective"]

aten = torch.ops.aten
SAVED_OPERATORS = {
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default),
    *(aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default),
    *(aten._scaled_dot_product_fused_attention_overrideable.default, aten._flash_attention_forward.default),
}
"""Operators whose outputs selective checkpointing saves: matrix products and attention."""
SAVED_OPERATOR_PREFIXES = ("flex_attention", "torch_attn._varlen_attn", "flash_attn._flash_attn")
"""Name prefixes of attention operators that exist only once their module is imported."""


def run_recomputed(layer: Callable, *args: Any, selective: bool, preserve_rng: bool = False) -> Any:
    """Return layer(*args) without saving its activations; the backward pass recomputes them.

    Args:
        layer: The module or function to run.
        args: Its arguments, which are kept for the backward pass.
        selective: Save the outputs of matrix products and attention, and recompute the rest. Do not use it for layers
            that scan over tokens: under its dispatch mode, the scan runs operator by operator.
        preserve_rng: Restore the random state before recomputing, for layers that use random numbers.
    """
    contexts = functools.partial(create_selective_checkpoint_contexts, _choose_policy)
    options = {"context_fn": contexts} if selective else {}
    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=preserve_rng, **options)


def _choose_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator in SAVED_OPERATORS or str(operator).startswith(SAVED_OPERATOR_PREFIXES):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


# FSDP2: each rank holds a shard of every weight, and gathers the weights of a block while it computes with them.


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

    With bf16-mixed, blocks are gathered in bfloat16 and gradients are reduced in float32. The root unit stays in
    float32, so that the residual stream equals that of autocast on one device.
    """
    policy = MixedPrecisionPolicy()
    if trainer.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=trainer.reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
