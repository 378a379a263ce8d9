"""Options of the decoder."""

from dataclasses import dataclass
from typing import Any, Literal, Optional

from stackexp.config.fields import Problems, above, at_least
from stackexp.config.registry import register

FLASH_KERNELS = ("varlen", "flash_attn")
"""Choices of `model.attention` that are kernels for CUDA, in half precision."""


SYMBOLS = {"model.memory.num_heads": "H", "model.memory.head_dim": "d_s", "model.memory.num_slots": "S"}
"""The paper's notation, for names of trials, tables and figures."""


@register("model", "transformer", builds="stackexp.models.transformer:Transformer")
@dataclass
class TransformerConfig:
    """Decoder of the Llama family: RMSNorm, RoPE, SwiGLU, grouped-query attention, no biases.

    `positional`, `causal` and `output_vocab_size` are for other tasks than language modeling.
    """

    kind: str = "transformer"
    vocab_size: int = "${data.vocab_size}"  # type: ignore[assignment]
    output_vocab_size: Optional[int] = at_least(1, None)  # None: vocab_size
    hidden_size: int = at_least(1, 960)
    num_layers: int = at_least(1, 32)
    num_heads: int = at_least(1, 15)
    num_kv_heads: int = at_least(1, 5)
    intermediate_size: int = at_least(1, 2560)
    positional: Literal["rope", "none", "sin_cos", "alibi"] = "rope"
    causal: bool = True  # False: every token sees all of its sequence
    attention_window: Optional[int] = at_least(1, None)  # a token sees the last so many, itself included; None: all
    # The scores of a token that sees n tokens are times log n to this base, so that attention to a few of them spreads
    # no further among more (Chiang & Cholak 2022). None: not.
    attention_log_base: Optional[int] = at_least(2, None)
    rope_theta: float = above(0, 1e5)
    norm_eps: float = above(0, 1e-5)
    tie_embeddings: bool = True
    # What computes attention: figures differ within rounding. All but sdpa train on CUDA alone, and the last two in
    # bfloat16; they skip what a document mask leaves out.
    attention: Literal["sdpa", "flex", "varlen", "flash_attn"] = "sdpa"
    # fan_in: truncated normal at 3 sigma, sigma = 1/sqrt(hidden_size), outputs 1/sqrt(2 fan_in (layer+1)) (OLMo).
    init: Literal["fan_in", "normal"] = "fan_in"
    init_std: float = above(0, 0.02)  # of init: normal
    embedding_std: Optional[float] = above(0, None)  # of the embedding, drawn normal; None: as init says
    memory: Any = None  # null, or a section of a registered memory kind

    def problems(self) -> Problems:
        if self.hidden_size % self.num_heads:
            yield "num_heads", f"{self.num_heads} heads do not divide hidden_size {self.hidden_size}"
        elif self.positional == "rope" and (self.hidden_size // self.num_heads) % 2:
            head_size = self.hidden_size // self.num_heads
            yield "num_heads", f"RoPE needs an even head size, but hidden_size / num_heads = {head_size}"
        if self.num_heads % self.num_kv_heads:
            yield "num_kv_heads", f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
        if self.positional == "alibi" and self.attention in FLASH_KERNELS:
            yield "attention", f"{self.attention} knows no positional alibi; set it to sdpa or flex"
        if self.attention_window and not self.causal:
            yield "attention_window", "is of the tokens before; set causal: true"
        if self.positional == "sin_cos" and self.hidden_size % 2:
            yield "hidden_size", f"positional sin_cos needs an even one, found {self.hidden_size}"
        if self.tie_embeddings and self.output_vocab_size not in (None, self.vocab_size):
            yield "tie_embeddings", "answers in symbols of their own (output_vocab_size) need a head: set it to false"
