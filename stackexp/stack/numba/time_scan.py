"""The stack on CPU, in numba kernels.

A step of the depth axis is a scan of one token in B x T sequences: a stack stays in the cache from its update to its
read, where `eager` goes through memory for each operation. For the backward pass every k-th state is saved with
k = sqrt(T); without gradients nothing is saved.

The first call on a machine compiles for 10 to 20 s of processor time for each dtype; see `kernel_cache`.
"""

import math
from collections.abc import Iterable, Sequence
from ctypes import _CFuncPtr

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stackexp.stack import eager
from stackexp.stack.feedback import ACTIVATIONS, activate, multiply_gates
from stackexp.stack.numba import kernel_cache, threads
from stackexp.stack.numba.arguments import BackwardTensors, ForwardTensors, Sizes
from stackexp.stack.numba.equations import ADDITIVE, LOG, MULTIPLY, TOP
from stackexp.stack.numba.vectors import pad_columns
from stackexp.stack.reference import StackOutput, StackState

empty = eager.empty

READS = {"multiply": MULTIPLY, "log": LOG, "additive": ADDITIVE}
NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


def step(state: StackState, x: Tensor, logits: Tensor, query: Tensor | None, **options) -> tuple:
    """Update, then read; see `reference.step`."""
    return _run(state, x, logits, query, x.shape[:-2], 1, **options)


def scan(state: StackState, x: Tensor, logits: Tensor, query: Tensor | None, **options) -> tuple:
    """Apply `step` to the tokens, one after the other; see `reference.scan`."""
    return _run(state, x, logits, query, x.shape[:1], x.shape[1], **options)


def _run(
    state: StackState,
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    batch_shape: torch.Size,
    tokens: int,
    *,
    num_slots: int,
    feedback: tuple[Tensor, ...] | None = None,
    feedback_activation: str = "identity",
    discipline: str = "stack",
    read: str = "global",
    read_mask: str = "multiply",
) -> tuple[StackOutput, StackState]:
    """Scan the tokens. `batch_shape`: the leading dimensions of the state, without the heads."""
    assert feedback_activation in ACTIVATIONS, feedback_activation
    maps = (*(feedback or ()), None, None, None, None)[:4]  # P, Q, V, c
    heads, head_dim = x.shape[-2:]
    inner = heads * head_dim if maps[2] is None else len(maps[2])
    sizes = Sizes(
        batch=batch_shape.numel(),
        tokens=tokens,
        heads=heads,
        head_dim=head_dim,
        num_actions=logits.shape[-1],
        first_slots=state.mask.shape[-1],
        last_slots=min(state.mask.shape[-1] + tokens, num_slots),
        num_slots=num_slots,
        read=TOP if read == "top" else READS[read_mask],
        is_queue=int(discipline == "queue"),
        has_mask_grad=1,
        activation=ACTIVATIONS.index(feedback_activation),
        units=inner // 2 if feedback_activation == "gated" else inner,
        inner=inner,
        save_every=max(1, math.isqrt(tokens)),
    )
    tensors = [*state, x, logits, None if read == "top" else query, *maps]
    _check_tensors(sizes, batch_shape, tensors)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        *output, slots, mask = _Scan.apply(sizes, *tensors)
    else:
        result = _run_forward(sizes, _make_contiguous(tensors), needs_grad=False)
        output, slots, mask = [result.read, result.action, result.entropy, result.occupancy], *result[12:14]
    return StackOutput(*output), StackState(slots, mask)


def _check_tensors(sizes: Sizes, batch_shape: torch.Size, tensors: list[Tensor | None]) -> None:
    """Raise ValueError for a wrong shape, dtype or device: the kernels read plain addresses."""
    heads, size, actions, first_slots = sizes.heads, sizes.head_dim, sizes.num_actions, sizes.first_slots
    x, query = tensors[2], tensors[4]
    shapes = {
        "state.slots": (*batch_shape, heads, first_slots, size),
        "state.mask": (*batch_shape, heads, first_slots),
        "x": x.shape,
        "logits": (*x.shape[:-2], heads, actions),
        "query": (heads, size),
        "feedback P": (sizes.units, heads, size),
        "feedback Q": (sizes.units, heads, actions),
        "feedback V": (sizes.inner, heads * size),
        "feedback c": (*x.shape[:-2], sizes.inner),
    }
    if actions not in (2, 3):
        raise ValueError(f"stack scan: logits have {actions} actions; expected 3, or 2 for push_only")
    for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"stack scan: {name} has shape {tuple(tensor.shape)}; expected {tuple(shape)}")
        if tensor.dtype != x.dtype or tensor.dtype not in NUMPY_DTYPES:
            raise ValueError(f"stack scan: {name} is {tensor.dtype}, x is {x.dtype}; use float32 or float64 for all")
        if tensor.device.type != "cpu":
            raise ValueError(f"stack scan: {name} is on {tensor.device}; move it to the CPU or use eager")
    if first_slots > sizes.num_slots:
        raise ValueError(f"stack scan: the state has {first_slots} slots; expected at most {sizes.num_slots}")
    if query is None and sizes.read != TOP:
        raise ValueError("stack scan: a global read requires a query")


