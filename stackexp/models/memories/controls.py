"""Controls with the embedding in every layer: scalars on the residual stream, and a low-rank skip."""

import torch
from torch import Tensor, nn

from stackexp.config.memory import ResidualScaleConfig, ValueSkipConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.layers import Linear, init_weight_
from stackexp.models.memories.base import EmbeddingSkip, Stats, compute_read_share


class ResidualScale(EmbeddingSkip):
    """r h + b f(h) + c x_0 for each sublayer f, with x_0 the embedding: a control for hyper-connections.

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


class ValueSkip(EmbeddingSkip):
    """h + W_up W_down x_0, with x_0 the embedding, W_down [r, d] and W_up [d, r]: it restores token identity.

    W_up starts at 0, so the model starts as the plain Transformer.
    """

    fans = {"down.weight": "in", "up.weight": "out"}

    def __init__(self, config: ValueSkipConfig, model: TransformerConfig, layer: int) -> None:
        super().__init__(config, model, layer)
        self.down = Linear(model.hidden_size, config.rank)
        self.up = Linear(config.rank, model.hidden_size)

    def init_weights(self) -> None:
        """Initialize W_down as the decoder's weights and W_up to 0."""
        init_weight_(self.down.weight, self.model)
        nn.init.zeros_(self.up.weight)

    def forward(
        self, h: Tensor, state: Tensor, previous: Tensor | None = None, probe: bool = False
    ) -> tuple[Tensor, Tensor, Stats]:
        """Add the skip; see `Memory.forward`."""
        skip = self.up(self.down(state))
        stats = {"read_share": compute_read_share(skip, h)} if probe else {}
        return h + skip, state, stats
