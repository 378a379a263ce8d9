"""Options of the memories between layers."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Optional

from stackexp.config.fields import Errors, option
from stackexp.config.registry import register

if TYPE_CHECKING:
    from stackexp.config.model import TransformerConfig


MECHANISM = ("discipline", "num_slots", "eval_num_slots", "read", "action_", "entropy_weight", "feedback")
"""Prefixes of the options of a stack that have no effect if it only pushes and has one slot."""


@register("memory", "stack", builds="stackexp.models.memories.extensions:ExtendedStackMemory")
@dataclass
class StackMemoryConfig:
    """A differentiable stack of `num_slots` vectors of size `head_dim` for each of `num_heads` heads.

    Notation of the paper (arXiv 2507.15343): H = num_heads, d_s = head_dim, S = num_slots, lambda = entropy_weight.
    """

    kind: str = "stack"
    axis: Literal["depth", "time", "token_major"] = "depth"
    """Direction of the updates: over the layers of each token (depth), over the tokens in each layer (time), or both
    (token_major)."""
    discipline: Literal["stack", "queue", "push_only"] = "stack"
    """Element that a pop removes: the newest (stack) or the oldest (queue). push_only always pushes and never pops."""
    num_heads: int = option(4, min=1, max=2**20)
    """Number of stacks H."""
    head_dim: int = option(16, min=1, max=2**20)
    """Size d_s of an element."""
    num_slots: int = option(24, min=1, max=2**20)
    """Number of slots S of each stack; independent of the parameter shapes."""
    eval_num_slots: Optional[int] = option(None, min=1, max=2**20, affects="evaluation", changes_scores=True)
    """Slots in evaluations; null takes num_slots."""
    entropy_weight: float = option(0.001, min=0)
    """Weight lambda of the mean action entropy in the loss."""

    projection: Literal["low_rank", "none", "shared_slices"] = "low_rank"
    """Projection to the stacks: low_rank has W_down and W_up, none requires H * d_s = hidden_size, shared_slices is
    that of the authors' code.
    """
    read: Literal["global", "top"] = "global"
    """Read by attention over all slots (global), or the top slot only."""
    read_mask: Literal["multiply", "log", "additive"] = "multiply"
    """Effect of occupancy on the read scores; see stack/reference.py."""
    empty_slot: bool = False
    """Add a slot of zeros with a learned score to the global read (axis: depth; slower, without kernels)."""
    residual_gate: Literal["hidden", "read"] = "hidden"
    """Term that the gate scales: the hidden state (g h + R) or the read (h + g R)."""
    site: Literal["after_block", "after_attention", "before_attention", "each_sublayer"] = "after_block"
    """Position of the memory in a block; each_sublayer has one memory after the attention and one after the block."""
    push_norm: Literal["none", "head"] = "none"
    """Normalization of the pushed vectors; head divides the vector of each head by its root mean square."""
    init_std: Optional[float] = option(None, above=0)
    """Standard deviation of the memory's initial weights, except the gate; null follows model.init."""

    action_input: Literal["head", "hidden"] = "head"
    """Input of the action logits: the projected head, or the whole hidden state."""
    action_scale: Literal["none", "slice"] = "none"
    """Scale of the action logits; slice divides by sqrt(hidden_size / num_heads), except what a hidden layer of the
    feedback adds."""
    action_bias: Optional[float] = option(None)
    """Initial push logit of a learned action bias, whose other logits start at 0; null has no bias."""
    action_sharpness: float = option(1.0, above=0)
    """Factor on the action logits."""
    action_noise: float = option(0.0, min=0)
    """Standard deviation of the noise on the action logits in training; the result depends on the number of devices."""
    action_noise_warmup_steps: int = option(0, min=0)
    """Steps over which the noise grows from 0."""

    feedback: bool = False
    """Compute actions and pushes from h_t + F f(R_{t-1}), where R is the read (axis: time)."""
    feedback_activation: Literal["identity", "tanh", "gated"] = "identity"
    """The function f; gated is tanh(a) tanh(b) of two pre-activations and can represent products."""
    feedback_hidden_size: Optional[int] = option(None, min=1, max=2**22)
    """Width of a hidden layer f(U h_t + V R_{t-1}), which feeds actions and pushes through its own linear map; null
    has none."""

    checkpoint_every_layers: int = option(4, min=1)
    """Layers between two stacks that are stored for the backward pass; others are recomputed (CUDA, axis depth)."""
    state_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the stored stacks (CUDA, axis depth); auto is that of the matrix products. CPUs store float32."""

    @property
    def updates_per_layer(self) -> int:
        """The number of updates of a token's stacks in one layer."""
        return 2 if self.site == "each_sublayer" else 1

    def build_adapter(self) -> dict[str, Any]:
        """Return the options that remove the memory only: each layer reads the vector that it has just pushed."""
        reset = {k: value for k, value in self._list_action_defaults().items() if getattr(self, k) != value}
        return reset | {"discipline": "push_only", "num_slots": 1}

    def _list_action_defaults(self) -> dict[str, Any]:
        return {f.name: f.default for f in dataclasses.fields(self) if f.name.startswith(("action_", "feedback"))}

    def find_errors(self, model: "TransformerConfig") -> Errors:
        """Yield the errors that involve several options of the memory or the model."""
        width = self.num_heads * self.head_dim
        if self.projection == "none" and width != model.hidden_size:
            product = f"num_heads * head_dim = {self.num_heads} * {self.head_dim} = {width}"
            yield "head_dim", f"projection: none requires num_heads * head_dim = hidden_size, but {product}"
        if self.projection == "shared_slices" and model.hidden_size % self.num_heads:
            slices = f"projection: shared_slices requires num_heads to divide hidden_size {model.hidden_size}"
            yield "num_heads", f"{slices}, found {self.num_heads}"
        if self.action_scale == "slice" and self.action_input != "hidden":
            yield "action_scale", "slice requires action_input: hidden"
        if self.discipline == "push_only":
            yield from self._find_push_only_errors()
        yield from self._find_feedback_errors()
        if self.empty_slot and (self.axis, self.read) != ("depth", "global"):
            yield "empty_slot", "requires axis: depth and read: global"
        if self.read == "top" and self.read_mask != "multiply":
            yield "read_mask", f"{self.read_mask} requires read: global, found read: top; use multiply"
        if self.state_dtype != "auto" and self.axis != "depth":
            yield "state_dtype", f"{self.state_dtype} requires axis: depth, found axis: {self.axis}; use auto"
        if self.site == "each_sublayer" and self.axis == "time":
            yield "site", "each_sublayer requires axis: depth or token_major, found axis: time"
        if self.axis == "token_major" and not model.causal:
            yield "axis", "token_major requires model.causal: true"
        if self.eval_num_slots is not None and self.eval_num_slots < self.num_slots:
            yield "eval_num_slots", f"must not be smaller than num_slots {self.num_slots}"

    def _find_push_only_errors(self) -> Errors:
        """Yield an error for each option of actions and feedback that is set, because push_only has neither."""
        for name, default in self._list_action_defaults().items():
            if getattr(self, name) != default:
                value = "null" if default is None else str(default).lower()
                yield name, f"not supported by discipline: push_only, which always pushes; use {value}"

    def _find_feedback_errors(self) -> Errors:
        if self.feedback and self.axis != "time":
            yield "feedback", f"requires axis: time, found axis: {self.axis}"
        if self.feedback and self.push_norm != "none":
            yield "push_norm", f"{self.push_norm} is not supported with feedback: true; use none"
        if self.feedback and self.action_bias is not None:
            yield "action_bias", "not supported with feedback: true; use null"
        if self.feedback_activation != "identity" and not self.feedback:
            yield "feedback_activation", f"{self.feedback_activation} requires feedback: true"
        if self.feedback_hidden_size is not None and self.feedback_activation == "identity":
            yield "feedback_hidden_size", "requires feedback: true and feedback_activation: tanh or gated"
        if self.feedback_activation == "gated" and self.feedback_hidden_size is None:
            yield "feedback_activation", "gated requires feedback_hidden_size"


