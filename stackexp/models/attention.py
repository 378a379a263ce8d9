"""Grouped-query attention, its backends and the positional encodings.

A backend is one function per choice of `model.attention`:

    sdpa        torch's scaled_dot_product_attention, on CUDA with cuDNN where it runs; a document mask is dense,
                [B, 1, T, T]
    flex        torch's flex_attention, which skips fully masked blocks; forward only on CPUs
    varlen      torch.nn.attention.varlen over concatenated documents; CUDA, bfloat16
    flash_attn  the package flash-attn (`pip install 'stackexp[flash]'`); CUDA, bfloat16

It takes q [B, heads, T, D], k and v [B, kv heads, T, D], the mask from `build_mask` in its own format, and whether
attention is causal. It returns [B, heads, T, D].
"""

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from stackexp.config.model import TransformerConfig
from stackexp.data.documents import build_document_mask, find_document_bounds
from stackexp.errors import ConfigError, first_line
from stackexp.models.layers import Linear, apply_linears, get_matmul_dtype

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

SINUSOIDAL_BASE = 10_000.0
CUDA_KERNELS = [
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
]
"""Kernels of sdpa without a mask, the fastest first: for a head size of 64 on an H100, cuDNN has published 334 TFLOP/s
forward, FlashAttention-2 262."""


