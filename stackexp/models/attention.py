"""Grouped-query attention."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config.schema import TransformerConfig
from stackexp.models.layers import Linear
from stackexp.models.positions import rotate

KeysValues = tuple[Tensor, Tensor]  # each [B, kv heads, tokens so far, head size]


class Attention(nn.Module):
    """Grouped-query attention, causal or not, with the positions that it is given."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_heads
        self.grouped = config.num_kv_heads != config.num_heads
        self.causal = config.causal
        self.q_proj = Linear(config.hidden_size, config.hidden_size)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * self.head_size)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * self.head_size)
        self.o_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, x: Tensor, rope: Tensor | None, past: KeysValues | None, mask: Tensor | None = None
    ) -> tuple[Tensor, KeysValues]:
        """x [B, T, d] -> [B, T, d] and the keys and values of all tokens so far, S of them.

        `rope`: see `positions.rotate`. `mask` [B or 1, heads or 1, T, S]: which keys a query sees (bool), or what is
        added to their scores (float, ALiBi); without it all up to the query, or all if the model is not causal.
        """
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # [B, heads, T, head size]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        new, seen = q.shape[2], k.shape[2]
        if mask is None and 1 < new < seen:  # several tokens after earlier ones
            mask = torch.ones(new, seen, dtype=torch.bool, device=x.device).tril(seen - new)
        elif mask is not None and mask.is_floating_point():
            mask = mask.to(q.dtype)
        causal = self.causal and new == seen and mask is None
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=self.grouped)
        return self.o_proj(y.transpose(1, 2).flatten(2)), (k, v)
