"""The scan over tokens on CPU: numba kernels for both passes, which touch only occupied slots.

Equals `reference` in values and gradients. A step, all tokens in parallel, is `eager`'s: there torch is fast enough.
For the backward pass every k-th state is kept, k about the square root of the number of tokens; nothing is kept where
no gradient is wanted. The first call in a process takes a moment, the first on a machine about half a minute: numba
compiles, and keeps what it compiled beside this file or, where that may not be written, in the user's cache.
"""

import functools
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from stackexp.stack import eager, kernels
from stackexp.stack.reference import StackOutput, StackState

empty, step = eager.empty, eager.step

HOW = {"multiply": kernels.MULTIPLY, "log": kernels.LOG, "additive": kernels.ADDITIVE}
NUMBERS_PER_THREAD = 2**18  # of updates of one number of a slot: less is done before a thread has begun


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
    assert x.device.type == "cpu", x.device
    batch, tokens, heads, size = x.shape
    how = kernels.TOP if read == "top" else HOW[read_mask]
    every = max(1, math.isqrt(tokens))
    shape = (tokens, heads, size, logits.shape[-1], state.mask.shape[-1], num_slots)
    options = (*shape, how, int(discipline == "queue"), int(feedback_activation == "tanh"), every)
    maps = x.new_empty(0, 0)
    if feedback:
        maps = torch.cat([feedback[0].flatten(1), feedback[1].flatten(1)], 1)  # [H*D, H*D + H*A]
    query = x.new_zeros(heads, size) if query is None else query
    tensors = [*state, x.flatten(2), logits.flatten(2), query, maps]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        *outputs, slots, mask = _Scan.apply(options, *tensors)
    else:
        *outputs, slots, mask = _forward(options, tensors, keep=False)[0]
    read_, action, entropy, occupancy = outputs
    output = StackOutput(read_.view(x.shape), action.view(batch, tokens, heads, 3), entropy, occupancy)
    return output, StackState(slots, mask)


def _forward(options: tuple[int, ...], tensors: list[Tensor], keep: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and what the backward pass needs of the states: pushed vectors, R_{-1}, every k-th state."""
    tensors = [tensor.detach().contiguous() for tensor in tensors]
    tokens, heads, size, _, start, num_slots, *_, every = options
    x, maps = tensors[2], tensors[5]
    assert start <= num_slots, (start, num_slots)
    batch, new, feedback = len(x), x.new_empty, maps.numel() > 0
    end, segments = min(start + tokens, num_slots), (tokens - 1) // every if keep and tokens else 0
    outputs = [new(x.shape), new(batch, tokens, heads * 3), new(batch, tokens, heads), new(batch, tokens, heads)]
    outputs += [new(batch, heads, end, size), new(batch, heads, end)]
    kept = [new(x.shape if feedback and keep else 0), new((batch, heads * size) if feedback else 0)]
    kept += [new(batch, heads, segments, end, size), new(batch, heads, segments, end)]
    work = batch * tokens * heads * size * end
    _for_all(kernels.forward, batch, work, options, tensors, outputs, kept)
    return outputs, kept


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
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
        slots, mask, x, logits, query, maps, read, action, entropy, *kept = (
            tensor.detach().contiguous() for tensor in ctx.saved_tensors
        )
        pushed, first_read, states, masks = kept
        tokens, heads, size, _, start, num_slots, _, _, tanh, _ = ctx.options
        batch, fed = len(x), x.new_empty(0)
        if feedback := maps.numel() > 0:
            fed = torch.cat([first_read.unsqueeze(1), read], 1)[:, :tokens]  # R_{t-1}
            fed = fed.tanh() if tanh else fed.contiguous()
        incoming = [*incoming[:3], *incoming[4:]]  # none of the occupancy
        incoming = [x.new_empty(0) if gradient is None else gradient.contiguous() for gradient in incoming]
        wanted = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        of_state = [torch.empty_like(tensor) if wanted else tensor[:0] for tensor in (slots, mask)]
        outgoing = [*of_state, torch.empty_like(x), torch.empty_like(logits), x.new_zeros(batch, *query.shape)]
        inputs = [slots, mask, pushed if feedback else x, query, maps.T.contiguous(), fed]
        work = 3 * batch * tokens * heads * size * min(start + tokens, num_slots)
        arrays = (inputs, [action, entropy], [states, masks], incoming, outgoing)
        _for_all(kernels.backward, batch, work, ctx.options, *arrays)
        g_slots, g_mask, g_x, g_logits, g_query = outgoing
        g_maps = None
        if feedback:
            g_maps = fed.flatten(0, 1).T @ torch.cat([g_x, g_logits], 2).flatten(0, 1)
        g_state = (g_slots, g_mask) if wanted else (None, None)
        return None, *g_state, g_x, g_logits, g_query.sum(0), g_maps


def _for_all(kernel: Callable, batch: int, work: int, options: tuple[int, ...], *groups: list[Tensor]) -> None:
    """Run a kernel for the sequences of a batch, in as many threads as torch uses and the work fills."""
    args = options, *(tuple(tensor.view(-1).numpy() for tensor in group) for group in groups)
    threads = max(1, min(torch.get_num_threads(), batch, work // NUMBERS_PER_THREAD))
    if threads == 1:
        kernel(0, batch, *args)
        return
    bounds = [batch * i // threads for i in range(threads + 1)]
    pool = _pool(os.getpid(), threads - 1)
    others = [pool.submit(kernel, bounds[i], bounds[i + 1], *args) for i in range(1, threads)]
    kernel(0, bounds[1], *args)
    for other in others:
        other.result()


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """One for each process: threads do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="stack")
