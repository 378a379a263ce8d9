"""Learned scalars on the residual stream: a control for hyper-connections, which also scale it."""

import torch
from torch import Tensor, nn

from stackexp.config.memory import ResidualScaleConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.memories.base import EmbeddingSkip, Stats


class ResidualScale(EmbeddingSkip):
    """r h + b f(h) + c x_0 for each sublayer f, with x_0 the embedding.

    `scales` [3] holds r, b and c. They start at 1, 1 and 0, so the model starts as the plain Transformer. Set
    `optimizer.memory_lr` to about 16 times `optimizer.lr`; at `optimizer.lr` the scalars learn too slowly.
    """

    site = "each_sublayer"

    def __init__(self, config: ResidualScaleConfig, model: TransformerConfig, layer: int) -> None:
        super().__init__(config, model, layer)
        self.scales = nn.Parameter(torch.empty(3))

    def init_weights(self) -> None:
        """Set r and b to 1, and c to 0."""
        nn.init.ones_(self.scales)
        nn.init.zeros_(self.scales[2:])

    def forward(
        self, h: Tensor, state: Tensor, previous: Tensor | None = None, probe: bool = False
    ) -> tuple[Tensor, Tensor, Stats]:
        """Scale the hidden state, the output of the sublayer and the embedding; see `Memory.forward`."""
        assert previous is not None
        r, b, c = self.scales.to(h.dtype).unbind()
        new_h = r * previous + b * (h - previous) + c * state
        names = ("hidden_scale", "output_scale", "skip_scale")
        return new_h, state, dict(zip(names, self.scales.detach().unbind(), strict=True)) if probe else {}

    def flops_per_token(self, context_length: int) -> float:
        """Count three multiply-adds per element."""
        return 2.0 * 3 * self.model.hidden_size
