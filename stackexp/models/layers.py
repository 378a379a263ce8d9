"""Layers that hold weights and draw none: the model they are in does, in its `init_weights`."""

from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config.model import TransformerConfig


class Linear(nn.Linear):
    """No bias, and no draw of random numbers when constructed."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """No draw of random numbers when constructed."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.RMSNorm):
    """With its weight in the precision of its input, as the fused kernel wants it: FSDP gathers it in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