@register("memory", "stack_attention", builds="stackexp.models.memories.stack_attention:StackAttention")
@dataclass
class StackAttentionConfig:
    """Stack attention (Li et al. 2024): h + Stack(h) after every layer, with a full-width stack over the tokens."""

    kind: str = "stack_attention"
    axis: ClassVar[str] = "time"


@register("memory", "stratified_stack", builds="stackexp.models.memories.stratified_stack:StratifiedStack")
@dataclass
class StratifiedStackConfig:
    """A continuous stack over the tokens whose elements have strengths (Grefenstette et al. 2015, arXiv 1506.02516)."""

    kind: str = "stratified_stack"
    axis: ClassVar[str] = "time"
    num_heads: int = option(4, min=1, max=2**20)
    """Number of stacks."""
    head_dim: int = option(16, min=1, max=2**20)
    """Size of an element."""


@register(
    "memory", "nondeterministic_stack", builds="stackexp.models.memories.nondeterministic_stack:NondeterministicStack"
)
@dataclass
class NondeterministicStackConfig:
    """Nondeterministic stack attention over the tokens (DuSell & Chiang 2024, arXiv 2310.01749)."""

    kind: str = "nondeterministic_stack"
    axis: ClassVar[str] = "time"
    num_states: int = option(2, min=1, max=64)
    """States of the automaton."""
    num_symbols: int = option(2, min=1, max=64)
    """Stack symbols of the automaton."""
    head_dim: int = option(16, min=1, max=2**20)
    """Size of the vector of an element."""
    layers: Literal["middle", "all"] = "middle"
    """Layers with a stack: the middle one, as in the paper, or all."""


