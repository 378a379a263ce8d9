"""The stack on CPU: numba kernels for both passes, which touch only occupied slots.

Equals `reference` in values and gradients. A step, of all tokens in parallel, is a scan of one token in as many
sequences: a stack is in the cache from its update to its read, where `eager` goes through memory for each operation.
For the backward pass every k-th state is kept, k about the square root of the number of tokens; nothing is kept where
no gradient is wanted. The first call in a process takes a moment, the first on a machine 10 to 20 s of processor
time for each dtype: numba compiles, and keeps what it compiled beside this file or, where that may not be written, in
the user's cache.
"""

import ctypes
import functools
import logging
import math
import os
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stackexp.stack import eager
from stackexp.stack.numba import kernels
from stackexp.stack.numba.update_read import ADDITIVE, LOG, MULTIPLY, TOP
from stackexp.stack.numba.vectors import LANES
from stackexp.stack.reference import ACTIVATIONS, StackOutput, StackState, gated, squashed

empty = eager.empty

HOW = {"multiply": MULTIPLY, "log": LOG, "additive": ADDITIVE}
NUMBERS = {torch.float32: np.float32, torch.float64: np.float64}
NUMBERS_PER_THREAD = 2**15  # of updates of one number of a slot, some 40 us: less is not worth a thread
NUMBERS_PER_STACK = 300  # of such updates: what the rest of a step takes, actions and softmaxes


def step(
    state: StackState, x: Tensor, logits: Tensor, query: Tensor | None, **options: str | int
) -> tuple[StackOutput, StackState]:
    """As `reference.step`."""
    return _run(state, x, logits, query, x.shape[:-2], 1, **options)


def scan(
    state: StackState,
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    **options: str | int | tuple[Tensor, Tensor] | None,
) -> tuple[StackOutput, StackState]:
    """As `reference.scan`."""
    return _run(state, x, logits, query, x.shape[:1], x.shape[1], **options)


def _run(
    state: StackState,
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    stacks: torch.Size,
    tokens: int,
    *,
    num_slots: int,
    feedback: tuple[Tensor, ...] | None = None,
    feedback_activation: str = "identity",
    discipline: str = "stack",
    read: str = "global",
    read_mask: str = "multiply",
) -> tuple[StackOutput, StackState]:
    """A scan of so many tokens. `stacks`: the leading dimensions of the state, heads left out."""
    (*leading, heads, size), start = x.shape, state.mask.shape[-1]
    assert feedback_activation in ACTIVATIONS, feedback_activation
    how = TOP if read == "top" else HOW[read_mask]
    every = max(1, math.isqrt(tokens))
    options = (stacks.numel(), tokens, heads, size, logits.shape[-1], start, num_slots, how)
    maps = (*(feedback or ()), None, None, None, None)[:4]  # P, Q; V, c
    inner = heads * size if maps[2] is None else len(maps[2])
    units = inner // 2 if feedback_activation == "gated" else inner
    options += (int(discipline == "queue"), ACTIVATIONS.index(feedback_activation), units, inner, every)
    tensors = [*state, x, logits, None if read == "top" else query, *maps]
    _check(options, stacks, leading, tensors)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        *output, slots, mask = _Scan.apply(options, *tensors)
    else:
        *output, slots, mask = _forward(options, _contiguous(tensors), keep=False)[0]
    return StackOutput(*output), StackState(slots, mask)


