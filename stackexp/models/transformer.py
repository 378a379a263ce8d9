"""A decoder of the Llama family with one optional memory per layer. `memory: null` is the plain Transformer."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config import registry
from stackexp.config.model import TransformerConfig
from stackexp.data.documents import compute_document_positions
from stackexp.models.attention import (
    Attention,
    FixedKeysValues,
    KeysValues,
    LayerCache,
    Position,
    Positions,
    build_mask,
    build_rope_table,
    build_sinusoidal_table,
    compute_query_scale,
)
from stackexp.models.cross_entropy import Head
from stackexp.models.layers import Embedding, FeedForward, Linear, RMSNorm, init_backbone
from stackexp.models.memories.base import EACH_SUBLAYER, Memory, State, Stats, apply_memory, check_interface
from stackexp.models.recomputation import Recompute, run_recomputed
from stackexp.models.sharding import full_parameters

MAX_GRAPHS = 64  # per compiled part: training and evaluation, each shape and kind of mask


def attend(
    block: "Block", h: Tensor, positions: Positions, kv_cache: LayerCache, mask: Any
) -> tuple[Tensor, KeysValues]:
    """Return h + attention [B, T, d], and all keys and values."""
    attended, keys_values = block.attention(block.attention_norm(h), positions, kv_cache, mask)
    return h + attended, keys_values


def feed_forward(block: "Block", h: Tensor) -> Tensor:
    """Return h + the output of the feed-forward network, [B, T, d]."""
    return h + block.feed_forward(block.feed_forward_norm(h))


def run_body(
    block: "Block", h: Tensor, positions: Positions, kv_cache: LayerCache, mask: Any
) -> tuple[Tensor, KeysValues]:
    """Run both sublayers of a block without a memory between them."""
    h, keys_values = attend(block, h, positions, kv_cache, mask)
    return feed_forward(block, h), keys_values


@functools.cache
def _compile_part(part: Callable, selective: bool, options: tuple[tuple[str, Any], ...]) -> Callable:
    """Compile one of the functions above, for all blocks: a block's weights are inputs of the graph."""

    def run_selectively(*args: Any) -> Any:
        return run_recomputed(part, *args, selective=True)

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    return torch.compile(run_selectively if selective else part, fullgraph=True, **dict(options))


