"""The stack on CPU: numba kernels for both passes, which touch only occupied slots.

Equals `reference` in values and gradients. A step, of all tokens in parallel, is a scan of one token in as many
sequences: a stack is in the cache from its update to its read, where `eager` goes through memory for each operation.
For the backward pass every k-th state is kept, k about the square root of the number of tokens; nothing is kept where
no gradient is wanted. The first call in a process takes a moment, the first on a machine 10 to 20 s of processor
time for each dtype: numba compiles, and keeps what it compiled beside this file or, where that may not be written, in
the user's cache.
"""

import functools
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch
from torch import Tensor

from stackexp.stack import eager, kernels
from stackexp.stack.numba_update_read import ADDITIVE, LOG, MULTIPLY, TOP
from stackexp.stack.reference import ACTIVATIONS, StackOutput, StackState

empty = eager.empty

HOW = {"multiply": MULTIPLY, "log": LOG, "additive": ADDITIVE}
LIKE = {torch.float32: np.zeros(0, np.float32), torch.float64: np.zeros(0, np.float64)}
NUMBERS_PER_THREAD = 2**17  # of updates of one number of a slot: less is done before a thread has begun
NUMBERS_PER_STACK = 300  # of such updates: what the rest of a step takes, actions and softmaxes


def step(
    state: StackState, x: Tensor, logits: Tensor, query: Tensor | None, **options: str | int
) -> tuple[StackOutput, StackState]:
    """As `reference.step`."""
    shape = x.shape[:-2]
    state = StackState(*(field.reshape(shape.numel(), *field.shape[len(shape) :]) for field in state))
    x, logits = (field.reshape(shape.numel(), 1, *field.shape[-2:]) for field in (x, logits))
    output, state = scan(state, x, logits, query, **options)
    fields = (field.view(*shape, *field.shape[2:]) for field in output)
    return StackOutput(*fields), StackState(*(field.view(*shape, *field.shape[1:]) for field in state))


def scan(
    state: StackState,
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    *,
    num_slots: int,
    feedback: tuple[Tensor, Tensor] | None = None,
    feedback_activation: str = "identity",
    discipline: str = "stack",
    read: str = "global",
    read_mask: str = "multiply",
) -> tuple[StackOutput, StackState]:
    """As `reference.scan`."""
    (*shape, size), start = x.shape, state.mask.shape[-1]
    assert feedback_activation in ACTIVATIONS, feedback_activation
    how = TOP if read == "top" else HOW[read_mask]
    every = max(1, math.isqrt(shape[1]))
    options = (*shape, size, logits.shape[-1], start, num_slots, how)
    options += (int(discipline == "queue"), int(feedback_activation == "tanh"), every)
    maps = feedback or (None, None)
    tensors = [*state, x, logits, None if read == "top" else query, *maps]
    _check(options, tensors)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        *output, slots, mask = _Scan.apply(options, *tensors)
    else:
        *output, slots, mask = _forward(options, _contiguous(tensors), keep=False)[0]
    return StackOutput(*output), StackState(slots, mask)


