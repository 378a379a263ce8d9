"""Options of the models: the decoder and the recurrent baselines."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Optional

from stackexp.config.fields import Errors, option
from stackexp.config.registry import get_entry, register

FLASH_KERNELS = ("varlen", "flash_attn")
"""Choices of `model.attention` that are CUDA kernels in half precision."""

PAPER_SYMBOLS = {"model.memory.num_heads": "H", "model.memory.head_dim": "d_s", "model.memory.num_slots": "S"}
"""The paper's notation, for trial names, tables and figures."""


@register("model", "transformer", builds="stackexp.models.transformer:Transformer")
@dataclass
class TransformerConfig:
    """A Llama-family decoder: RMSNorm, RoPE, SwiGLU, grouped-query attention, no biases but those of `qkv_bias`.

    Language modeling requires the defaults of `causal` and `output_vocab_size`; other tasks may change them.
    """

    kind: str = "transformer"
    vocab_size: int = option("${data.vocab_size}", min=1, max=2**31 - 1)
    """Number of input token ids."""
    output_vocab_size: Optional[int] = option(None, min=1, max=2**31 - 1)
    """Number of output token ids; null takes vocab_size."""
    hidden_size: int = option(960, min=1, max=2**20)
    """Width d of the hidden state."""
    num_layers: int = option(32, min=1, max=4096)
    """Number of blocks."""
    num_heads: int = option(15, min=1)
    """Attention heads."""
    num_kv_heads: int = option(5, min=1)
    """Key and value heads (grouped-query attention)."""
    intermediate_size: int = option(2560, min=1, max=2**22)
    """Width of the feed-forward layer."""
    tie_embeddings: bool = True
    """Use the input embedding as output projection."""
    norm_eps: float = option(1e-5, above=0)
    """Epsilon of RMSNorm."""
    qkv_bias: bool = False
    """Add a bias to queries, keys and values, as Qwen2.5 does."""

    positional: Literal["rope", "none", "sinusoidal", "alibi"] = "rope"
    """Positional encoding."""
    rope_theta: float = option(1e5, above=0)
    """Base of the rotary frequencies."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """How to slow the rotary frequencies for longer contexts: linear divides all by rope_factor (Chen et al. 2023),
    llama3 only those with few turns in rope_original_context (Llama 3.1)."""
    rope_factor: float = option(8.0, min=1)
    """Divisor of rope_scaling."""
    rope_original_context: int = option(8192, min=1)
    """Tokens of a sequence before the extension, for rope_scaling: llama3."""
    rope_low_freq_factor: float = option(1.0, above=0)
    """Frequencies with fewer turns in rope_original_context are divided by rope_factor, for rope_scaling: llama3."""
    rope_high_freq_factor: float = option(4.0, above=0)
    """Frequencies with more turns are kept, for rope_scaling: llama3; in between, the divisor is interpolated."""
    causal: bool = True
    """Attend to earlier tokens only."""
    attention_window: Optional[int] = option(None, min=1)
    """Tokens that a token attends to, including itself; null takes all."""
    attention_log_base: Optional[int] = option(None, min=2)
    """Base b: the scores of a token that attends to n tokens are scaled by log_b n (Chiang & Cholak 2022); null does
    not scale."""
    attention: Literal["sdpa", "flex", "varlen", "flash_attn"] = option("sdpa", affects="execution")
    """Attention kernel; results differ by rounding. All but sdpa train on CUDA only, varlen and flash_attn in
    bfloat16.
    """
    residual_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the hidden states between the sublayers with trainer.precision: bf16-mixed; the weights stay
    float32.
    """

    init: Literal["fan_in", "normal"] = "fan_in"
    """Distribution of random initial weights: fan_in (OLMo) is a truncated normal with sigma 1/sqrt(hidden_size),
    1/sqrt(2 fan_in (layer + 1)) for output projections; normal has the standard deviation init_std.
    """
    init_std: float = option(0.02, above=0)
    """Standard deviation of init: normal."""
    embedding_std: Optional[float] = option(None, above=0)
    """Standard deviation of the embedding; null follows init."""
    embedding_scale: float = option(1.0, above=0)
    """Factor on the embedding before the first layer, not on a tied output projection; Gemma uses sqrt(hidden_size).
    positional: sinusoidal has this factor without the option."""

    mup_base_size: Optional[int] = option(None, min=1)
    """Hidden size at which the learning rate was tuned (muP, Yang et al. 2022); null has no width scaling. Matrices
    train at lr * mup_base_size / hidden_size, logits have the same factor, and the attention is unchanged because the
    head size is.
    """

    memory: Any = None
    """The memory between the layers, or null."""

    @property
    def memory_axis(self) -> str:
        """The axis of the memory: its option, or the attribute of a plugin's class; depth without a memory."""
        if self.memory is None:
            return "depth"
        owner = self.memory if hasattr(self.memory, "axis") else get_entry("memory", self.memory.kind).builds
        return str(getattr(owner, "axis", "depth"))

    def find_errors(self) -> Errors:
        """Yield the errors that involve several options."""
        if self.hidden_size % self.num_heads:
            yield "num_heads", f"{self.num_heads} does not divide hidden_size {self.hidden_size}"
        elif self.positional == "rope" and (self.hidden_size // self.num_heads) % 2:
            head_size = self.hidden_size // self.num_heads
            yield "num_heads", f"RoPE requires an even head size, but hidden_size / num_heads = {head_size}"
        yield from self._find_rope_errors()
        yield from self._find_init_errors()
        if self.num_heads % self.num_kv_heads:
            yield "num_kv_heads", f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
        if self.positional == "alibi" and self.attention in FLASH_KERNELS:
            yield "attention", f"{self.attention} does not support positional: alibi; use sdpa or flex"
        if self.attention_window and not self.causal:
            yield "attention_window", "requires causal: true"
        if self.positional == "sinusoidal" and self.embedding_scale != 1:
            yield "embedding_scale", "positional: sinusoidal scales by sqrt(hidden_size) already; use 1"
        if self.positional == "sinusoidal" and self.hidden_size % 2:
            yield "hidden_size", f"positional: sinusoidal requires an even hidden_size, found {self.hidden_size}"
        if self.tie_embeddings and self.output_vocab_size not in (None, self.vocab_size):
            yield "tie_embeddings", "an output_vocab_size other than vocab_size requires tie_embeddings: false"

    def _find_init_errors(self) -> Errors:
        if self.init == "fan_in" and self.init_std != 0.02:
            yield "init_std", "has no effect with init: fan_in; use init: normal"
        if self.mup_base_size is None:
            return
        if self.init != "fan_in" or self.embedding_std is None:
            yield "mup_base_size", "requires init: fan_in and a value of embedding_std, the same for all widths"
        for name, value in {"init_std": None, "action_scale": "none"}.items():  # of the same size at any width
            if getattr(self.memory, name, value) != value:
                yield f"memory.{name}", f"not supported with model.mup_base_size; use {value or 'null'}"

    def _find_rope_errors(self) -> Errors:
        if self.rope_scaling == "none" and self.rope_factor != 8:
            yield "rope_factor", "requires rope_scaling: linear or llama3"
        if self.rope_scaling != "none" and self.positional != "rope":
            yield "rope_scaling", f"requires positional: rope, found {self.positional}"
        if self.rope_scaling == "llama3" and self.rope_low_freq_factor >= self.rope_high_freq_factor:
            yield "rope_low_freq_factor", f"must be less than rope_high_freq_factor {self.rope_high_freq_factor}"


@dataclass
class RecurrentConfig:
    """Options of all recurrent models: an embedding, `num_layers` layers of `hidden_size`, an output projection."""

    kind: str = ""
    vocab_size: int = option("${data.vocab_size}", min=1, max=2**31 - 1)
    """Number of input token ids."""
    output_vocab_size: Optional[int] = option(None, min=1, max=2**31 - 1)
    """Number of output token ids; null takes vocab_size."""
    hidden_size: int = option(64, min=1, max=2**20)
    """Width of the hidden state."""
    num_layers: int = option(5, min=1, max=4096)
    """Number of layers."""


@register("model", "lstm", builds="stackexp.models.recurrent:LSTM")
@dataclass
class LSTMConfig(RecurrentConfig):
    """A multi-layer LSTM."""

    kind: str = "lstm"


@register("model", "stack_rnn", builds="stackexp.models.recurrent:StackRNN")
@dataclass
class StackRNNConfig(RecurrentConfig):
    """A tanh RNN that reads the top of a differentiable stack (Joulin & Mikolov 2015)."""

    kind: str = "stack_rnn"
    slot_size: int = option(8, min=1, max=2**20)
    """Size of an element of the stack."""
    num_slots: int = option(64, min=1, max=2**20)
    """Number of slots of the stack; independent of the parameter shapes."""
    eval_num_slots: Optional[int] = option(None, min=1, max=2**20, affects="evaluation", changes_scores=True)
    """Slots in evaluations; null takes num_slots."""

    def find_errors(self) -> Errors:
        """Yield the errors that involve several options."""
        if self.eval_num_slots is not None and self.eval_num_slots < self.num_slots:
            yield "eval_num_slots", f"must not be smaller than num_slots {self.num_slots}"


@register("model", "delta_net", builds="stackexp.models.delta:DeltaNet")
@dataclass
class DeltaNetConfig(RecurrentConfig):
    """DeltaNet (Yang et al. 2024) or, with several Householder steps per token, DeltaProduct (Siems et al. 2025)."""

    kind: str = "delta_net"
    init: ClassVar[str] = "fan_in"
    num_heads: int = option(4, min=1)
    """Heads of the recurrence."""
    intermediate_size: int = option(176, min=1, max=2**22)
    """Width of the feed-forward layer."""
    norm_eps: float = option(1e-5, above=0)
    """Epsilon of RMSNorm."""
    num_householder: int = option(1, min=1, max=64)
    """Updates of the state per token; more than 1 is DeltaProduct."""
    allow_negative_eigenvalues: bool = True
    """Let the step size be in (0, 2), so that the state can change its sign (Grazzi et al. 2024); else in (0, 1)."""
    conv_size: Optional[int] = option(4, min=2, max=2**10)
    """Tokens of the causal convolution on queries, keys and values; null has none."""
    kernel: Literal["torch", "fla"] = option("torch", affects="execution")
    """Implementation of the recurrence; fla is the package flash-linear-attention, which runs on CUDA only and in
    bfloat16."""

    def find_errors(self) -> Errors:
        """Yield the errors that involve several options."""
        if self.hidden_size % self.num_heads:
            yield "num_heads", f"{self.num_heads} does not divide hidden_size {self.hidden_size}"
