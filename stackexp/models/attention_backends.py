"""Who computes attention: one function of queries, keys and values for each choice of `model.attention`.

    sdpa        torch's scaled_dot_product_attention; the mask of documents is dense, [B, 1, T, T]
    flex        torch's flex_attention, which skips the blocks of scores that no query sees: on a CPU it only evaluates
    varlen      torch.nn.attention.varlen, all documents one after another: CUDA, bfloat16
    flash_attn  the package flash-attn (`pip install 'stackexp[flash]'`), likewise

Each takes q [B, heads, T, D], k and v [B, kv heads, T, D] and `seen`, what `sight` made for it: which keys a query
sees. -> [B, heads, T, D].
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from stackexp.config.model import TransformerConfig
from stackexp.data.documents import build_document_mask, find_document_bounds
from stackexp.errors import ConfigError, first_line
from stackexp.models.positional import alibi_bias, alibi_slopes, window_mask

if TYPE_CHECKING:  # importing it takes seconds, and sdpa needs none of it
    from torch.nn.attention.flex_attention import BlockMask

Attend = Callable[[Tensor, Tensor, Tensor, Any, bool], Tensor]


class FlexSight(NamedTuple):
    """What flex_attention is told."""

    blocks: "BlockMask | None"  # None: every query sees every key
    slopes: Tensor | None  # of ALiBi [heads]


def load(config: TransformerConfig) -> Attend:
    """The function of a model's backend; flash-attn itself is imported when it is called."""
    if config.attention == "sdpa":
        return sdpa
    if config.attention == "flex":
        from torch.nn.attention.flex_attention import flex_attention

        return functools.partial(flex, flex_attention)
    behind = -1 if config.attention_window is None else config.attention_window - 1  # keys before a query; -1: all
    window = (behind, 0 if config.causal else -1)
    if config.attention == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        groups = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 has no grouped queries
        return functools.partial(varlen, varlen_attn, groups, window)
    return functools.partial(flash_attn, window)


def check_backend(backend: str, device_type: str) -> None:
    """Raise ConfigError, in one line, if `backend` cannot run on a device of this type in this installation."""
    if backend not in ("varlen", "flash_attn"):
        return
    if device_type != "cuda":
        raise ConfigError(f"model.attention={backend} needs a CUDA device, not {device_type}; set model.attention=sdpa")
    if backend != "flash_attn":
        return
    try:
        importlib.import_module("flash_attn")
    except ImportError as error:  # not there, or built for another torch
        raise ConfigError(
            f"model.attention=flash_attn needs the package flash-attn ({first_line(error)}); "
            "pip install 'stackexp[flash]', or set model.attention=varlen"
        ) from None


def sight(
    config: TransformerConfig, start: int, h: Tensor, documents: Tensor | None, document_bounds: Tensor | None
) -> Any:
    """What the backend of a model needs to know of who sees whom, made once for all layers.

    For tokens start .. start+T-1, h [B, T, d]. `documents` [B, T] and their `bounds`: see `Transformer.forward`.
    """
    backend = config.attention if start == 0 else "sdpa"  # see `Attention.forward`
    if backend == "sdpa":
        return _dense(config, start, h, documents)
    if backend == "flex":
        return _blocks(config, h, documents)
    if documents is None:
        return None
    return find_document_bounds(documents) if document_bounds is None else document_bounds


def _dense(config: TransformerConfig, start: int, h: Tensor, documents: Tensor | None) -> Tensor | None:
    """[B or 1, heads or 1, T, S]: which keys a query sees (bool), or what is added to their scores (float, ALiBi)."""
    mask = None
    if config.positional == "alibi":
        mask = alibi_bias(config.num_heads, start, h.shape[1], config.causal, h)
    seen = None if documents is None else build_document_mask(documents)
    if config.attention_window:
        window = window_mask(config.attention_window, start, h.shape[1], h.device)
        seen = window if seen is None else seen & window
    if mask is None or seen is None:
        return mask if seen is None else seen
    return mask.masked_fill(~seen, -torch.inf)