def compute_rope_frequencies(config: TransformerConfig, like: Tensor) -> Tensor:
    """Return the angle per token of each pair of elements, in radians: [head size / 2], at least float32.

    With `rope_scaling`, slow frequencies are divided by `rope_factor`. For llama3, those with at most
    `rope_low_freq_factor` turns in the original context are slow, and those with `rope_high_freq_factor` are kept.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    head_size = config.hidden_size // config.num_heads
    frequencies = config.rope_theta ** (-torch.arange(0, head_size, 2, device=like.device, dtype=dtype) / head_size)
    if config.rope_scaling == "none":
        return frequencies
    if config.rope_scaling == "linear":
        return frequencies / config.rope_factor
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = config.rope_original_context * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / config.rope_factor


Position = int | Tensor
"""The position of a token. A tensor, int64 [1], is read on the device, so a CUDA graph can advance it."""


def build_rope_table(config: TransformerConfig, start: Position, length: int, like: Tensor) -> Tensor:
    """Return cosines and sines for positions start .. start+length-1: [2, length, head size / 2], at least float32."""
    frequencies = compute_rope_frequencies(config, like)
    positions = start + torch.arange(length, device=like.device)
    angles = positions.to(frequencies.dtype).outer(frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate x [B, heads, T, head size] by a table from `build_rope_table`.

    The table is [2, T, head size / 2], or [2, B, 1, T, head size / 2] if each sequence has its own positions. The two
    elements of a pair are half a head apart, as in Llama.
    """
    first, second = x.chunk(2, -1)
    cos, sin = rope
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def build_sinusoidal_table(size: int, start: Position, length: int, like: Tensor) -> Tensor:
    """Return the encodings of positions start .. start+length-1: [length, size], at least float32.

    Element 2i of position p is sin(p / 10000^(2i/size)), element 2i+1 the cosine (Vaswani et al. 2017, section 3.5).
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequencies = SINUSOIDAL_BASE ** (-torch.arange(0, size, 2, device=like.device, dtype=dtype) / size)
    angles = (start + torch.arange(length, device=like.device)).to(dtype).outer(frequencies)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)


def compute_alibi_slopes(num_heads: int, like: Tensor) -> Tensor:
    """Return one slope per head [heads] (Press et al. 2022), at least float32.

    For n heads, n a power of two, they are 2^(-8 h / n), h = 1 .. n. For other n, take the slopes for the next lower
    power of two, then every second slope for the next higher one.
    """
    lower = 2 ** int(math.log2(num_heads))
    dtype = torch.promote_types(like.dtype, torch.float32)
    heads = torch.arange(1, num_heads + 1, device=like.device, dtype=torch.float64)  # copying a list waits for the GPU
    return torch.exp2(-8 / lower * torch.where(heads <= lower, heads, heads - lower - 0.5)).to(dtype)


def build_alibi_bias(num_heads: int, start: Position, length: int, num_keys: int, causal: bool, like: Tensor) -> Tensor:
    """Return the score bias -slope |i - j| of query i and key j: [1, heads, length, num_keys], at least float32.

    The queries are at start .. start+length-1, the keys at 0 .. num_keys-1. Keys after a query have -inf if `causal`.
    """
    offset = compute_distances(start, length, num_keys, like.device).neg()
    bias = -compute_alibi_slopes(num_heads, like)[:, None, None] * offset.abs()
    return (bias.masked_fill(offset > 0, -torch.inf) if causal else bias)[None]


def compute_distances(start: Position, length: int, num_keys: int, device: torch.device) -> Tensor:
    """Return i - j of queries i = start .. start+length-1 and keys j = 0 .. num_keys-1: int64 [length, num_keys]."""
    return (start + torch.arange(length, device=device))[:, None] - torch.arange(num_keys, device=device)


def compute_query_scale(config: TransformerConfig, positions: Tensor, like: Tensor) -> Tensor:
    """Return log n / log(attention_log_base) for queries at positions [..., T] that attend to n keys: [..., T, 1].

    At least float32; 0 for a query that attends only to itself (Chiang & Cholak 2022).
    """
    num_keys = positions + 1 if config.causal else torch.full_like(positions, positions.shape[-1])
    if config.attention_window:
        num_keys = num_keys.clamp(max=config.attention_window)
    dtype = torch.promote_types(like.dtype, torch.float32)
    return num_keys.unsqueeze(-1).to(dtype).log() / math.log(config.attention_log_base)


Backend = Callable[[Tensor, Tensor, Tensor, Any, bool], Tensor]


class FlexMask(NamedTuple):
    """The mask of flex_attention."""

    blocks: "BlockMask | None"  # None: every query attends to every key
    slopes: Tensor | None  # ALiBi slopes [heads]


def load_backend(config: TransformerConfig) -> Backend:
    """Return the attention function of a model. The package flash-attn is imported at its first call."""
    if config.attention == "sdpa":
        return sdpa
    if config.attention == "flex":
        from torch.nn.attention.flex_attention import flex_attention

        return functools.partial(flex, flex_attention)
    window = _kernel_window(config)
    if config.attention == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        has_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 lacks it
        return functools.partial(varlen, varlen_attn, has_gqa, window)
    return functools.partial(flash_attn, window)


# backend -> option, its value on other devices; package, its extra, the value without the package
CUDA_BACKENDS = {
    "varlen": ("model.attention", "sdpa", None, None, None),
    "flash_attn": ("model.attention", "sdpa", "flash-attn", "flash", "varlen"),
    "fla": ("model.kernel", "torch", "flash-linear-attention", "fla", "torch"),
}


def check_backend(backend: str, device_type: str) -> None:
    """Raise ConfigError if a backend cannot run on this device type in this installation."""
    if backend not in CUDA_BACKENDS:
        return
    option, elsewhere, package, extra, other = CUDA_BACKENDS[backend]
    if device_type != "cuda":
        raise ConfigError(f"{option}={backend} needs a CUDA device, not {device_type}; set {option}={elsewhere}")
    if package:
        try:
            importlib.import_module(backend)
        except ImportError as error:  # missing, or built for another torch
            raise ConfigError(
                f"{option}={backend} needs the package {package} ({first_line(error)}); "
                f"pip install 'stackexp[{extra}]', or set {option}={other}"
            ) from None


def build_mask(
    config: TransformerConfig,
    h: Tensor,
    first_query: Position | None = None,
    num_keys: int | None = None,
    documents: Tensor | None = None,
    document_bounds: Tensor | None = None,
) -> Any:
    """Return the attention mask of h [B, T, d] in the backend's format; all layers share it.

    With sdpa, it is None without documents, window and ALiBi; with varlen and flash_attn, without documents.

    Args:
        config: The model's options.
        h: Hidden states of T tokens.
        first_query: The index of h's first token among the keys; None without a cache. With a cache, the format is
            that of sdpa.
        num_keys: The number of keys; by default those up to h's last token.
        documents: Document ids [B, T]; see `Transformer.forward`.
        document_bounds: The result of `find_document_bounds(documents)`, if known.
    """
    if config.attention == "sdpa" or first_query is not None:
        start = 0 if first_query is None else first_query
        return _build_dense_mask(config, h, start, num_keys, documents)
    if config.attention == "flex":
        return _build_flex_mask(config, h, documents)
    if documents is None:
        return None
    return find_document_bounds(documents) if document_bounds is None else document_bounds


def _build_dense_mask(
    config: TransformerConfig, h: Tensor, start: Position, num_keys: int | None, documents: Tensor | None
) -> Tensor | None:
    """Return a mask [B or 1, heads or 1, T, S]: True for keys to attend to, or with ALiBi a float score bias."""
    length, window, has_room = h.shape[1], config.attention_window, num_keys is not None
    num_keys = num_keys if has_room else start + length
    mask = None if documents is None else build_document_mask(documents)
    if window or has_room or (start and length > 1):
        distances = compute_distances(start, length, num_keys, h.device)
        visible = distances >= 0 if window is None else (distances >= 0) & (distances < window)
        mask = visible[None, None] if mask is None else mask & visible
    if config.positional == "alibi":
        bias = build_alibi_bias(config.num_heads, start, length, num_keys, config.causal, h)
        bias = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    elif has_room:
        bias = torch.where(mask, 0.0, -torch.inf)  # sdpa would convert a mask of bools in each layer
    else:
        return mask
    return bias.to(get_matmul_dtype(h))


def _build_flex_mask(config: TransformerConfig, h: Tensor, documents: Tensor | None) -> FlexMask:
    from torch.nn.attention.flex_attention import create_block_mask

    slopes = compute_alibi_slopes(config.num_heads, h) if config.positional == "alibi" else None
    if not config.causal:
        return FlexMask(None, slopes)

    length = h.shape[1]
    window = config.attention_window or length

    def is_in_window(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    def is_in_document(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return is_in_window(b, head, query, key) & (documents[b, query] == documents[b, key])

    rule, batch = (is_in_window, None) if documents is None else (is_in_document, h.shape[0])
    return FlexMask(create_block_mask(rule, batch, None, length, length, device=h.device), slopes)


def _kernel_window(config: TransformerConfig) -> tuple[int, int]:
    """Return how many keys before and after a query it attends to; -1: all."""
    before = -1 if config.attention_window is None else config.attention_window - 1
    return before, 0 if config.causal else -1


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Attend with torch's scaled_dot_product_attention. A mask replaces `causal`."""
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=_is_grouped(q, k))
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=_is_grouped(q, k))
    if choose_cuda_kernel(q.dtype, q.shape[1], k.shape[1], q.shape[3])[1]:
        k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
    with sdpa_kernel(CUDA_KERNELS, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=_is_grouped(q, k))


