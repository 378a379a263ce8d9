"""The stack on CPU, in numba kernels.

A step of the depth axis is a scan of one token in B x T sequences. A stack stays in the CPU cache from its update to
its read, whereas `eager` writes to memory after each operation. The backward pass needs every k-th state, k = sqrt(T);
without gradients no state is saved.

The first call on a machine compiles for 10 to 20 s per dtype; see `launch`.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stackexp.stack import eager
from stackexp.stack.feedback import ACTIVATIONS, activate, multiply_gates
from stackexp.stack.numba.equations import ADDITIVE, LOG, MULTIPLY, TOP
from stackexp.stack.numba.launch import (
    FIXED_WORK_PER_STACK,
    Scratch,
    Sizes,
    Tensors,
    count_parts,
    load_kernel,
    run_job,
)
from stackexp.stack.numba.vectors import pad_columns
from stackexp.stack.reference import StackOutput, StackState

empty = eager.empty

READS = {"multiply": MULTIPLY, "log": LOG, "additive": ADDITIVE}
NUM_SAVED = Tensors._fields.index("x")  # the tensors before it are saved for the backward pass
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
    inputs = [*state, x, logits, query if read == "global" else None, *(*(feedback or ()), None, None, None, None)[:4]]
    needs_grad = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
    heads, head_dim = x.shape[-2:]
    hidden = inputs[7]  # V
    inner = heads * head_dim if hidden is None else len(hidden)
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
        save_every=max(1, math.isqrt(tokens) if needs_grad else tokens),
    )
    _check_inputs(sizes, batch_shape, inputs)
    if needs_grad:
        *output, slots, mask = _Scan.apply(sizes, *inputs)
    else:
        *output, slots, mask = _get_outputs(_run_forward(sizes, inputs))
    return StackOutput(*output), StackState(slots, mask)


def _check_inputs(sizes: Sizes, batch_shape: torch.Size, inputs: list[Tensor | None]) -> None:
    """Check shapes, dtypes and devices, because the kernels read plain addresses."""
    heads, head_dim, actions, count = sizes.heads, sizes.head_dim, sizes.num_actions, sizes.first_slots
    x = inputs[2]
    shapes = {
        "state.slots": (*batch_shape, heads, count, head_dim),
        "state.mask": (*batch_shape, heads, count),
        "x": x.shape,
        "logits": (*x.shape[:-2], heads, actions),
        "query": (heads, head_dim),
        "feedback P": (sizes.units, heads, head_dim),
        "feedback Q": (sizes.units, heads, actions),
        "feedback V": (sizes.inner, heads * head_dim),
        "feedback c": (*x.shape[:-2], sizes.inner),
    }
    for (name, shape), tensor in zip(shapes.items(), inputs, strict=True):
        if tensor is not None:
            is_valid = tensor.shape == shape and tensor.dtype == x.dtype and tensor.is_cpu
            assert is_valid, f"stack scan: {name} has {tensor.shape}, {tensor.dtype}, {tensor.device}; x: {x.dtype}"
    assert x.dtype in NUMPY_DTYPES, f"stack scan: x has {x.dtype}, expected float32 or float64"
    assert actions in (2, 3), f"stack scan: {actions} actions, expected 3, or 2 for push_only"
    assert count <= sizes.num_slots, f"stack scan: the state has {count} slots, expected at most {sizes.num_slots}"
    assert sizes.read == TOP or inputs[4] is not None, "stack scan: a global read requires a query"


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sizes: Sizes, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        tensors = _run_forward(sizes, inputs)
        ctx.sizes = sizes
        ctx.save_for_backward(*tensors[:NUM_SAVED])
        ctx.mark_non_differentiable(tensors.occupancy)
        ctx.set_materialize_grads(False)
        return _get_outputs(tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = Tensors(*ctx.saved_tensors)
        grad_read, grad_action, grad_entropy, _, grad_last_slots, grad_last_mask = _make_contiguous(grads)
        uses_mask = ctx.sizes.is_queue or ctx.sizes.read != TOP or grad_last_mask is not None
        sizes, query, token_bias = ctx.sizes._replace(has_mask_grad=int(uses_mask)), saved.query, saved.token_bias
        needs_state_grad = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        last_read, feedback, read_weight, fed = _prepare_feedback(sizes, saved)
        tensors = Tensors(
            *(*saved[:4], feedback, read_weight, *saved[6:NUM_SAVED]),
            fed=fed,
            grad_read=grad_read,
            grad_action=grad_action,
            grad_entropy=grad_entropy,
            grad_last_slots=grad_last_slots,
            grad_last_mask=grad_last_mask,
            grad_slots=torch.empty_like(saved.slots) if needs_state_grad else None,
            grad_mask=torch.empty_like(saved.mask) if needs_state_grad else None,
            grad_x=torch.empty_like(saved.pushed),
            grad_logits=saved.entropy.new_empty(*saved.entropy.shape, sizes.num_actions),
            grad_query=None if query is None else query.new_zeros(sizes.batch, *query.shape),
            grad_token_bias=None if token_bias is None else torch.empty_like(token_bias),
        )
        _run_kernel(sizes, tensors, is_backward=True)
        grad_query = None if query is None else tensors.grad_query.sum(0)
        state_grads = (tensors.grad_slots, tensors.grad_mask, tensors.grad_x, tensors.grad_logits, grad_query)
        return None, *state_grads, *_compute_map_grads(sizes, tensors, last_read), tensors.grad_token_bias


def _get_outputs(tensors: Tensors) -> tuple[Tensor, ...]:
    outputs = tensors.read, tensors.action, tensors.entropy, tensors.occupancy
    return *outputs, tensors.last_slots, tensors.last_mask


def _prepare_feedback(sizes: Sizes, tensors: Tensors) -> tuple[Tensor | None, ...]:
    """Return R_{t-1} [B, T, H*D], and `feedback`, `read_weight` and `fed` of the backward pass."""
    if tensors.feedback is None:
        return None, None, None, None
    last_read = torch.cat([tensors.first_read, tensors.read[:, : sizes.tokens - 1]], 1).flatten(2)
    feedback = tensors.feedback[:, : sizes.heads * (sizes.head_dim + sizes.num_actions)]
    read_weight = None if tensors.read_weight is None else tensors.read_weight[:, : sizes.inner].T  # V
    with torch.autocast("cpu", enabled=False):  # backward may be called under autocast
        fed = activate(last_read, ACTIVATIONS[sizes.activation], read_weight, tensors.token_bias)
    return last_read, _pad_rows(feedback.T), None if read_weight is None else _pad_rows(read_weight), fed


def _compute_map_grads(sizes: Sizes, tensors: Tensors, last_read: Tensor | None) -> list[Tensor | None]:
    """Return the gradients of P, Q and V, summed over all tokens."""
    if last_read is None:
        return [None, None, None]
    u = multiply_gates(tensors.fed, ACTIVATIONS[sizes.activation]).flatten(0, 1).T  # [m, B*T]
    hidden_grad = tensors.grad_token_bias
    with torch.autocast("cpu", enabled=False):
        grads = [u @ grad.flatten(2).flatten(0, 1) for grad in (tensors.grad_x, tensors.grad_logits)]
        grads = [grad.unflatten(1, (sizes.heads, -1)) for grad in grads]
        return [*grads, None if hidden_grad is None else hidden_grad.flatten(0, 1).T @ last_read.flatten(0, 1)]


def _run_forward(sizes: Sizes, inputs: Sequence[Tensor | None]) -> Tensors:
    """Return the inputs and outputs of the forward kernel."""
    slots, mask, x, logits, query, to_x, to_logits, read_weight, token_bias = _make_contiguous(inputs)
    has_feedback, count, new = to_x is not None, sizes.last_slots, x.new_empty
    states = (sizes.tokens - 1) // sizes.save_every
    tensors = Tensors(
        slots=slots,
        mask=mask,
        pushed=new(x.shape) if has_feedback else x,
        query=query,
        feedback=_pad_rows(torch.cat([to_x.flatten(1), to_logits.flatten(1)], 1)) if has_feedback else None,
        read_weight=None if read_weight is None else _pad_rows(read_weight.T),
        token_bias=token_bias,
        read=new(x.shape),
        action=new(*x.shape[:-1], 3),
        entropy=new(x.shape[:-1]),
        first_read=new(sizes.batch, 1, sizes.heads, sizes.head_dim) if has_feedback else None,
        saved_slots=new(sizes.batch, sizes.heads, states, count, sizes.head_dim) if states else None,
        saved_mask=new(sizes.batch, sizes.heads, states, count) if states else None,
        x=x,
        logits=logits,
        occupancy=new(x.shape[:-1]),
        last_slots=new(*slots.shape[:-2], count, sizes.head_dim),
        last_mask=new(*slots.shape[:-2], count),
    )
    _run_kernel(sizes, tensors, is_backward=False)
    return tensors


def _run_kernel(sizes: Sizes, tensors: Tensors, is_backward: bool) -> None:
    like = tensors.slots
    updates = sizes.head_dim * sizes.last_slots + FIXED_WORK_PER_STACK
    parts = count_parts(sizes.batch, sizes.batch * sizes.tokens * sizes.heads * updates)
    starts, length = _lay_out_scratch(sizes, 1 if tensors.feedback is None else sizes.heads, is_backward)
    scratch = like.new_zeros(parts, length)
    first, size = scratch.data_ptr(), scratch.itemsize
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    addresses += [first + start * size for start in starts]
    kernel = load_kernel(NUMPY_DTYPES[like.dtype], is_backward)
    run_job(kernel.ctypes, parts, [length * size, *sizes, *addresses])


@functools.lru_cache(256)
def _lay_out_scratch(sizes: Sizes, group: int, is_backward: bool) -> tuple[list[int], int]:
    """Return the offset of each tensor in a part's `Scratch`, and the total size. `group`: heads that run together."""
    rows = group * (sizes.save_every + 3 if is_backward else 2) * (sizes.last_slots + 3)
    lengths = Scratch(
        slots=rows * sizes.head_dim,
        mask=rows,
        weights=sizes.last_slots,
        contents=sizes.last_slots,
        grads=sizes.last_slots,
        inner=sizes.inner,
        fed=sizes.inner,
        mixed=sizes.heads * (sizes.head_dim + sizes.num_actions),
        grad_read=sizes.head_dim,
    )
    *starts, length = itertools.accumulate(map(pad_columns, lengths), initial=0)
    return starts, length


def _pad_rows(matrix: Tensor) -> Tensor:
    """Append columns of zeros, so that the rows fill vector registers."""
    columns = matrix.shape[1]
    return F.pad(matrix, (0, pad_columns(columns) - columns)).contiguous()


def _make_contiguous(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]
