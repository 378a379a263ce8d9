"""The products of `stackexp.stack.projection` on CUDA, in three kernels. Each reads every large tensor once.

    down_kernel      x = W_down h and the logits A x              backward: dR = W_up^T dh'
    up_kernel        h' = g h + W_up R                            backward: dh = g dh' + W_down^T dx
    weights_kernel   dW_down = dx^T h, dW_up = dh'^T R, dg = h . dh'

The operands of the products have the dtype of x, and the sums are float32.

Each program stores its part of a weight gradient, and the parts are added afterwards, so results are deterministic.
With TRITON_INTERPRET=1 in the environment, the kernels run on a CPU, slowly. Names have the prefixes of
`time_scan_kernels`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

NUM_ACTIONS = 3
CHUNK = 64  # elements of a token that a program loads at once
NUM_PROGRAMS = 256  # of `weights_kernel` at most: two per multiprocessor of an H200


class Settings(NamedTuple):
    """The compile-time options of the kernels."""

    hidden: int  # d
    heads: int  # H
    head_dim: int  # D
    size: int  # H*D
    num_logits: int  # 3H
    padded_size: int
    padded_logits: int
    tokens: int  # that a program loads at once
    chunk: int  # elements of a token that a program loads at once


def make_settings(hidden: int, x: Tensor, tokens: int) -> Settings:
    """Return the options for x [..., H, D]. The dimensions of a product are powers of two, from 16."""
    heads, head_dim = x.shape[-2:]
    size, num_logits = heads * head_dim, NUM_ACTIONS * heads
    padded_size, padded_logits = (max(16, triton.next_power_of_2(number)) for number in (size, num_logits))
    return Settings(hidden, heads, head_dim, size, num_logits, padded_size, padded_logits, tokens, CHUNK)


def compute_down(
    h: Tensor, weight: Tensor, heads: int, actions: Tensor | None = None, keeps_h: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return x = W h [..., H, D] in the dtype of the weight [H*D, d], the logits A x or None, and h.

    With `keeps_h`, the returned h has the dtype of the weight, so that autograd saves less. The weight may have any
    strides.
    """
    x = h.new_empty((*h.shape[:-1], heads, len(weight) // heads), dtype=weight.dtype)
    logits = None if actions is None else x.new_empty((*x.shape[:-1], NUM_ACTIONS))
    copy = torch.empty_like(h, dtype=x.dtype) if keeps_h and h.dtype != x.dtype else None
    settings = make_settings(h.shape[-1], x, tokens=128)
    num_tokens = h.shape[:-1].numel()
    _launch(
        down_kernel,
        (triton.cdiv(num_tokens, settings.tokens),),
        *(h, weight, x, actions, logits, copy, num_tokens, *weight.stride()),
        settings=settings,
        num_warps=8,
        num_stages=3,
    )
    return x, logits, h if copy is None else copy


def compute_up(
    h: Tensor,
    read: Tensor,
    weight: Tensor,
    gate: Tensor,
    actions: Tensor | None = None,
    to_logits: Tensor | None = None,
    x: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return g h + W^T R [..., d] for a weight [H*D, d], R [..., H, D], and None.

    With `actions` A, R is the gradient of x [..., H, D] without that through the logits A x. The whole gradient
    replaces R, and the gradient of A [H, 3, D] in float32 replaces None.
    """
    settings = make_settings(h.shape[-1], read, tokens=64)
    num_tokens = h.shape[:-1].numel()
    new_h, total, parts = torch.empty_like(h), read, None
    grid = (triton.cdiv(num_tokens, settings.tokens),)
    if actions is not None:
        total = torch.empty_like(read)
        parts = actions.new_empty((*grid, *actions.shape), dtype=torch.float32)
    _launch(
        up_kernel,
        grid,
        *(h, read, weight, gate, new_h, actions, to_logits, x, total, parts, num_tokens, *weight.stride()),
        settings=settings,
        num_warps=4,
        num_stages=3,
    )
    return new_h, total, None if parts is None else parts.sum(0)


def compute_weight_grads(h: Tensor, to_new_h: Tensor, to_x: Tensor, read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of W_down [H*D, d], W_up [d, H*D] and g [1] in float32."""
    settings = make_settings(h.shape[-1], read, tokens=64)
    num_tokens = h.shape[:-1].numel()
    num_chunks = triton.cdiv(settings.hidden, settings.chunk)
    num_blocks = triton.cdiv(num_tokens, settings.tokens)
    blocks = max(1, triton.cdiv(num_blocks, max(1, NUM_PROGRAMS // num_chunks)))  # of tokens, for each program
    num_splits = triton.cdiv(num_blocks, blocks)
    to_down, to_up = h.new_empty((2, num_splits, settings.size, settings.hidden), dtype=torch.float32)
    to_gate = h.new_empty((num_splits, num_chunks), dtype=torch.float32)
    _launch(
        weights_kernel,
        (num_chunks, num_splits),
        *(h, to_new_h, to_x, read, to_down, to_up, to_gate, num_tokens, blocks * settings.tokens),
        settings=settings,
        num_warps=8,
        num_stages=3,
    )
    return to_down.sum(0), to_up.sum(0).T.contiguous(), to_gate.sum().view(1)


def _launch(kernel: Any, grid: tuple[int, ...], h: Tensor, *arguments: Any, **options: Any) -> None:
    if 0 not in grid and not isinstance(h, FakeTensor):
        with torch.cuda.device_of(h):
            kernel[grid](h, *arguments, **options)


@triton.jit
def load_chunk(p_values, i_token, i_column, num_tokens, settings: tl.constexpr):
    """Load h or h' [TOKENS, CHUNK]; also return offsets and mask."""
    o_token = i_token + tl.arange(0, settings.tokens)[:, None]
    o_column = i_column + tl.arange(0, settings.chunk)[None, :]
    o_h = o_token.to(tl.int64) * settings.hidden + o_column
    m_h = (o_token < num_tokens) & (o_column < settings.hidden)
    return tl.load(p_values + o_h, m_h, other=0), o_h, m_h


@triton.jit
def locate_small(i_token, num_tokens, settings: tl.constexpr):
    """Return the offsets of x, R or their gradients [TOKENS, H*D], and the mask of those that exist."""
    o_token = i_token + tl.arange(0, settings.tokens)[:, None]
    o_x = tl.arange(0, settings.padded_size)[None, :]
    return o_token.to(tl.int64) * settings.size + o_x, (o_token < num_tokens) & (o_x < settings.size)


@triton.jit
def load_weight(p_weight, i_column, stride_x, stride_h, settings: tl.constexpr):
    """Load columns of a weight: [H*D, CHUNK]."""
    o_x = tl.arange(0, settings.padded_size)[:, None]
    o_column = i_column + tl.arange(0, settings.chunk)[None, :]
    m_weight = (o_x < settings.size) & (o_column < settings.hidden)
    return tl.load(p_weight + o_x * stride_x + o_column * stride_h, m_weight, other=0)


@triton.jit
def locate_logits(i_token, num_tokens, settings: tl.constexpr):
    """Return the offsets of logits [TOKENS, 3H] and of A as one map [H*D, 3H], which is 0 between heads, with masks."""
    o_token = i_token + tl.arange(0, settings.tokens)[:, None]
    o_logit = tl.arange(0, settings.padded_logits)[None, :]
    m_logit = o_logit < settings.num_logits
    o_x = tl.arange(0, settings.padded_size)[:, None]
    m_actions = m_logit & (o_x // settings.head_dim == o_logit // 3)
    o_actions = o_logit * settings.head_dim + o_x % settings.head_dim
    o_logits = o_token.to(tl.int64) * settings.num_logits + o_logit
    return o_logits, m_logit & (o_token < num_tokens), o_actions, m_actions


@triton.jit(do_not_specialize=["num_tokens"])
def down_kernel(
    p_h, p_weight, p_x, p_actions, p_logits, p_copy, num_tokens, stride_x, stride_h, settings: tl.constexpr
):
    """Compute x = W h for `settings.tokens` tokens, the logits A x if there are actions, and copy h."""
    i_token = tl.program_id(0) * settings.tokens
    b_x = tl.full([settings.tokens, settings.padded_size], 0, tl.float32)
    for i_column in tl.range(0, settings.hidden, settings.chunk):
        b_h, o_h, m_h = load_chunk(p_h, i_token, i_column, num_tokens, settings)
        b_weight = load_weight(p_weight, i_column, stride_x, stride_h, settings)
        b_h = b_h.to(b_weight.dtype)
        if p_copy is not None:
            tl.store(p_copy + o_h, b_h, m_h)
        b_x = tl.dot(b_h, tl.trans(b_weight), b_x, input_precision="ieee")
    o_x, m_x = locate_small(i_token, num_tokens, settings)
    b_rounded = b_x.to(p_x.dtype.element_ty)
    tl.store(p_x + o_x, b_rounded, m_x)
    if p_actions is not None:
        o_logits, m_logits, o_actions, m_actions = locate_logits(i_token, num_tokens, settings)
        b_actions = tl.load(p_actions + o_actions, m_actions, other=0)
        b_logits = tl.dot(b_rounded, b_actions, input_precision="ieee")
        tl.store(p_logits + o_logits, b_logits.to(p_logits.dtype.element_ty), m_logits)


@triton.jit(do_not_specialize=["num_tokens"])
def up_kernel(
    p_h,
    p_read,
    p_weight,
    p_gate,
    p_new_h,
    p_actions,
    p_to_logits,
    p_x,
    p_total,
    p_to_actions,
    num_tokens,
    stride_x,
    stride_h,
    settings: tl.constexpr,
):
    """Compute h' = g h + W^T R for `settings.tokens` tokens; with actions, also the gradients of x and A."""
    i_token = tl.program_id(0) * settings.tokens
    o_x, m_x = locate_small(i_token, num_tokens, settings)
    b_read = tl.load(p_read + o_x, m_x, other=0)
    if p_actions is not None:
        o_logits, m_logits, o_actions, m_actions = locate_logits(i_token, num_tokens, settings)
        b_actions = tl.load(p_actions + o_actions, m_actions, other=0)
        b_to_logits = tl.load(p_to_logits + o_logits, m_logits, other=0)
        b_total = tl.dot(b_to_logits, tl.trans(b_actions), b_read.to(tl.float32), input_precision="ieee")
        b_read = b_total.to(b_read.dtype)
        tl.store(p_total + o_x, b_read, m_x)
        b_x = tl.load(p_x + o_x, m_x, other=0)
        b_to_actions = tl.dot(tl.trans(b_x), b_to_logits, input_precision="ieee")
        num_actions: tl.constexpr = settings.num_logits * settings.head_dim
        tl.store(p_to_actions + tl.program_id(0) * num_actions + o_actions, b_to_actions, m_actions)
    b_gate = tl.load(p_gate).to(tl.float32)
    for i_column in tl.range(0, settings.hidden, settings.chunk):
        b_h, o_h, m_h = load_chunk(p_h, i_token, i_column, num_tokens, settings)
        b_weight = load_weight(p_weight, i_column, stride_x, stride_h, settings)
        b_new_h = tl.dot(b_read, b_weight, b_gate * b_h.to(tl.float32), input_precision="ieee")
        tl.store(p_new_h + o_h, b_new_h.to(p_new_h.dtype.element_ty), m_h)


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_split"])
def weights_kernel(
    p_h,
    p_to_new_h,
    p_to_x,
    p_read,
    p_to_down,
    p_to_up,
    p_to_gate,
    num_tokens,
    tokens_per_split,
    settings: tl.constexpr,
):
    """Compute a chunk of columns of dW_down and dW_up^T, and a part of dg, for one split of the tokens."""
    i_chunk, i_split = tl.program_id(0), tl.program_id(1)
    i_column, i_start = i_chunk * settings.chunk, i_split * tokens_per_split
    b_to_down = tl.full([settings.padded_size, settings.chunk], 0, tl.float32)
    b_to_up = tl.full([settings.padded_size, settings.chunk], 0, tl.float32)
    b_to_gate = tl.full([settings.tokens, settings.chunk], 0, tl.float32)
    for i_token in tl.range(i_start, tl.minimum(i_start + tokens_per_split, num_tokens), settings.tokens):
        b_h, _, _ = load_chunk(p_h, i_token, i_column, num_tokens, settings)
        b_to_new_h, _, _ = load_chunk(p_to_new_h, i_token, i_column, num_tokens, settings)
        o_x, m_x = locate_small(i_token, num_tokens, settings)
        b_to_x, b_read = tl.load(p_to_x + o_x, m_x, other=0), tl.load(p_read + o_x, m_x, other=0)
        b_to_down = tl.dot(tl.trans(b_to_x), b_h.to(b_to_x.dtype), b_to_down, input_precision="ieee")
        b_to_up = tl.dot(tl.trans(b_read), b_to_new_h.to(b_read.dtype), b_to_up, input_precision="ieee")
        b_to_gate += b_h.to(tl.float32) * b_to_new_h.to(tl.float32)
    o_x = tl.arange(0, settings.padded_size)[:, None]
    o_column = i_column + tl.arange(0, settings.chunk)[None, :]
    o_weight = (i_split * settings.size + o_x) * settings.hidden + o_column
    m_weight = (o_x < settings.size) & (o_column < settings.hidden)
    tl.store(p_to_down + o_weight, b_to_down, m_weight)
    tl.store(p_to_up + o_weight, b_to_up, m_weight)
    tl.store(p_to_gate + i_split * tl.num_programs(0) + i_chunk, tl.sum(b_to_gate))