@torch.compiler.assume_constant_result
@functools.cache
def choose_cuda_kernel(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_size: int, device: str = "cuda"
) -> tuple[str, bool]:
    """Return the kernel that sdpa runs without a mask, and whether its keys and values are repeated.

    They are repeated, once for each query head, only if the first of CUDA_KERNELS cannot run otherwise.
    """
    q, k = (torch.empty(1, n, 128, head_size, dtype=dtype, device=device) for n in (num_heads, num_kv_heads))
    with sdpa_kernel(CUDA_KERNELS, set_priority=True):
        grouped, repeated = (
            SDPBackend(torch._fused_sdp_choice(q, keys, keys, is_causal=True, enable_gqa=_is_grouped(q, keys)))
            for keys in (k, _repeat_heads(k, num_heads))
        )
    repeats = repeated == CUDA_KERNELS[0] != grouped
    return (repeated if repeats else grouped).name, repeats


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat each head of x [B, kv heads, T, D] to [B, heads, T, D]."""
    return x.repeat_interleave(num_heads // x.shape[1], 1)


def sdpa_with_cache(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend causally from q [B, heads, T, D] to k and v [B, kv heads, S, D]. Without a mask, T is 1 or S."""
    num_kv_heads = k.shape[1]
    if q.shape[2] > 1:
        return sdpa(q, k, v, mask, causal=True)
    # The query heads that share keys become queries of one head; some kernels would repeat the keys for each of them
    if mask is not None and mask.shape[1] > 1:
        mask = mask.unflatten(1, (num_kv_heads, -1)).squeeze(3)
    y = sdpa(q.squeeze(2).unflatten(1, (num_kv_heads, -1)), k, v, mask, causal=False)
    return y.flatten(1, 2).unsqueeze(2)


