"""DenseFormer (Pagliardini et al. 2024, arXiv 2402.02622): a learned average over the depth after each block."""

import torch
from torch import Tensor, nn

from stackexp.config.memory import DenseFormerConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.memories.base import EmbeddingSkip, Stats


class DenseFormer(EmbeddingSkip):
    """h = sum_{j <= l+1} w_j x_j after block l, with x_0 the embedding and x_{j+1} the output of block j.

    The weights w [l + 2] are the same for all tokens. They start at 1 for the newest output and at 0 for the others, so
    the model starts as the plain Transformer. The state holds all x_j.
    """

    def __init__(self, config: DenseFormerConfig, model: TransformerConfig, layer: int) -> None:
        super().__init__(config, model, layer)
        self.weights = nn.Parameter(torch.empty(layer + 2))

    def init_weights(self) -> None:
        """Set the weights to 1 for the newest output and to 0 for the others."""
        nn.init.zeros_(self.weights)
        nn.init.ones_(self.weights[-1:])

    def empty_state(self, h: Tensor) -> tuple[Tensor, ...]:
        """Return the embedding as the only element."""
        return (h,)

    def forward(
        self, h: Tensor, state: tuple[Tensor, ...], previous: Tensor | None = None, probe: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...], Stats]:
        """Append the output of the block and average; see `Memory.forward`."""
        state, mixed = (*state, h), torch.zeros_like(h)
        for output, weight in zip(state, self.weights.to(h.dtype).unbind(), strict=True):
            mixed = torch.addcmul(mixed, weight, output)
        return mixed, state, {"newest_weight": self.weights[-1].detach()} if probe else {}

    def flops_per_token(self, context_length: int) -> float:
        """Count a multiply-add for each element of each output."""
        return 2.0 * self.weights.numel() * self.model.hidden_size