def _blocks(config: TransformerConfig, h: Tensor, documents: Tensor | None) -> FlexSight:
    from torch.nn.attention.flex_attention import create_block_mask

    slopes = torch.tensor(alibi_slopes(config.num_heads), device=h.device) if config.positional == "alibi" else None
    if not config.causal:
        return FlexSight(None, slopes)

    length = h.shape[1]
    window = config.attention_window or length

    def before(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    def within(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return before(b, head, query, key) & (documents[b, query] == documents[b, key])

    rule, batch = (before, None) if documents is None else (within, h.shape[0])
    return FlexSight(create_block_mask(rule, batch, None, length, length, device=h.device), slopes)


def sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, causal: bool) -> Tensor:
    """`seen`: see `_dense`; where it is given it says all."""
    if seen is not None and seen.is_floating_point():
        seen = seen.to(q.dtype)
    causal = causal and seen is None
    return F.scaled_dot_product_attention(q, k, v, seen, is_causal=causal, enable_gqa=_grouped(q, k))


def sdpa_after(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """Of T queries that follow others, causal: k and v [B, kv heads, S, D] are of all tokens, the last T their own."""
    new, of_all = q.shape[2], k.shape[2]
    if seen is None and new > 1:
        seen = torch.ones(new, of_all, dtype=torch.bool, device=q.device).tril(of_all - new)
    return sdpa(q, k, v, seen, causal=False)


def flex(kernel: Callable, q: Tensor, k: Tensor, v: Tensor, seen: FlexSight, causal: bool) -> Tensor:
    blocks, slopes = seen
    if q.requires_grad and torch.is_grad_enabled():
        _has_backward(q)

    def alibi(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (query - key).abs()

    if q.device.type == "cuda" and not torch.compiler.is_compiling():  # uncompiled it holds all scores
        kernel = _compiled(kernel)
    return kernel(q, k, v, None if slopes is None else alibi, blocks, enable_gqa=_grouped(q, k))


def varlen(
    kernel: Callable,
    groups: bool,
    window: tuple[int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    causal: bool,
) -> Tensor:
    """`seen`: the bounds of all documents, int32 [n + 1]; None: each sequence is one. `groups`: whether k and v may
    have fewer heads than q. `window`: how many keys before a query, and after it, are seen; -1: all."""
    _on_cuda(q, "varlen")
    batch, _, length, _ = q.shape
    if seen is None:
        seen = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=q.device)
    options = {"enable_gqa": _grouped(q, k)} if groups else {}
    if _grouped(q, k) and not groups:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    y = kernel(*_packed(q, k, v), seen, seen, length, length, window_size=window, **options)
    return y.unflatten(0, (batch, length)).transpose(1, 2)


def flash_attn(window: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, causal: bool) -> Tensor:
    """`seen` and `window` as for `varlen`."""
    _on_cuda(q, "flash_attn")
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    batch, _, length, _ = q.shape
    options = {"causal": causal, "window_size": window}
    if seen is None:
        return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)
    y = flash_attn_varlen_func(*_packed(q, k, v), seen, seen, length, length, **options)
    return y.unflatten(0, (batch, length)).transpose(1, 2)


def _packed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, heads, T, D] -> [B * T, heads, D]."""
    return tuple(x.transpose(1, 2).flatten(0, 1) for x in tensors)


def _grouped(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] != k.shape[1]


def _on_cuda(q: Tensor, backend: str) -> None:
    if q.device.type != "cuda":
        check_backend(backend, q.device.type)


def _has_backward(q: Tensor) -> None:
    if q.device.type == "cpu":
        raise ConfigError("model.attention=flex has no backward pass on a CPU; set model.attention=sdpa")


@functools.cache
def _compiled(kernel: Callable) -> Callable:
    return torch.compile(kernel)