def _check(options: tuple[int, ...], stacks: torch.Size, leading: list[int], tensors: list[Tensor | None]) -> None:
    """ValueError unless all numbers are where the kernels will read them: they get addresses, and trust the shapes."""
    _, _, heads, size, count, start, num_slots, how, _, _, units, inner, _ = options
    shapes = [(*stacks, heads, start, size), (*stacks, heads, start), (*leading, heads, size)]
    shapes += [(*leading, heads, count), (heads, size), (units, heads, size), (units, heads, count)]
    shapes += [(inner, heads * size), (*leading, inner)]
    if count not in (2, 3):
        raise ValueError(f"stack scan: {count} actions; there are 3, or 2 of push_only")
    for tensor, shape in zip(tensors, shapes, strict=True):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"stack scan: a tensor of shape {tuple(tensor.shape)} where {shape} is due")
        if tensor.dtype != tensors[2].dtype or tensor.dtype not in NUMBERS:
            raise ValueError(f"stack scan: {tensor.dtype} beside {tensors[2].dtype}; all are float32, or all float64")
        if tensor.device.type != "cpu":
            raise ValueError(f"stack scan: a tensor on {tensor.device}; the compiled scan is for the CPU")
    if start > num_slots:
        raise ValueError(f"stack scan: a state of {start} slots where there are {num_slots}")
    if tensors[4] is None and how != TOP:
        raise ValueError("stack scan: a global read needs a query")


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options: tuple[int, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        tensors = _contiguous(tensors)
        outputs, kept = _forward(options, tensors, keep=True)
        read, action, entropy, occupancy, *_ = outputs
        ctx.options = options
        ctx.save_for_backward(*tensors, read, action, entropy, *kept)
        ctx.mark_non_differentiable(occupancy)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        slots, mask, x, logits, query, to_x, to_logits, of_read, given, *kept = ctx.saved_tensors
        read, action, entropy, pushed, first_read, states, masks = kept
        maps = (to_x, to_logits)
        batch, tokens, heads, size, *_, activation, _, _, _ = ctx.options
        fed = g_slots = g_mask = g_query = g_of_read = g_given = None
        autocast = torch.autocast("cpu", enabled=False)  # of whoever calls backward
        if first_read is not None:
            last = torch.cat([first_read, read[:, : tokens - 1]], 1).flatten(2)  # R_{t-1}
            with autocast:
                fed = squashed(last, ACTIVATIONS[activation], of_read, given)
        incoming = _contiguous([*incoming[:3], *incoming[4:]])  # none of the occupancy
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            g_slots, g_mask = torch.empty_like(slots), torch.empty_like(mask)
        if query is not None:
            g_query = x.new_zeros(batch, heads, size)
        g_x, g_logits = torch.empty_like(x), torch.empty_like(logits)
        turned = None if fed is None else _padded(torch.cat([of.flatten(1).T for of in maps]))  # what x and logits got
        if given is not None:
            g_given = torch.empty_like(given)
        rows = None if of_read is None else _padded(of_read)
        inputs = [slots, mask, x if pushed is None else pushed, query, turned, fed, rows]
        outgoing = [g_slots, g_mask, g_x, g_logits, g_query, g_given]
        _for_all(kernels.backward, ctx.options, inputs, [action, entropy], [states, masks], incoming, outgoing)
        if query is not None:
            g_query = g_query.sum(0)
        g_maps = (None, None)
        if fed is not None:
            fed = gated(fed, ACTIVATIONS[activation]).flatten(0, 1).T  # [m, B*T]
            with autocast:
                products = [fed @ gradient.flatten(2).flatten(0, 1) for gradient in (g_x, g_logits)]
                g_of_read = None if given is None else g_given.flatten(0, 1).T @ last.flatten(0, 1)
            g_maps = [product.view_as(weights) for product, weights in zip(products, maps, strict=True)]
        return None, g_slots, g_mask, g_x, g_logits, g_query, *g_maps, g_of_read, g_given


def _forward(
    options: tuple[int, ...], tensors: list[Tensor | None], keep: bool
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs and the last state; and for the backward pass, what was pushed, R_{-1}, every k-th state."""
    batch, tokens, heads, size, _, start, num_slots, *_, every = options
    slots, mask, x, logits, query, *maps, of_read, given = tensors
    feedback, room = maps[0] is not None, min(start + tokens, num_slots)
    side_by_side = _padded(torch.cat([of.flatten(1) for of in maps], 1)) if feedback else None
    columns = None if of_read is None else _padded(of_read.T)
    segments = max(0, tokens - 1) // every
    new = x.new_empty
    tokens_of_heads, stacks = x.shape[:-1], slots.shape[:-2]
    outputs = [new(x.shape), new(*tokens_of_heads, 3), new(tokens_of_heads), new(tokens_of_heads)]
    outputs += [new(*stacks, room, size), new(*stacks, room)]
    kept = [new(x.shape) if feedback and keep else None, new(batch, 1, heads, size) if feedback else None, None, None]
    if keep and segments:
        kept[2:] = new(batch, heads, segments, room, size), new(batch, heads, segments, room)
    _for_all(kernels.forward, options, [slots, mask, x, logits, query, side_by_side, columns, given], outputs, kept)
    return outputs, kept


def _padded(maps: Tensor) -> Tensor:
    """With columns of zeros, so that they fill vectors."""
    return F.pad(maps, (0, -maps.shape[1] % LANES)).contiguous()


def _contiguous(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _for_all(kernel: Callable, options: tuple[int, ...], *groups: list[Tensor | None]) -> None:
    """Run a kernel for the sequences of a batch, in as many parts as fill the threads that torch has."""
    dtype = next(tensor.dtype for tensor in groups[0] if tensor is not None)
    batch, tokens, heads, size, _, start, num_slots, *_ = options
    work = batch * tokens * heads * (size * min(start + tokens, num_slots) + NUMBERS_PER_STACK)
    parts = max(1, min(torch.get_num_threads(), batch, work // NUMBERS_PER_THREAD))
    addresses = (0 if tensor is None else tensor.data_ptr() for group in groups for tensor in group)
    job = (ctypes.c_ssize_t * kernels.JOB)(0, parts, *options, *addresses)
    run = kernel(NUMBERS[dtype]).ctypes
    team = _team() if parts > 1 else None
    if team is None:
        run(job)
    else:
        team(run, job, 0, 0)  # as many threads as torch has; a smaller team would end the others, to be begun anew


@functools.cache
def _team() -> Callable | None:
    """OpenMP's call of a C function in several threads: torch's own, which spin for a while after each of its products.

    Threads of ours would share the processors with them. None: without OpenMP, and after a fork, which no thread
    survives, the caller does all.
    """
    team = None if _forked else getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if team is None:
        logging.getLogger(__name__).info("the stack runs in one thread: %s", "forked" if _forked else "no OpenMP")
    else:
        team.argtypes, team.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return team


def _after_fork() -> None:
    global _forked
    _forked = True
    _team.cache_clear()


_forked = False
os.register_at_fork(after_in_child=_after_fork)