@register("memory", "attention_residual", builds="stackexp.models.memories.attention_residual:AttentionResidual")
@dataclass
class AttentionResidualConfig:
    """Attention over the outputs of all earlier sublayers (Kimi Team 2026, arXiv 2603.15031)."""

    kind: str = "attention_residual"


@register("memory", "dense_former", builds="stackexp.models.memories.dense_former:DenseFormer")
@dataclass
class DenseFormerConfig:
    """A learned average over the outputs of all earlier blocks (Pagliardini et al. 2024, arXiv 2402.02622)."""

    kind: str = "dense_former"


@register("memory", "hyper_connections", builds="stackexp.models.memories.hyper_connections:HyperConnections")
@dataclass
class HyperConnectionsConfig:
    """Several residual streams with learned connections (Zhu et al. 2024, arXiv 2409.19606)."""

    kind: str = "hyper_connections"
    num_streams: int = option(4, min=2, max=64)
    """Number of streams n, the expansion rate."""
    dynamic: bool = True
    """Let the connections depend on the hidden states."""


@register("memory", "mhc", builds="stackexp.models.memories.hyper_connections:ManifoldHyperConnections")
@dataclass
class ManifoldHyperConnectionsConfig(HyperConnectionsConfig):
    """Hyper-connections with a doubly stochastic residual matrix (Xie et al. 2025, arXiv 2512.24880)."""

    kind: str = "mhc"


@register("memory", "residual_scale", builds="stackexp.models.memories.controls:ResidualScale")
@dataclass
class ResidualScaleConfig:
    """Learned scalars on the hidden state, on the output of each sublayer and on the embedding."""

    kind: str = "residual_scale"


@register("memory", "residual_stack", builds="stackexp.models.memories.residual_stack:ResidualStack")
@dataclass
class ResidualStackConfig:
    """A stack of residual streams: each sublayer pushes or pops the hidden state itself."""

    kind: str = "residual_stack"
    axis: ClassVar[str] = "depth"
    num_slots: int = option(4, min=2, max=64)
    """Number of slots S, one of which is the residual stream."""
    update: Literal["stack", "none"] = "stack"
    """Movement of the slots: pushes and pops, or none (the control)."""


@register("memory", "value_skip", builds="stackexp.models.memories.controls:ValueSkip")
@dataclass
class ValueSkipConfig:
    """A low-rank skip from the embedding into every layer."""

    kind: str = "value_skip"
    rank: int = option(16, min=1, max=2**20)
    """Rank of the skip."""
