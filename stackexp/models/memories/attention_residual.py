"""Attention residuals (Kimi Team 2026, arXiv 2603.15031): attention over the outputs of earlier sublayers."""

import torch
from torch import Tensor, nn

from stackexp.config.memory import AttentionResidualConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.memories.base import Memory, Stats
from stackexp.stack import widen

Values = tuple[tuple[Tensor, Tensor], ...]
"""Each v_i [B, T, d] and 1 / rms(v_i) [B, T]."""


class AttentionResidual(Memory):
    """h = sum_i softmax_i(w . v_i / rms(v_i)) v_i, instead of the plain sum of all v_i in a residual stream.

    v_0 is the embedding and v_i the output of sublayer i. Each sublayer has a learned query w [d], the same for all
    tokens. It starts at 0, which gives a uniform average. The state holds all v_i, so it grows with the depth.
    """

    site = "each_sublayer"
    fans = {"query": "vectors"}

    def __init__(self, config: AttentionResidualConfig, model: TransformerConfig, layer: int) -> None:
        super().__init__(config, model, layer)
        self.query = nn.Parameter(torch.empty(model.hidden_size))

    def init_weights(self) -> None:
        """Set the query to 0, as in the paper."""
        nn.init.zeros_(self.query)

    def empty_state(self, h: Tensor) -> Values:
        """Return the embedding as the only value."""
        return ((h, self._invert_rms(h)),)

    def _invert_rms(self, value: Tensor) -> Tensor:
        return (widen(value).square().mean(-1) + self.model.norm_eps).rsqrt()

    def forward(
        self, h: Tensor, state: Values, previous: Tensor | None = None, probe: bool = False
    ) -> tuple[Tensor, Values, Stats]:
        """Append the output of the sublayer and attend to all; see `Memory.forward`."""
        assert previous is not None
        added = h - previous
        state = (*state, (added, self._invert_rms(added)))
        with torch.autocast(h.device.type, enabled=False):  # it would save a bfloat16 copy of every value
            scores = torch.stack([(value @ self.query.to(value.dtype)) * inverse for value, inverse in state], -1)
        weights = scores.softmax(-1)  # [B, T, n], float32
        mixed = torch.zeros_like(h)
        for (value, _), weight in zip(state, weights.to(h.dtype).unsqueeze(-1).unbind(-2), strict=True):
            mixed = torch.addcmul(mixed, weight, value)
        stats = {"embedding_weight": weights[..., 0].mean(), "newest_weight": weights[..., -1].mean()} if probe else {}
        return mixed, state, stats

    def flops_per_token(self, context_length: int) -> float:
        """Count a score and a weighted sum for each value."""
        num_values = 2 * self.layer + 2 + (self.site == "after_block")
        return 2.0 * 2 * num_values * self.model.hidden_size
