"""One layer of the decoder: attention, feed-forward network, and memories."""

from typing import Any

import torch
from torch import Tensor, nn

from stackexp.config.model import TransformerConfig
from stackexp.models.activation_checkpointing import Recompute, run_recomputed
from stackexp.models.attention import Attention, KeysValues, LayerCache, Positions
from stackexp.models.layers import FeedForward, RMSNorm
from stackexp.models.memories.base import Memory, State, Stats, apply_memory


class Block(nn.Module):
    """One layer: attention and a feed-forward network with pre-norm residuals, and at most two memories."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.memory: Memory | None = None
        self.attention_memory: Memory | None = None  # only with site each_sublayer

    @property
    def memories(self) -> list[Memory]:
        """The memories of this block in call order."""
        return [memory for memory in (self.attention_memory, self.memory) if memory is not None]

    def forward(
        self,
        h: Tensor,
        state: State,
        positions: Positions,
        kv_cache: LayerCache = None,
        mask: Any = None,
        *,
        probe: bool = False,
        recompute: Recompute = False,
    ) -> tuple[Tensor, State, KeysValues, list[Stats]]:
        """Run the layer on h [B, T, d].

        Args:
            h: Hidden states.
            state: The state of the memories; None if empty.
            positions: Positional inputs of attention; see `Attention.forward`.
            kv_cache: Keys and values of earlier tokens.
            mask: The attention mask.
            probe: Measure more statistics of the memories.
            recompute: See `Transformer.checkpoint_blocks`.

        Returns:
            The new h, the new state, all keys and values, and the statistics of each memory.
        """
        args = (h, state, positions, kv_cache, mask, probe)
        if not (recompute and torch.is_grad_enabled()):
            return self._forward(*args)
        preserve_rng = any(memory.uses_random_numbers for memory in self.memories)
        return run_recomputed(self._forward, *args, selective=recompute == "selective", preserve_rng=preserve_rng)

    def _forward(
        self, h: Tensor, state: State, positions: Positions, kv_cache: LayerCache, mask: Any, probe: bool
    ) -> tuple[Tensor, State, KeysValues, list[Stats]]:
        memories = {memory.site: memory for memory in self.memories}
        stats: list[Stats] = []
        if memories and state is None:
            state = self.memories[0].empty_state(h)

        def call_memory(site: str, h: Tensor, state: State, previous: Tensor) -> tuple[Tensor, State]:
            if site not in memories:
                return h, state
            h, state, measured = apply_memory(memories[site], h, state, previous, probe)
            stats.append(measured)
            return h, state

        previous = h
        h, state = call_memory("before_attention", h, state, previous)
        attended, keys_values = self.attention(self.attention_norm(h), positions, kv_cache, mask)
        h, state = call_memory("after_attention", h + attended, state, previous)
        previous = previous if self.attention_memory is None else h
        h, state = call_memory("after_block", h + self.feed_forward(self.feed_forward_norm(h)), state, previous)
        return h, state, keys_values, stats
