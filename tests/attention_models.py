"""Build small transformers with each attention backend, and the tokens they run on.

On a CPU, plain torch functions replace the CUDA kernels.
"""

import functools
import sys
from types import ModuleType

import small_models
import torch
from torch.nn import functional as F

from stackexp.models import attention
from stackexp.models.transformer import Transformer

END = 0
TOKENS = torch.tensor([[3, 4, END, 5, END, END, 6, 7, 8], [END, 1, 2, 3, 4, 5, 6, 7, END]])
STACK = {"axis": "depth"}
BACKENDS = ["flex", "varlen", "varlen of torch 2.11", "flash_attn"]


def make_model(backend, memory=None, dtype=torch.float64, **options) -> Transformer:
    options = {"num_layers": 2, "attention": backend.split()[0]} | options
    model = small_models.make_model(memory, dtype, **options)
    if backend == "varlen of torch 2.11":
        for layer in model.layers:
            kernel, groups, window = layer.attention.attend.args
            assert groups, "the replacement kernel supports grouped queries"
            layer.attention.attend = functools.partial(attention.varlen, kernel, False, window)
    return model


def build_window_mask(length, window_size):
    """Return the attention mask of a window, bool [T, T]: (keys before, keys after) each query; -1 means all."""
    ahead = torch.arange(length) - torch.arange(length)[:, None]
    before, after = (length if size == -1 else size for size in window_size)
    return (ahead >= -before) & (ahead <= after)


def packed_attention(q, k, v, starts_q, starts_k, longest_q, longest_k, causal, window_size=(-1, -1)):
    """Compute the result of a packed-sequence kernel, [tokens, heads, D], one sequence at a time."""
    assert causal == (window_size[1] == 0)
    assert q.shape[0] == k.shape[0] == starts_q[-1]
    assert starts_q is starts_k
    assert starts_q.dtype == torch.int32
    pieces = []
    for start, stop in zip(starts_q.tolist()[:-1], starts_q.tolist()[1:], strict=True):
        assert 0 <= stop - start <= min(longest_q, longest_k)
        inputs = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        mask = build_window_mask(int(stop - start), window_size)
        y = F.scaled_dot_product_attention(*inputs, mask, enable_gqa=q.shape[1] != k.shape[1])
        pieces.append(y[0].transpose(0, 1))
    return torch.cat(pieces)


def varlen_attn(q, k, v, starts_q, starts_k, longest_q, longest_k, *, window_size, enable_gqa=False):
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return packed_attention(q, k, v, starts_q, starts_k, longest_q, longest_k, window_size[1] == 0, window_size)


def flash_attn_func(q, k, v, *, causal, window_size):
    assert causal == (window_size[1] == 0)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # input is [B, T, heads, D]
    mask = build_window_mask(q.shape[2], window_size)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


def replace_kernels(monkeypatch) -> None:
    """Replace the CUDA kernels by name and signature, and enable the flex_attention backward pass on a CPU."""
    package = ModuleType("flash_attn")
    package.flash_attn_func, package.flash_attn_varlen_func = flash_attn_func, packed_attention
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(attention, "check_backend", lambda *_: None)
    monkeypatch.setattr(attention, "_require_backward", lambda *_: None)