def _check(options: tuple[int, ...], tensors: list[Tensor | None]) -> None:
    """ValueError unless all numbers are where the kernels will read them: they get addresses, and trust the shapes."""
    batch, tokens, heads, size, count, start, num_slots, how, *_ = options
    shapes = [(batch, heads, start, size), (batch, heads, start), (batch, tokens, heads, size)]
    shapes += [(batch, tokens, heads, count), (heads, size), (heads * size, heads, size), (heads * size, heads, count)]
    if count not in (2, 3):
        raise ValueError(f"stack scan: {count} actions; there are 3, or 2 of push_only")
    for tensor, shape in zip(tensors, shapes, strict=True):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"stack scan: a tensor of shape {tuple(tensor.shape)} where {shape} is due")
        if tensor.dtype != tensors[2].dtype or tensor.dtype not in LIKE:
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
        slots, mask, x, logits, query, *maps, read, action, entropy, pushed, first_read, states, masks = (
            ctx.saved_tensors
        )
        batch, tokens, heads, size, *_, tanh, _ = ctx.options
        fed = g_slots = g_mask = g_query = None
        if first_read is not None:
            fed = first_read if tokens == 1 else torch.cat([first_read, read], 1)[:, :tokens]  # R_{t-1}
            fed = fed.tanh() if tanh else fed.contiguous()
        incoming = _contiguous([*incoming[:3], *incoming[4:]])  # none of the occupancy
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            g_slots, g_mask = torch.empty_like(slots), torch.empty_like(mask)
        if query is not None:
            g_query = x.new_zeros(batch, heads, size)
        g_x, g_logits = torch.empty_like(x), torch.empty_like(logits)
        inputs = [slots, mask, x if pushed is None else pushed, query, *maps, fed]
        outgoing = [g_slots, g_mask, g_x, g_logits, g_query]
        _for_all(kernels.backward, ctx.options, inputs, [action, entropy], [states, masks], incoming, outgoing)
        if query is not None:
            g_query = g_query.sum(0)
        g_maps = (None, None)
        if fed is not None:
            fed = fed.flatten(2).flatten(0, 1).T  # [H*D, B*T]
            with torch.autocast("cpu", enabled=False):  # of whoever calls backward
                products = [fed @ gradient.flatten(2).flatten(0, 1) for gradient in (g_x, g_logits)]
            g_maps = [product.view_as(weights) for product, weights in zip(products, maps, strict=True)]
        return None, g_slots, g_mask, g_x, g_logits, g_query, *g_maps


def _forward(
    options: tuple[int, ...], tensors: list[Tensor | None], keep: bool
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs and the last state; and for the backward pass, what was pushed, R_{-1}, every k-th state."""
    batch, tokens, heads, size, _, start, num_slots, *_, every = options
    x, feedback, room = tensors[2], tensors[5] is not None, min(start + tokens, num_slots)
    segments = max(0, tokens - 1) // every
    new = x.new_empty
    outputs = [new(x.shape), new(batch, tokens, heads, 3), new(batch, tokens, heads), new(batch, tokens, heads)]
    outputs += [new(batch, heads, room, size), new(batch, heads, room)]
    kept = [new(x.shape) if feedback and keep else None, new(batch, 1, heads, size) if feedback else None, None, None]
    if keep and segments:
        kept[2:] = new(batch, heads, segments, room, size), new(batch, heads, segments, room)
    _for_all(kernels.forward, options, tensors, outputs, kept)
    return outputs, kept


def _contiguous(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _for_all(kernel: Callable, options: tuple[int, ...], *groups: list[Tensor | None]) -> None:
    """Run a kernel for the sequences of a batch, in as many threads as torch uses and the work fills."""
    like = LIKE[next(tensor.dtype for tensor in groups[0] if tensor is not None)]
    args = like, options, *(tuple(0 if tensor is None else tensor.data_ptr() for tensor in group) for group in groups)
    batch, tokens, heads, size, _, start, num_slots, *_ = options
    work = batch * tokens * heads * (size * min(start + tokens, num_slots) + NUMBERS_PER_STACK)
    threads = max(1, min(torch.get_num_threads(), batch, work // NUMBERS_PER_THREAD))
    bounds = [batch * i // threads for i in range(threads + 1)]

    def job(part: int, alive: tuple[list[Tensor | None], ...] = groups) -> None:
        """The kernels get addresses: the tensors must live until this is done, even if an interrupt ends the caller."""
        kernel(bounds[part], bounds[part + 1], *args)

    others = [_pool().submit(job, part) for part in range(1, threads)]
    try:
        job(0)
    finally:
        wait(others)
    for other in others:
        other.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Of this process. Its threads begin as they are needed."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="stack")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
