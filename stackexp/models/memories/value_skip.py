"""A low-rank skip from the embedding into every layer: the simplest memory that restores token identity."""

from torch import Tensor, nn

from stackexp.config.memory import ValueSkipConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.layers import Linear, init_weight_
from stackexp.models.memories.base import EmbeddingSkip, Stats


class ValueSkip(EmbeddingSkip):
    """h + W_up W_down x_0, with x_0 the embedding, W_down [r, d] and W_up [d, r].

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
        stats = {"read_share": (skip.detach().norm(dim=-1) / h.detach().norm(dim=-1)).mean()} if probe else {}
        return h + skip, state, stats
