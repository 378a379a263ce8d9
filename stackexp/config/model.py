"""Options of the decoder."""

from dataclasses import dataclass
from typing import Any, Literal, Optional

from stackexp.config.fields import Errors, option
from stackexp.config.registry import register

FLASH_KERNELS = ("varlen", "flash_attn")
"""Choices of `model.attention` that are CUDA kernels in half precision."""

SYMBOLS = {"model.memory.num_heads": "H", "model.memory.head_dim": "d_s", "model.memory.num_slots": "S"}
"""The paper's notation, for trial names, tables and figures."""


@register("model", "transformer", builds="stackexp.models.transformer:Transformer")
@dataclass
class TransformerConfig:
    """A Llama-family decoder: RMSNorm, RoPE, SwiGLU, grouped-query attention, no biases.

    Language modeling requires the defaults of `causal` and `output_vocab_size`; other tasks may change them.
    """

    kind: str = "transformer"
    vocab_size: int = "${data.vocab_size}"  # type: ignore[assignment]
    output_vocab_size: Optional[int] = option(None, min=1)  # None: vocab_size
    hidden_size: int = option(960, min=1, max=2**20)
    num_layers: int = option(32, min=1, max=4096)
    num_heads: int = option(15, min=1)
    num_kv_heads: int = option(5, min=1)
    intermediate_size: int = option(2560, min=1, max=2**22)
    tie_embeddings: bool = True
    norm_eps: float = option(1e-5, above=0)

    # Attention. attention_window: tokens that a token attends to, itself included; None: all.
    # attention_log_base b multiplies the scores of a token that attends to n tokens by log_b n, so that attention
    # stays as sharp in longer sequences (Chiang & Cholak 2022); None: no scaling.
    positional: Literal["rope", "none", "sinusoidal", "alibi"] = "rope"
    rope_theta: float = option(1e5, above=0)
    causal: bool = True  # False: every token attends to the whole sequence
    attention_window: Optional[int] = option(None, min=1)
    attention_log_base: Optional[int] = option(None, min=2)
    # Implementation; results differ by rounding. All but sdpa train on CUDA only, varlen and flash_attn in bfloat16.
    # These three skip what a document mask excludes.
    attention: Literal["sdpa", "flex", "varlen", "flash_attn"] = option("sdpa", affects="execution")

    # Initialization. fan_in (OLMo): truncated normal at 3 sigma, sigma = 1/sqrt(hidden_size), for output projections
    # 1/sqrt(2 fan_in (layer+1)). normal: standard deviation init_std. embedding_std None: as init.
    init: Literal["fan_in", "normal"] = "fan_in"
    init_std: float = option(0.02, above=0)
    embedding_std: Optional[float] = option(None, above=0)

    memory: Any = None  # null, or a section of a registered memory kind

    def find_errors(self) -> Errors:
        """Yield the errors that involve several options."""
        if self.hidden_size % self.num_heads:
            yield "num_heads", f"{self.num_heads} does not divide hidden_size {self.hidden_size}"
        elif self.positional == "rope" and (self.hidden_size // self.num_heads) % 2:
            head_size = self.hidden_size // self.num_heads
            yield "num_heads", f"RoPE requires an even head size, but hidden_size / num_heads = {head_size}"
        if self.num_heads % self.num_kv_heads:
            yield "num_kv_heads", f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
        if self.positional == "alibi" and self.attention in FLASH_KERNELS:
            yield "attention", f"{self.attention} does not support positional: alibi; use sdpa or flex"
        if self.attention_window and not self.causal:
            yield "attention_window", "requires causal: true"
        if self.positional == "sinusoidal" and self.hidden_size % 2:
            yield "hidden_size", f"positional: sinusoidal requires an even hidden_size, found {self.hidden_size}"
        if self.tie_embeddings and self.output_vocab_size not in (None, self.vocab_size):
            yield "tie_embeddings", "an output_vocab_size other than vocab_size requires tie_embeddings: false"
