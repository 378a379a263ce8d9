"""The decoder: Llama family, one slot per layer for a memory (`memory.py`). `memory: null` is the plain Transformer."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config import registry
from stackexp.config.model import TransformerConfig
from stackexp.data.documents import compute_document_positions
from stackexp.models.activation_checkpointing import Recompute, recomputed
from stackexp.models.attention import Attention, KeysValues, Place
from stackexp.models.attention_backends import sight
from stackexp.models.cross_entropy import Head
from stackexp.models.initialization import init_weight_, whole
from stackexp.models.layers import Embedding, FeedForward, Linear, RMSNorm
from stackexp.models.memories.base import Memory, State, Trace
from stackexp.models.positional import log_scale, rope_table, sin_cos_table


class DecoderOutput(NamedTuple):
    logits: Tensor | None  # [B, T, V]; None where `hidden` was asked for
    entropy: Tensor  # mean action entropy over tokens, heads and layers in nats, []; 0 without a memory
    probes: list[Trace] | None  # with probe=True, what each layer's memory tells of itself, as scalars
    hidden: Tensor | None = None  # [B, T, d], which the model's `output_head` projects onto the vocabulary


@dataclass
class Cache:
    """What a decoder keeps of the tokens it has seen; `forward` reads and advances it."""

    length: int = 0
    keys_values: dict[int, KeysValues] = field(default_factory=dict)  # of each layer: of all tokens that are yet seen
    states: dict[int, State] = field(default_factory=dict)  # of the memory; see `Transformer._decode`


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to h, and perhaps a memory at its site."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.memory: Memory | None = None

    def forward(
        self,
        h: Tensor,
        state: State,
        past: KeysValues | None,
        place: Place,
        probe: bool,
        seen: Any = None,
        recompute: Recompute = False,
    ) -> tuple[Tensor, State, KeysValues, Trace]:
        """h [B, T, d] and the memory's state (None: empty) -> new h, new state, keys and values, trace.

        `recompute`: see `Transformer`. `seen`: see `Attention`.
        """
        args = (h, state, past, place, probe, seen)
        if recompute and torch.is_grad_enabled():
            draws = self.memory is not None and self.memory.draws
            return recomputed(self._forward, *args, selective=recompute == "selective", draws=draws)
        return self._forward(*args)

    def _forward(
        self, h: Tensor, state: State, past: KeysValues | None, place: Place, probe: bool, seen: Any
    ) -> tuple[Tensor, State, KeysValues, Trace]:
        trace: Trace = {}
        site = self.memory.site if self.memory else None
        if self.memory and state is None:
            state = self.memory.empty_state(h)
        if site == "before_attention":
            h, state, trace = self.memory(h, state, probe)
        attended, present = self.attention(self.attention_norm(h), place, past, seen)
        h = h + attended
        if site == "after_attention":
            h, state, trace = self.memory(h, state, probe)
        h = h + self.feed_forward(self.feed_forward_norm(h))
        if site == "after_block":
            h, state, trace = self.memory(h, state, probe)
        return h, state, present, trace


class Transformer(nn.Module):
    """Decoder of the Llama family with a slot for a memory in each layer.

    Set `checkpoint_blocks` to recompute each block in the backward pass instead of keeping its activations: all of it
    (True), or what takes no matrix product ("selective").
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks: Recompute = False
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        outputs = config.output_vocab_size or config.vocab_size
        self.head = None if config.tie_embeddings else Linear(config.hidden_size, outputs)
        self._init_backbone()  # before any memory exists: the same draws with and without one
        if config.memory is not None:
            for i, layer in enumerate(self.layers):
                with torch.random.fork_rng([]):  # on a meta device, constructing draws nothing
                    layer.memory = registry.build("memory", config.memory, model=config, layer=i)
                layer.memory.init_weights()

    @property
    def memories(self) -> list[Memory]:
        """The memory of each layer; empty without one."""
        return [layer.memory for layer in self.layers if layer.memory is not None]

    @property
    def axis(self) -> str | None:
        return self.memories[0].axis if self.memories else None

    @property
    def entropy_weight(self) -> float:
        """lambda, the weight of the action entropy in the loss."""
        return self.memories[0].entropy_weight if self.memories else 0.0

    @property
    def output_head(self) -> Head:
        """What makes logits of `hidden`. Of a sharded model: after its forward pass, which gathers it."""
        return Head(self.head.weight if self.head else self.embedding.weight)

    def forward(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        probe: bool = False,
        documents: Tensor | None = None,
        document_bounds: Tensor | None = None,
        return_hidden: bool = False,
    ) -> DecoderOutput:
        """tokens [B, T] int64, which follow those in `cache`, if given -> logits [B, T, V] of next tokens, or answers.

        With `documents` [B, T], the number of each token's document, a token attends within its document alone, and
        positions begin anew in each: as if documents were run one by one. Only without a cache, and without a memory
        that lasts from token to token: raises ValueError. So does a cache of a model that is not causal.
        `document_bounds`: `find_document_bounds` of them, which some attention backends would find themselves.
        With `hidden` what would be projected onto the vocabulary, in place of the logits.
        """
        if not self.config.causal and (cache is not None or documents is not None or self.axis == "token_major"):
            raise ValueError(
                "a token that sees later ones (model.causal=false) can go with no cache, no axis token_major "
                "and no document mask; set model.causal=true"
            )
        if documents is not None and (cache is not None or self.axis in ("time", "token_major")):
            raise ValueError(
                "documents cannot be told apart in a cache, nor by a memory that lasts from token to token; "
                "set data.document_mask=false or model.memory.axis=depth"
            )
        h = self.embedding(tokens)
        if self.axis == "token_major":  # all layers for one token, then the next
            cache = Cache() if cache is None else cache
            columns, traces = zip(*(self._decode(column, cache, probe) for column in h.split(1, 1)), strict=True)
            h, traces = torch.cat(columns, 1), [_mean(of_layer) for of_layer in zip(*traces, strict=True)]
        else:
            h, traces = self._decode(h, cache, probe, documents, document_bounds)
        h = self.norm(h)
        entropies = [trace["entropy"] for trace in traces if "entropy" in trace]
        entropy = torch.stack(entropies).mean() if entropies else h.new_zeros((), dtype=torch.float32)
        probes = [{name: value.detach() for name, value in trace.items()} for trace in traces] if probe else None
        if return_hidden:
            return DecoderOutput(None, entropy, probes, h)
        return DecoderOutput(F.linear(h, self.output_head.weight), entropy, probes)

    def _decode(
        self,
        h: Tensor,
        cache: Cache | None,
        probe: bool,
        documents: Tensor | None = None,
        document_bounds: Tensor | None = None,
    ) -> tuple[Tensor, list[Trace]]:
        """All layers over h [B, T, d].

        A layer takes its memory's state from states[key] and leaves it there. One key for all layers hands the state
        from layer to layer (depth, token_major), a key for each keeps it with the layer (time); a dict in the cache
        lasts from token to token (time, token_major), a new one for this pass (depth).
        """
        start = cache.length if cache else 0
        behind = self.config.attention_window - 1 if self.config.attention_window else start + h.shape[1]
        seen = sight(self.config, min(start, behind), h, documents, document_bounds)
        h, place = self._place(h, start, documents)
        states = cache.states if cache and self.axis != "depth" else {}
        traces = []
        for i, layer in enumerate(self.layers):
            key = i if self.axis == "time" else 0
            past = cache.keys_values.get(i) if cache else None
            h, states[key], present, trace = layer(h, states.get(key), past, place, probe, seen, self.checkpoint_blocks)
            traces.append(trace)
            if cache and (kept := min(start + h.shape[1], behind)):
                cache.keys_values[i] = tuple(x[:, :, -kept:] for x in present)
        if cache:
            cache.length += h.shape[1]
        return h, traces

    def _place(self, h: Tensor, start: int, documents: Tensor | None) -> tuple[Tensor, Place]:
        """Tell tokens start .. start+T-1, h [B, T, d], where they stand: new h, and what attention needs of it.

        Sinusoids are added to sqrt(d) h (Vaswani et al. 2017, section 3.4: h would be small beside them).
        """
        config, length = self.config, h.shape[1]
        rope = scale = None
        places = slice(None) if documents is None else compute_document_positions(documents)
        if config.positional == "rope":
            rope = rope_table(config, start, length, h)[:, places]
            rope = rope if documents is None else rope.unsqueeze(2)
        elif config.positional == "sinusoidal":
            table = sin_cos_table(config.hidden_size, start, length, h)
            h = math.sqrt(config.hidden_size) * h + table[places].to(h.dtype)
        if config.attention_log_base:
            scale = log_scale(config, torch.arange(start, start + length, device=h.device)[places])
            scale = scale if documents is None else scale.unsqueeze(1)
        return h, Place(rope, scale)

    def init_weights(self) -> None:
        """Draw all parameters afresh, the backbone's first; needed after `to_empty` from the meta device.

        The same draws in every process, sharded or not, with the same state of torch's generator.
        """
        self._init_backbone()
        for memory in self.memories:
            with whole(memory):
                memory.init_weights()

    def _init_backbone(self) -> None:
        self._init_embedding()
        for i, layer in enumerate(self.layers):
            attention, ffn = layer.attention, layer.feed_forward
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, ffn.gate_proj, ffn.up_proj):
                self._init_linear(linear)
            for linear in (attention.o_proj, ffn.down_proj):
                self._init_linear(linear, output_of_layer=i)
            nn.init.ones_(layer.attention_norm.weight)
            nn.init.ones_(layer.feed_forward_norm.weight)
        nn.init.ones_(self.norm.weight)
        if self.head:
            self._init_linear(self.head)

    def _init_embedding(self) -> None:
        if self.config.embedding_std is None:
            return self._init_linear(self.embedding)
        with whole(self.embedding):
            nn.init.normal_(self.embedding.weight, std=self.config.embedding_std)

    def _init_linear(self, linear: nn.Linear | nn.Embedding, output_of_layer: int | None = None) -> None:
        with whole(linear):
            init_weight_(linear.weight, self.config, output_of_layer)

    def num_parameters(self, memory: bool | None = None) -> int:
        """All parameters, a tied embedding counted once; only the memory's (True) or the backbone's (False)."""
        of_memory = sum(p.numel() for m in self.memories for p in m.parameters())
        if memory is True:
            return of_memory
        total = sum(p.numel() for p in self.parameters())
        return total if memory is None else total - of_memory

    def flops_per_token(self, context_length: int) -> float:
        """Floating point operations of one training pass (3 x forward) per token of a sequence of `context_length`.

        2 per multiply-add of every matrix product and of the memory; attention as dense: 4 context_length d a layer.
        """
        config = self.config
        tied = 0 if self.head else self.embedding.weight.numel()  # the embedding is a look-up, the head a product
        matmuls = sum(m.weight.numel() for m in self.modules() if isinstance(m, Linear)) + tied
        attention = 4.0 * config.num_layers * context_length * config.hidden_size
        memory = sum(m.flops_per_token(context_length) for m in self.memories)
        return 3 * (2.0 * matmuls + attention + memory)


def _mean(traces: tuple[Trace, ...]) -> Trace:
    """The mean of each scalar over several traces of one layer."""
    return {name: torch.stack([trace[name] for trace in traces]).mean() for name in traces[0]}
