"""Positional encodings (RoPE, sinusoidal, ALiBi), window masks and length-dependent score scaling."""

import math

import torch
from torch import Tensor

from stackexp.config.model import TransformerConfig

SINUSOIDAL_BASE = 10_000.0


def build_rope_table(config: TransformerConfig, start: int, length: int, like: Tensor) -> Tensor:
    """Return cosines and sines for positions start .. start+length-1: [2, length, head size / 2], at least float32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    head_size = config.hidden_size // config.num_heads
    frequencies = config.rope_theta ** (-torch.arange(0, head_size, 2, device=like.device, dtype=dtype) / head_size)
    angles = torch.arange(start, start + length, device=like.device, dtype=dtype).outer(frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate x [B, heads, T, head size] by a table from `build_rope_table`.

    The table is [2, T, head size / 2], or [2, B, 1, T, head size / 2] if each sequence has its own positions. The two
    elements of a pair are half a head apart, as in Llama.
    """
    first, second = x.chunk(2, -1)
    cos, sin = rope
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def build_sinusoidal_table(size: int, start: int, length: int, like: Tensor) -> Tensor:
    """Return the encodings of positions start .. start+length-1: [length, size], at least float32.

    Element 2i of position p is sin(p / 10000^(2i/size)), element 2i+1 the cosine (Vaswani et al. 2017, section 3.5).
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequencies = SINUSOIDAL_BASE ** (-torch.arange(0, size, 2, device=like.device, dtype=dtype) / size)
    angles = torch.arange(start, start + length, device=like.device, dtype=dtype).outer(frequencies)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)


def compute_alibi_slopes(num_heads: int) -> list[float]:
    """Return one slope per head (Press et al. 2022).

    For n heads, n a power of two, they are 2^(-8 h / n), h = 1 .. n. For other n, take the slopes for the next lower
    power of two, then every second slope for the next higher one.
    """
    lower = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * h / lower) for h in range(1, lower + 1)]
    return slopes + [2 ** (-8 * h / (2 * lower)) for h in range(1, 2 * lower, 2)][: num_heads - lower]


def build_alibi_bias(num_heads: int, start: int, length: int, causal: bool, like: Tensor) -> Tensor:
    """Return the score bias -slope |i - j| of query i and key j: [1, heads, length, start+length], at least float32.

    The queries are the last `length` of start+length tokens. Keys after a query have -inf if `causal`.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    positions = torch.arange(start + length, device=like.device, dtype=dtype)
    offset = positions - positions[start:, None]  # j - i [T, S]
    slopes = torch.tensor(compute_alibi_slopes(num_heads), dtype=dtype)
    slopes = slopes.to(like.device, non_blocking=True)  # torch.tensor(..., device="cuda") waits for the GPU
    bias = -slopes[:, None, None] * offset.abs()
    return (bias.masked_fill(offset > 0, -torch.inf) if causal else bias)[None]


def build_window_mask(window: int, start: int, length: int, device: torch.device) -> Tensor:
    """Return a causal mask, bool [1, 1, length, start+length]: a query attends to its own key and `window` - 1 before.

    The queries are the last `length` of start+length tokens.
    """
    positions = torch.arange(start + length, device=device)
    distance = positions[start:, None] - positions  # i - j [T, S]
    return ((distance >= 0) & (distance < window))[None, None]


def compute_query_scale(config: TransformerConfig, positions: Tensor) -> Tensor:
    """Return log n / log(attention_log_base) for queries at positions [..., T] that attend to n keys: [..., T, 1].

    Float32; 0 for a query that attends only to itself (Chiang & Cholak 2022).
    """
    num_keys = positions + 1 if config.causal else torch.full_like(positions, positions.shape[-1])
    if config.attention_window:
        num_keys = num_keys.clamp(max=config.attention_window)
    return num_keys.unsqueeze(-1).float().log() / math.log(config.attention_log_base)
