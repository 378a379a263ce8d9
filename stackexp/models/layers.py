"""Layers that do not initialize themselves: the model draws all weights in `init_weights`."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config.model import TransformerConfig


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


class FeedForward(nn.Module):
    """A SwiGLU feed-forward network."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., d] to [..., d]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def widen(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
