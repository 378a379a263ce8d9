"""Options of the memories between layers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Optional

from stackexp.config.fields import Problems, above, at_least
from stackexp.config.registry import register

if TYPE_CHECKING:
    from stackexp.config.model import TransformerConfig


@register("memory", "stack", builds="stackexp.models.memories.stack:StackMemory")
@dataclass
class StackMemoryConfig:
    """A differentiable stack of `num_slots` vectors of size `head_dim` for each of `num_heads` heads.

    Notation of the paper (arXiv 2507.15343): H = num_heads, d_s = head_dim, S = num_slots, lambda = entropy_weight.
    """

    kind: str = "stack"
    # Order of the updates: over the layers for each token, over the tokens for each layer, or both.
    axis: Literal["depth", "time", "token_major"] = "depth"
    discipline: Literal["stack", "queue", "push_only"] = "stack"
    num_heads: int = at_least(1, 4)
    head_dim: int = at_least(1, 16)
    num_slots: int = at_least(1, 24)
    eval_num_slots: Optional[int] = at_least(1, None)  # None: num_slots; S shapes no parameter
    # none: H * d_s = hidden_size, no W_down and W_up. shared_slices: the authors' code.
    projection: Literal["low_rank", "none", "shared_slices"] = "low_rank"
    read: Literal["global", "top"] = "global"
    read_mask: Literal["multiply", "log", "additive"] = "multiply"
    action_input: Literal["head", "hidden"] = "head"
    action_scale: Literal["none", "slice"] = "none"  # slice: logits / sqrt(hidden_size / num_heads)
    action_sharpness: float = above(0, 1.0)  # factor of the logits
    # In training: standard deviation of what is added to the logits. Every device draws the same numbers for its own
    # part of the batch, so that N devices do not train as one does. Entropy and curves are of the noisy actions.
    action_noise: float = at_least(0, 0.0)
    action_noise_steps: int = at_least(0, 0)  # it grows linearly from 0 over so many steps
    residual_gate: Literal["hidden", "read"] = "hidden"  # g_h h + R, or h + g R
    site: Literal["after_block", "after_attention", "before_attention"] = "after_block"
    feedback: bool = False  # axis time: actions and push are computed from h_t + F f(R_{t-1})
    # f; gated, with a hidden layer: tanh(a) tanh(b) of two of its units each, so that it has products to begin with
    feedback_activation: Literal["identity", "tanh", "gated"] = "identity"
    # Units of a hidden layer: f(U h_t + V R_{t-1}) is added to actions and push, each by a map of its own. What two
    # things together ask for, as a product of what was read and what comes, no linear map gives. None: no such layer.
    feedback_hidden_size: Optional[int] = at_least(1, None)
    entropy_weight: float = at_least(0, 0.001)
    # Axis depth on CUDA: every so many layers the stack is kept for the backward pass, in this precision (auto: that
    # of matrix products), and made again from it in between.
    keep_every: int = at_least(1, 4)
    state_dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    def problems(self, model: "TransformerConfig") -> Problems:
        width = self.num_heads * self.head_dim
        if self.projection == "none" and width != model.hidden_size:
            product = f"{self.num_heads} * {self.head_dim} = {width}"
            yield (
                "head_dim",
                f"projection none needs num_heads * head_dim = hidden_size, but {product}, not {model.hidden_size}",
            )
        if self.projection == "shared_slices" and model.hidden_size % self.num_heads:
            yield (
                "num_heads",
                (
                    f"projection shared_slices cuts hidden_size {model.hidden_size} into num_heads slices; "
                    f"{self.num_heads} does not divide it"
                ),
            )
        if self.action_scale == "slice" and self.action_input != "hidden":
            yield "action_scale", "slice scales the logits of action_input: hidden; set that too, or action_scale: none"
        if self.feedback and self.axis != "time":
            yield "feedback", f"feedback needs axis: time; axis {self.axis} has no earlier read of the same layer"
        if self.feedback_activation != "identity" and not self.feedback:
            yield "feedback_activation", f"{self.feedback_activation} is of what is fed back; set feedback: true too"
        if self.feedback_hidden_size is not None and self.feedback_activation == "identity":
            yield (
                "feedback_hidden_size",
                "a hidden layer needs feedback: true and feedback_activation: tanh or gated; set both",
            )
        if self.feedback_activation == "gated" and self.feedback_hidden_size is None:
            yield "feedback_activation", "gated is of a hidden layer; set feedback_hidden_size too"
        if self.axis == "token_major" and not model.causal:
            yield "axis", "token_major runs from token to token; set model.causal: true"
        if self.eval_num_slots is not None and self.eval_num_slots < self.num_slots:
            yield "eval_num_slots", f"must not be smaller than num_slots {self.num_slots}"


@register("memory", "stack_attention", builds="stackexp.models.memories.stack_attention:StackAttention")
@dataclass
class StackAttentionConfig:
    """Li et al. 2024: after the feed-forward of every layer h + Stack(h), a full-width stack over the tokens."""

    kind: str = "stack_attention"
    axis: ClassVar[str] = "time"
