"""Weight initialization of the decoder and its memories, sharded or not."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from stackexp.config.model import TransformerConfig


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
