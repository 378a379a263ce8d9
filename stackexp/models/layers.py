"""Layers, and the initialization of their weights, sharded or not.

Layers do not initialize themselves: the model draws all weights in a fixed order.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config.model import TransformerConfig
from stackexp.models.sharding import full_parameters


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