class Block(nn.Module):
    """One layer: attention and a feed-forward network with pre-norm residuals, and at most two memories.

    With `compile_options`, the sublayers are compiled, and a memory runs between the compiled parts.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.memory: Memory | None = None
        self.attention_memory: Memory | None = None  # only with site each_sublayer
        self.compile_options: tuple[tuple[str, Any], ...] | None = None  # None: not compiled

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
        recompute = torch.is_grad_enabled() and recompute
        by_part = recompute == "selective" and self.compile_options is not None  # a compiled part hides its operators
        if not recompute or by_part:
            return self._forward(*args, by_part)
        preserve_rng = any(memory.uses_random_numbers for memory in self.memories)
        return run_recomputed(
            self._forward, *args, False, selective=recompute == "selective", preserve_rng=preserve_rng
        )

    def _forward(
        self,
        h: Tensor,
        state: State,
        positions: Positions,
        kv_cache: LayerCache,
        mask: Any,
        probe: bool,
        recompute_parts: bool,
    ) -> tuple[Tensor, State, KeysValues, list[Stats]]:
        """Run the block; `recompute_parts`: recompute each sublayer and memory selectively in the backward pass."""

        def run_part(part: Callable, *args: Any) -> Any:
            if self.compile_options is None:
                return part(self, *args)
            return _compile_part(part, recompute_parts, self.compile_options)(self, *args)

        memories = {memory.site: memory for memory in self.memories}
        stats: list[Stats] = []
        if memories and state is None:
            state = self.memories[0].empty_state(h)

        def run_memory(site: str, h: Tensor, state: State, previous: Tensor) -> tuple[Tensor, State]:
            if site not in memories:
                return h, state
            args = (memories[site], h, state, previous, probe)
            if recompute_parts:
                preserve_rng = memories[site].uses_random_numbers
                h, state, measured = run_recomputed(apply_memory, *args, selective=True, preserve_rng=preserve_rng)
            else:
                h, state, measured = apply_memory(*args)
            stats.append(measured)
            return h, state

        previous = h
        h, state = run_memory("before_attention", h, state, previous)
        if "after_attention" in memories:
            h, keys_values = run_part(attend, h, positions, kv_cache, mask)
            h, state = run_memory("after_attention", h, state, previous)
            if self.attention_memory is not None:  # site each_sublayer
                previous = h
            h = run_part(feed_forward, h)
        else:
            h, keys_values = run_part(run_body, h, positions, kv_cache, mask)
        h, state = run_memory("after_block", h, state, previous)
        return h, state, keys_values, stats


class DecoderOutput(NamedTuple):
    """The result of a forward pass."""

    logits: Tensor | None  # [B, T, V]; None with return_hidden=True
    entropy: Tensor  # []: mean action entropy over tokens, heads and layers in nats; 0 without a memory
    probes: list[Stats] | None  # the detached statistics of each memory with probe=True
    hidden: Tensor | None = None  # [B, T, d], the input of `output_head`, with return_hidden=True


@dataclass
class Cache:
    """Keys, values and memory states of the tokens processed so far; `forward` reads and advances it."""

    length: Position = 0
    keys_values: dict[int, KeysValues] = field(default_factory=dict)  # by layer; at most `attention_window` tokens
    states: dict[int, State] = field(default_factory=dict)  # memory states; see `Transformer._run_layers`
    max_length: int | None = None  # None: keys and values grow

    def fix_size(self, max_length: int, device: torch.device) -> None:
        """Allocate keys and values for `max_length` tokens in total. From now on, each forward pass takes one token.

        Length, keys and values are then updated in place, so that a CUDA graph can repeat the pass of one token.
        With `attention_window`, entries older than the window stay zero.
        """
        for layer, keys_values in self.keys_values.items():
            first = self.length - keys_values[0].shape[2]
            padding = (0, 0, first, max_length - self.length)
            self.keys_values[layer] = tuple(F.pad(x, padding) for x in keys_values)
        self.length, self.max_length = torch.tensor([self.length], device=device), max_length

    def get_layer(self, layer: int) -> LayerCache:
        """Return the keys and values of one layer."""
        if self.max_length is None:
            return self.keys_values.get(layer, ())
        assert isinstance(self.length, Tensor)
        return FixedKeysValues(*self.keys_values[layer], self.length)


class Transformer(nn.Module):
    """A Llama-style decoder with an optional memory in each layer.

    Set `checkpoint_blocks` to recompute activations in the backward pass: True for whole blocks, "selective" for all
    operations but matrix products and attention.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks: Recompute = False
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        output_size = config.output_vocab_size or config.vocab_size
        self.head = None if config.tie_embeddings else Linear(config.hidden_size, output_size)
        # Initialize the backbone first, so that a seed gives the same backbone with and without a memory
        init_backbone(self)
        if config.memory is not None:
            for i, layer in enumerate(self.layers):
                layer.memory = self._build_memory(i)
                if layer.memory.site == "each_sublayer":
                    layer.attention_memory = self._build_memory(i)
                    layer.attention_memory.site, layer.memory.site = EACH_SUBLAYER
                for memory in layer.memories:
                    memory.init_weights()

    def compile_body(self, **options: Any) -> None:
        """Compile the sublayers of the blocks with `options` of torch.compile, once for all blocks.

        Memories stay eager: the state of a stack has another size in each layer, and their kernels are fused already.
        """
        for layer in self.layers:
            layer.compile_options = tuple(options.items())

    def _build_memory(self, layer: int) -> Memory:
        with torch.random.fork_rng([]):  # restores the random state: constructors draw, but not on a meta device
            memory = registry.build("memory", self.config.memory, model=self.config, layer=layer)
        check_interface(memory)
        return memory

    @property
    def memories(self) -> list[Memory]:
        """All memories in call order."""
        return [memory for layer in self.layers for memory in layer.memories]

    @property
    def axis(self) -> str | None:
        """The axis of the memories; None without a memory."""
        return self.memories[0].axis if self.memories else None

    @property
    def entropy_weight(self) -> float:
        """lambda, the weight of the action entropy in the loss."""
        return self.memories[0].entropy_weight if self.memories else 0.0

    @property
    def output_head(self) -> Head:
        """The projection of hidden states to logits. In a sharded model, valid only after a forward pass."""
        return Head(self.head.weight if self.head else self.embedding.weight)

    def forward(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        *,
        probe: bool = False,
        documents: Tensor | None = None,
        document_bounds: Tensor | None = None,
        return_hidden: bool = False,
    ) -> DecoderOutput:
        """Compute the logits [B, T, V] of tokens [B, T].

        Args:
            tokens: Token ids, int64, which follow those in `cache`.
            cache: The cache of earlier tokens, updated in place.
            probe: Also return the statistics of the memories.
            documents: Document ids [B, T]. A token attends only within its document, and positions restart in each.
            document_bounds: The result of `find_document_bounds(documents)`, if already computed.
            return_hidden: Return the last hidden states instead of the logits.

        Raises:
            ValueError: For a bidirectional model with a cache, documents or axis token_major; for documents with a
                cache or with a memory that carries state from token to token.
        """
        self._check_arguments(cache, documents)
        h = self.embedding(tokens)  # [B, T, d]
        if self.config.embedding_scale != 1:
            h = self.config.embedding_scale * h
        if self.config.residual_dtype == "bfloat16" and torch.is_autocast_enabled(h.device.type):
            h = h.bfloat16()
        if self.axis == "token_major":  # all layers for one token, then the next token
            cache = Cache() if cache is None else cache
            columns, stats = zip(*(self._run_layers(column, cache, probe) for column in h.split(1, 1)), strict=True)
            h, stats = torch.cat(columns, 1), [_average(entries) for entries in zip(*stats, strict=True)]
        else:
            h, stats = self._run_layers(h, cache, probe, documents, document_bounds)
        h = self.norm(h)
        if self.config.mup_base_size is not None:
            h = h * (self.config.mup_base_size / self.config.hidden_size)  # the scale of the logits, before their head
        entropies = [entry["entropy"] for entry in stats if "entropy" in entry]
        entropy = torch.stack(entropies).mean() if entropies else h.new_zeros((), dtype=torch.float32)
        probes = [{name: value.detach() for name, value in s.items()} for s in stats] if probe else None
        if return_hidden:
            return DecoderOutput(None, entropy, probes, h)
        return DecoderOutput(F.linear(h, self.output_head.weight), entropy, probes)

    def _check_arguments(self, cache: Cache | None, documents: Tensor | None) -> None:
        if not self.config.causal and (cache is not None or documents is not None or self.axis == "token_major"):
            raise ValueError(
                "model.causal=false does not support a cache, documents or axis token_major; set model.causal=true"
            )
        if documents is not None and (cache is not None or self.axis in ("time", "token_major")):
            raise ValueError(
                "documents do not support a cache, nor a memory that carries state from token to token; "
                "set data.document_mask=false or model.memory.axis=depth"
            )

    def _run_layers(
        self,
        h: Tensor,
        cache: Cache | None,
        probe: bool,
        documents: Tensor | None = None,
        document_bounds: Tensor | None = None,
    ) -> tuple[Tensor, list[Stats]]:
        """Run all layers on h [B, T, d]; return the new h and the statistics of each memory.

        A layer reads and writes its memory state at states[key]. With one key for all layers (depth, token_major),
        the state passes from layer to layer; with one key per layer (time), it stays in the layer. States in the
        cache last from token to token (time, token_major); otherwise they last for this call (depth).
        """
        start, length, window = cache.length if cache else 0, h.shape[1], self.config.attention_window
        num_keys = cache.max_length if cache else None
        first_query = min(start, window - 1) if window and num_keys is None else start
        mask = build_mask(self.config, h, first_query if cache else None, num_keys, documents, document_bounds)
        h, positions = self._encode_positions(h, start, documents)
        axis, stats = self.axis, []
        states = cache.states if cache and axis not in (None, "depth") else {}
        for i, layer in enumerate(self.layers):
            key = i if axis == "time" else 0
            kv_cache = cache.get_layer(i) if cache else None
            h, states[key], keys_values, layer_stats = layer(
                h, states.get(key), positions, kv_cache, mask, probe=probe, recompute=self.checkpoint_blocks
            )
            stats += layer_stats
            if cache and num_keys is None:
                num_unused = max(0, keys_values[0].shape[2] + 1 - window) if window else 0
                cache.keys_values[i] = tuple(x[:, :, num_unused:] for x in keys_values)
        if cache:
            cache.length += length
        return h, stats

    def _encode_positions(self, h: Tensor, start: Position, documents: Tensor | None) -> tuple[Tensor, Positions]:
        """Return h [B, T, d] with sinusoidal encodings, if configured, and the positional inputs of attention.

        Sinusoids are added to sqrt(d) h (Vaswani et al. 2017, section 3.4), because h is small compared with them.
        """
        config, length = self.config, h.shape[1]
        rope = scale = None
        rows = slice(None) if documents is None else compute_document_positions(documents)  # of the tables
        if config.positional == "rope":
            rope = build_rope_table(config, start, length, h)[:, rows]
            rope = rope if documents is None else rope.unsqueeze(2)
        elif config.positional == "sinusoidal":
            table = build_sinusoidal_table(config.hidden_size, start, length, h)
            h = math.sqrt(config.hidden_size) * h + table[rows].to(h.dtype)
        if config.attention_log_base:
            scale = compute_query_scale(config, (start + torch.arange(length, device=h.device))[rows], h)
            scale = scale if documents is None else scale.unsqueeze(1)
        return h, Positions(rope, scale)

    def init_weights(self) -> None:
        """Initialize all parameters, the backbone's first; required after `to_empty` from the meta device.

        The same random state gives the same weights in every process, sharded or not.
        """
        init_backbone(self)
        for memory in self.memories:
            with full_parameters(memory):
                memory.init_weights()

    def num_parameters(self) -> int:
        """Count all parameters, a tied embedding once."""
        return sum(p.numel() for p in self.parameters())

    def num_memory_parameters(self) -> int:
        """Count the parameters of all memories."""
        return sum(p.numel() for memory in self.memories for p in memory.parameters())

    def flops_per_token(self, context_length: int) -> float:
        """Return the FLOPs of one training pass (3 x forward) per token of a sequence of `context_length` tokens.

        Every multiply-add of matrix products and memories counts 2. Attention counts as dense: 4 context_length d for
        each layer and forward pass.
        """
        config = self.config
        # An embedding lookup is free, but a tied embedding is also the output head
        tied = 0 if self.head else self.embedding.weight.numel()
        in_memories = {module for memory in self.memories for module in memory.modules()}
        backbone = [module for module in self.modules() if module not in in_memories]
        matmuls = sum(m.weight.numel() for m in backbone if isinstance(m, Linear)) + tied
        attention = 4.0 * config.num_layers * context_length * config.hidden_size
        memory = sum(m.flops_per_token(context_length) for m in self.memories)
        return 3 * (2.0 * matmuls + attention + memory)


def _average(stats: tuple[Stats, ...]) -> Stats:
    """Return the mean of each statistic."""
    return {name: torch.stack([values[name] for values in stats]).mean() for name in stats[0]}