def flex(kernel: Callable, q: Tensor, k: Tensor, v: Tensor, mask: FlexMask, causal: bool) -> Tensor:
    """Attend with torch's flex_attention; its block mask includes causality."""
    if q.requires_grad and torch.is_grad_enabled():
        _require_backward(q)
    slopes = mask.slopes

    def add_alibi(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (query - key).abs()

    if q.device.type == "cuda" and not torch.compiler.is_compiling():  # uncompiled, it materializes all scores
        kernel = _compile(kernel)
    return kernel(q, k, v, None if slopes is None else add_alibi, mask.blocks, enable_gqa=_is_grouped(q, k))


def varlen(
    kernel: Callable,
    has_gqa: bool,
    window: tuple[int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    causal: bool,
) -> Tensor:
    """Attend with torch's varlen_attn, within documents.

    `has_gqa`: the kernel accepts fewer heads in k and v than in q. `window`: the result of `_kernel_window`, which
    includes causality. `bounds`: int32 [n + 1], the document bounds in the concatenated sequences; None: one document
    per sequence.
    """
    if q.device.type != "cuda":
        check_backend("varlen", q.device.type)
    batch, _, length, _ = q.shape
    if bounds is None:
        bounds = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=q.device)
    options = {"enable_gqa": _is_grouped(q, k)} if has_gqa else {}
    if _is_grouped(q, k) and not has_gqa:
        k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
    y = kernel(*_concatenate(q, k, v), bounds, bounds, length, length, window_size=window, **options)
    return y.unflatten(0, (batch, length)).transpose(1, 2)


def flash_attn(window: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, causal: bool) -> Tensor:
    """Attend with the package flash-attn; `window` and `bounds` are those of `varlen`."""
    if q.device.type != "cuda":
        check_backend("flash_attn", q.device.type)
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    batch, _, length, _ = q.shape
    options = {"causal": causal, "window_size": window}
    if bounds is None:
        return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)
    y = flash_attn_varlen_func(*_concatenate(q, k, v), bounds, bounds, length, length, **options)
    return y.unflatten(0, (batch, length)).transpose(1, 2)


def _concatenate(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Reshape [B, heads, T, D] to [B * T, heads, D]."""
    return tuple(x.transpose(1, 2).flatten(0, 1) for x in tensors)


def _is_grouped(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] != k.shape[1]


def _require_backward(q: Tensor) -> None:
    if q.device.type == "cpu":
        raise ConfigError("model.attention=flex has no backward pass on CPUs; set model.attention=sdpa")


@functools.cache
def _compile(kernel: Callable) -> Callable:
    return torch.compile(kernel)


KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [B, kv heads, S, head size]."""


class FixedKeysValues(NamedTuple):
    """Keys and values of one layer with room for later tokens. They are updated in place."""

    keys: Tensor  # [B, kv heads, max length, head size]
    values: Tensor
    position: Tensor  # int64 [1], the index of the next token


LayerCache = KeysValues | FixedKeysValues | tuple[()] | None
"""Keys and values of earlier tokens, or () before the first token. None without a cache."""


def append_keys_values(cache: LayerCache, k: Tensor, v: Tensor) -> KeysValues:
    """Return the cached keys and values with those of the next tokens [B, kv heads, T, head size]."""
    if isinstance(cache, FixedKeysValues):
        keys, values, position = cache
        return keys.index_copy_(2, position, k), values.index_copy_(2, position, v)
    return (torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)) if cache else (k, v)


class Positions(NamedTuple):
    """Positional inputs of attention, computed once for all layers."""

    rope: Tensor | None = None  # see `apply_rope`
    query_scale: Tensor | None = None  # [T, 1], or [B, 1, T, 1] with documents; see `compute_query_scale`


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
            mask: The result of `build_mask`. None: all keys, or if causal, no later keys.

        Returns:
            The output [B, T, d], and the keys and values of all S tokens, cached ones included.
        """
        q, k, v = (
            projected.unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # [B, heads, T, head size]
            for projected in apply_linears(x, self.q_proj, self.k_proj, self.v_proj)
        )
        if positions.rope is not None:
            q, k = apply_rope(q, positions.rope), apply_rope(k, positions.rope)
        if positions.query_scale is not None:
            q = q * positions.query_scale.to(q.dtype)
        if kv_cache is None:
            y = self.attend(q, k, v, mask, self.causal)
        else:
            k, v = append_keys_values(kv_cache, k, v)
            y = sdpa_with_cache(q, k, v, mask)
        return self.o_proj(y.transpose(1, 2).flatten(2)), (k, v)
