"""Grouped-query attention."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stackexp.config.model import TransformerConfig
from stackexp.models.attention_backends import load_backend, sdpa_with_cache
from stackexp.models.layers import Linear
from stackexp.models.positional import apply_rope

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [B, kv heads, S, head size]."""

LayerCache = KeysValues | tuple[()] | None
"""Keys and values of earlier tokens, or () before the first token. None without a cache."""


class Positions(NamedTuple):
    """Positional inputs of attention, computed once for all layers."""

    rope: Tensor | None = None  # see `positional.apply_rope`
    query_scale: Tensor | None = None  # [T, 1], or [B, 1, T, 1] with documents; see `positional.compute_query_scale`


class Attention(nn.Module):
    """Grouped-query attention, causal or bidirectional."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_heads
        self.causal = config.causal
        self.attend = load_backend(config)
        self.q_proj = Linear(config.hidden_size, config.hidden_size, config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * self.head_size, config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * self.head_size, config.qkv_bias)
        self.o_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, x: Tensor, positions: Positions, kv_cache: LayerCache = None, mask: Any = None
    ) -> tuple[Tensor, KeysValues]:
        """Attend from x [B, T, d] to itself and to the cached tokens.

        Args:
            x: Normalized hidden states.
            positions: Positional inputs of the T tokens.
            kv_cache: Keys and values of earlier tokens. With a cache, sdpa replaces the configured backend.
            mask: The result of `attention_backends.build_mask`. None: all keys, or if causal, no later keys.

        Returns:
            The output [B, T, d], and the keys and values of all S tokens, cached ones included.
        """
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # [B, heads, T, head size]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if positions.rope is not None:
            q, k = apply_rope(q, positions.rope), apply_rope(k, positions.rope)
        if positions.query_scale is not None:
            q = q * positions.query_scale.to(q.dtype)
        if kv_cache is None:
            y = self.attend(q, k, v, mask, self.causal)
        else:
            if kv_cache:
                k, v = torch.cat([kv_cache[0], k], 2), torch.cat([kv_cache[1], v], 2)
            y = sdpa_with_cache(q, k, v, mask)
        return self.o_proj(y.transpose(1, 2).flatten(2)), (k, v)