class _Scan(torch.autograd.Function):
    """The scan with gradients."""

    @staticmethod
    def forward(ctx, sizes: Sizes, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        inputs = _make_contiguous(tensors)
        result = _run_forward(sizes, inputs, needs_grad=True)
        ctx.sizes = sizes
        kept = (result.pushed, result.first_read, result.saved_slots, result.saved_mask)
        ctx.save_for_backward(*inputs, result.read, result.action, result.entropy, *kept)
        ctx.mark_non_differentiable(result.occupancy)
        ctx.set_materialize_grads(False)
        return result[8:14]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        slots, mask, x, logits, query, to_x, to_logits, from_read, given, *saved = ctx.saved_tensors
        read, action, entropy, pushed, first_read, saved_slots, saved_mask = saved
        grad_read, grad_action, grad_entropy, _, grad_last_slots, grad_last_mask = _make_contiguous(grads)
        uses_mask = ctx.sizes.is_queue or ctx.sizes.read != TOP or grad_last_mask is not None
        sizes, fed, last_read = ctx.sizes._replace(has_mask_grad=int(uses_mask)), None, None
        if to_x is not None:
            last_read = torch.cat([first_read, read[:, : sizes.tokens - 1]], 1).flatten(2)  # R_{t-1}
            with torch.autocast("cpu", enabled=False):  # backward may be called under autocast
                fed = activate(last_read, ACTIVATIONS[sizes.activation], from_read, given)
        needs_state_grad = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        tensors = BackwardTensors(
            slots=slots,
            mask=mask,
            pushed=x if pushed is None else pushed,
            query=query,
            feedback_x=None if to_x is None else _pad_rows(to_x.flatten(1).T),
            feedback_logits=None if to_x is None else _pad_rows(to_logits.flatten(1).T),
            fed=fed,
            from_read=None if from_read is None else _pad_rows(from_read),
            action=action,
            entropy=entropy,
            saved_slots=saved_slots,
            saved_mask=saved_mask,
            grad_read=grad_read,
            grad_action=grad_action,
            grad_entropy=grad_entropy,
            grad_last_slots=grad_last_slots,
            grad_last_mask=grad_last_mask,
            grad_slots=torch.empty_like(slots) if needs_state_grad else None,
            grad_mask=torch.empty_like(mask) if needs_state_grad else None,
            grad_x=torch.empty_like(x),
            grad_logits=torch.empty_like(logits),
            grad_query=None if query is None else x.new_zeros(sizes.batch, *query.shape),
            grad_given=None if given is None else torch.empty_like(given),
        )
        _run_kernel(kernel_cache.backward(NUMPY_DTYPES[x.dtype]).ctypes, sizes, tensors)
        grad_query = None if query is None else tensors.grad_query.sum(0)
        grads = (tensors.grad_slots, tensors.grad_mask, tensors.grad_x, tensors.grad_logits, grad_query)
        return None, *grads, *_feedback_map_grads(sizes, tensors, last_read), tensors.grad_given


def _feedback_map_grads(sizes: Sizes, tensors: BackwardTensors, last_read: Tensor | None) -> list[Tensor | None]:
    """Return the gradients of P, Q and V, which sum over all tokens."""
    if tensors.fed is None:
        return [None, None, None]
    u = multiply_gates(tensors.fed, ACTIVATIONS[sizes.activation]).flatten(0, 1).T  # [m, B*T]
    with torch.autocast("cpu", enabled=False):
        grads = [u @ grad.flatten(2).flatten(0, 1) for grad in (tensors.grad_x, tensors.grad_logits)]
        grads = [grad.unflatten(1, (sizes.heads, -1)) for grad in grads]
        if tensors.grad_given is None:
            return [*grads, None]
        return [*grads, tensors.grad_given.flatten(0, 1).T @ last_read.flatten(0, 1)]


def _run_forward(sizes: Sizes, tensors: Sequence[Tensor | None], needs_grad: bool) -> ForwardTensors:
    """Return the inputs and all outputs of the forward kernel."""
    slots, mask, x, logits, query, to_x, to_logits, from_read, given = tensors
    has_feedback, batch_shape, new = to_x is not None, slots.shape[:-2], x.new_empty
    count, states = sizes.last_slots, (sizes.tokens - 1) // sizes.save_every if needs_grad else 0
    result = ForwardTensors(
        slots=slots,
        mask=mask,
        x=x,
        logits=logits,
        query=query,
        feedback=_pad_rows(torch.cat([to_x.flatten(1), to_logits.flatten(1)], 1)) if has_feedback else None,
        from_read=None if from_read is None else _pad_rows(from_read.T),
        given=given,
        read=new(x.shape),
        action=new(*x.shape[:-1], 3),
        entropy=new(x.shape[:-1]),
        occupancy=new(x.shape[:-1]),
        last_slots=new(*batch_shape, count, sizes.head_dim),
        last_mask=new(*batch_shape, count),
        pushed=new(x.shape) if has_feedback and needs_grad else None,
        first_read=new(sizes.batch, 1, sizes.heads, sizes.head_dim) if has_feedback else None,
        saved_slots=new(sizes.batch, sizes.heads, states, count, sizes.head_dim) if states else None,
        saved_mask=new(sizes.batch, sizes.heads, states, count) if states else None,
    )
    _run_kernel(kernel_cache.forward(NUMPY_DTYPES[x.dtype]).ctypes, sizes, result)
    return result


def _run_kernel(kernel: _CFuncPtr, sizes: Sizes, tensors: ForwardTensors | BackwardTensors) -> None:
    updates = sizes.head_dim * sizes.last_slots + threads.FIXED_WORK_PER_STACK
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    work = sizes.batch * sizes.tokens * sizes.heads * updates
    threads.run_job(kernel, sizes.batch, work, [*sizes, *addresses])


def _pad_rows(matrix: Tensor) -> Tensor:
    """Append columns of zeros, so that the rows fill vector registers."""
    columns = matrix.shape[1]
    return F.pad(matrix, (0, pad_columns(columns) - columns)).contiguous()


def _make_contiguous(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]
