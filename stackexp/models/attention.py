"""Grouped-query attention."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stackexp.config.model import TransformerConfig
from stackexp.models.attention_backends import load, sdpa_after
from stackexp.models.layers import Linear
from stackexp.models.positional import rotate

KeysValues = tuple[Tensor, Tensor]  # each [B, kv heads, tokens so far, head size]


class Place(NamedTuple):
    """Where T tokens stand, for all layers."""

    rope: Tensor | None = None  # see `positions.rotate`
    scale: Tensor | None = None  # of queries: see `positions.log_scale` [T, 1], or [B, 1, T, 1] of each sequence's own


class Attention(nn.Module):
    """Grouped-query attention, causal or not, with the positions that it is given."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_heads
        self.causal = config.causal
        self.attend = load(config)
        self.q_proj = Linear(config.hidden_size, config.hidden_size)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * self.head_size)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * self.head_size)
        self.o_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, place: Place, past: KeysValues | None, seen: Any = None) -> tuple[Tensor, KeysValues]:
        """x [B, T, d] -> [B, T, d] and the keys and values of all tokens so far, S of them.

        `seen`: see `attention_backends.sight`; without it a query sees all up to itself, or all if the model is not
        causal. Tokens that follow others in a cache go to sdpa, whatever the backend of whole sequences.
        """
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # [B, heads, T, head size]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if place.rope is not None:
            q, k = rotate(q, place.rope), rotate(k, place.rope)
        if place.scale is not None:
            q = q * place.scale.to(q.dtype)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = self.attend(q, k, v, seen, self.causal) if past is None else sdpa_after(q, k, v, seen)
        return self.o_proj(y.transpose(1, 2).flatten(2)), (k, v)
