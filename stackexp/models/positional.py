"""How a decoder knows where a token stands: RoPE, sinusoids, ALiBi; and how much it sees from there."""

import math

import torch
from torch import Tensor

from stackexp.config.model import TransformerConfig

SIN_COS_BASE = 10_000.0


def rope_table(config: TransformerConfig, start: int, length: int, like: Tensor) -> Tensor:
    """Angles' cosine and sine for positions start .. start+length-1 [2, length, head size / 2], float32 at least."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    size = config.hidden_size // config.num_heads
    frequencies = config.rope_theta ** (-torch.arange(0, size, 2, device=like.device, dtype=dtype) / size)
    angles = torch.arange(start, start + length, device=like.device, dtype=dtype).outer(frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """RoPE of x [B, heads, T, head size] by a table [2, T, head size / 2], or [2, B, 1, T, ...] of each sequence's own.

    The two numbers of a pair stand half a head apart, as in Llama's code.
    """
    first, second = x.chunk(2, -1)
    cos, sin = rope
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def sin_cos_table(size: int, start: int, length: int, like: Tensor) -> Tensor:
    """Vaswani et al. 2017, section 3.5: [length, size] for positions start .. start+length-1, float32 at least.

    Number 2i of position p is sin(p / 10000^(2i/size)), number 2i+1 the cosine.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequencies = SIN_COS_BASE ** (-torch.arange(0, size, 2, device=like.device, dtype=dtype) / size)
    angles = torch.arange(start, start + length, device=like.device, dtype=dtype).outer(frequencies)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)


def alibi_slopes(num_heads: int) -> list[float]:
    """Press et al. 2022: 2^(-8 h / n) for heads h = 1 .. n, where n is a power of two.

    Else those of the power of two below n, then every other one of the power of two above it, from the first on.
    """
    below = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * h / below) for h in range(1, below + 1)]
    return slopes + [2 ** (-8 * h / (2 * below)) for h in range(1, 2 * below, 2)][: num_heads - below]


def alibi_bias(num_heads: int, start: int, length: int, causal: bool, like: Tensor) -> Tensor:
    """What ALiBi adds to attention's scores, [1, heads, length, start+length]: -slope |i - j| for query i and key j.

    The queries are the last `length` of start+length tokens; causal: -inf for keys after the query. Float32 at least.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    places = torch.arange(start + length, device=like.device, dtype=dtype)
    ahead = places - places[start:, None]  # j - i [T, S]
    slopes = torch.tensor(alibi_slopes(num_heads), device=like.device, dtype=dtype)
    bias = -slopes[:, None, None] * ahead.abs()
    return (bias.masked_fill(ahead > 0, -torch.inf) if causal else bias)[None]


def window_mask(window: int, start: int, length: int, device: torch.device) -> Tensor:
    """Which keys a query sees, bool [1, 1, length, start+length]: its own place and the `window` - 1 before it.

    The queries are the last `length` of start+length tokens.
    """
    places = torch.arange(start + length, device=device)
    behind = places[start:, None] - places  # i - j [T, S]
    return ((behind >= 0) & (behind < window))[None, None]


def log_scale(config: TransformerConfig, places: Tensor) -> Tensor:
    """What a query is multiplied by, of places [...]: log n to the base `attention_log_base`, of n keys that it sees.

    0 of a query that sees itself alone. Chiang & Cholak 2022. [..., 1], float32.
    """
    seen = places + 1 if config.causal else torch.full_like(places, places.shape[-1])
    if config.attention_window:
        seen = seen.clamp(max=config.attention_window)
    return seen.unsqueeze(-1).float().log() / math.log(config.attention_log_base)
