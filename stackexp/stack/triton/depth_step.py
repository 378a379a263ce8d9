"""The depth axis on CUDA: one kernel per layer, and one for its gradients.

No stack is written and read between the layers. Every k-th stack is stored (`checkpoint_every`, k = 4). A layer in
between starts from the last stored stack and repeats the updates since then, from the pushed vectors and the action
logits of those layers: H(D + 3) numbers per layer instead of H n (D + 1), for n = min(l + 1, S) occupied slots at
layer l. So does its backward pass. At 360m in bfloat16 a layer moves 3,270 bytes forward and 7,212 backward per token,
of which 4,200 are the gradient of the stack (tests/stack_traffic.py computes them). Above k = 4 little is saved.

Autograd carries the gradient of the stack from layer to layer as the gradient of two state tensors that have its shape,
contain zeros, and use no storage. So activation checkpointing of whole blocks keeps no stacks.

Everything is computed in float32, or float64 where x or the state is. The contents are stored in the dtype given to
`empty`, M in float32 at least. The part of w_g's gradient that a program computes is stored in its own row and summed
afterwards, so results are deterministic. The kernels are opaque operators to torch.compile, with fake and autograd
implementations. With TRITON_INTERPRET=1 in the environment, steps run on a CPU, slowly.
"""

from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from stackexp.stack.reference import StackOutput
from stackexp.stack.triton.arguments import StepBackward, StepForward
from stackexp.stack.triton.depth_step_launch import compute_grid, launch

CHECKPOINT_EVERY = 4  # k


class DepthState(NamedTuple):
    """The last stored stack and the updates since then. n = min(updates, S) slots; `...` is [B, T]."""

    slots: Tensor  # stored contents, V_0 [n_0, ..., H, D]; only the last two fields have gradients
    mask: Tensor  # M of V_0 [n_0, ..., H], in float32 at least
    pushed: list[Tensor]  # x of each layer since [..., H, D]
    logits: list[Tensor]  # of each layer since [..., H, 3 or 2]
    to_slots: Tensor  # [n, ..., H, D], zeros without storage, which carry the gradient of the contents
    to_mask: Tensor  # [n, ..., H], the same for M


class StepInputs(NamedTuple):
    """The arguments of the operator `depth_step`."""

    x: Tensor
    logits: Tensor
    query: Tensor | None
    slots: Tensor  # this and the next five: DepthState
    mask: Tensor
    pushed: list[Tensor]
    pushed_logits: list[Tensor]
    to_slots: Tensor
    to_mask: Tensor
    num_slots: int
    discipline: str
    read: str
    read_mask: str
    is_stored: bool  # whether the new stack is


class StepGradInputs(NamedTuple):
    """The arguments of the operator `depth_step_backward`."""

    x: Tensor
    logits: Tensor
    query: Tensor | None
    slots: Tensor
    mask: Tensor
    pushed: list[Tensor]
    pushed_logits: list[Tensor]
    values: Tensor | None  # R; this, rest and log_total are None where the softmax is computed again
    rest: Tensor | None
    log_total: Tensor | None
    grad_read: Tensor | None
    grad_action: Tensor | None
    grad_entropy: Tensor | None
    grad_slots: Tensor | None
    grad_mask: Tensor | None
    num_old: int  # slots of the state before
    num_slots: int
    discipline: str
    read: str
    read_mask: str


def empty(
    shape: tuple[int, ...], num_slots: int, head_dim: int, like: Tensor, dtype: torch.dtype | None = None
) -> DepthState:
    """Return empty stacks for the leading dimensions `shape` (heads included), stored in `dtype` or as `like`."""
    slots = like.new_empty((0, *shape, head_dim), dtype=dtype)
    mask = slots.new_empty((0, *shape), dtype=torch.promote_types(slots.dtype, torch.float32))
    return DepthState(slots, mask, [], [], slots, mask)


def step(
    state: DepthState,
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    *,
    num_slots: int,
    discipline: str = "stack",
    read: str = "global",
    read_mask: str = "multiply",
    checkpoint_every: int = CHECKPOINT_EVERY,
) -> tuple[StackOutput, DepthState]:
    """Update, then read; see `reference.step`. Inputs may have any dtype; the read has that of x."""
    x, logits = x.contiguous(), logits.contiguous()
    is_stored = len(state.pushed) + 1 >= checkpoint_every
    options = (num_slots, discipline, read, read_mask)
    outputs = depth_step(x, logits, query if read == "global" else None, *state, *options, is_stored)
    slots, mask, to_slots, to_mask = outputs[-4:]
    if is_stored:
        state = DepthState(slots, mask, [], [], to_slots, to_mask)
    else:
        pushed, pushed_logits = [*state.pushed, x.detach()], [*state.logits, logits.detach()]
        state = DepthState(state.slots, state.mask, pushed, pushed_logits, to_slots, to_mask)
    return StackOutput(*outputs[:4]), state


def _make_schema(inputs: type, num_outputs: int) -> str:
    """Return the operator schema for a NamedTuple of arguments."""
    names = {Tensor: "Tensor", Tensor | None: "Tensor?", list[Tensor]: "Tensor[]", int: "int", str: "str", bool: "bool"}
    arguments = ", ".join(f"{names[hint]} {field}" for field, hint in get_type_hints(inputs).items())
    return f"({arguments}) -> ({', '.join(['Tensor'] * num_outputs)})"


@torch.library.custom_op("stackexp::depth_step", mutates_args=(), schema=_make_schema(StepInputs, 10))
def depth_step(*args) -> tuple[Tensor, ...]:
    """Return R, a, its entropy, occupancy, rest, log_total, and the new slots, mask, to_slots, to_mask.

    rest [..., H, D] is the rounding error of R in the dtype of x; log_total [..., H] the log of the softmax total.
    Outputs that are not needed have no elements.
    """
    inputs = StepInputs(*args)
    outputs = _allocate_outputs(inputs)
    tensors = StepForward(inputs.query, inputs.slots, inputs.mask, *map(_none_if_empty, outputs[:8]))
    launch(
        "forward",
        (*inputs.pushed, inputs.x),
        (*inputs.pushed_logits, inputs.logits),
        tensors,
        (inputs.discipline, inputs.read, inputs.read_mask),
        inputs.num_slots,
        num_new=outputs[-1].shape[0],
    )
    return outputs


@depth_step.register_fake
def _(*args) -> tuple[Tensor, ...]:
    return _allocate_outputs(StepInputs(*args))


def _allocate_outputs(inputs: StepInputs) -> tuple[Tensor, ...]:
    x, slots, mask = inputs.x, inputs.slots, inputs.mask
    stacks, dtype = x.shape[:-1], torch.promote_types(x.dtype, mask.dtype)
    num_new = min(inputs.to_slots.shape[0] + 1, inputs.num_slots)
    num_stored = num_new if inputs.is_stored else 0
    is_rounded = inputs.read == "global" and x.dtype != dtype
    return (
        x.new_empty(x.shape),
        *(x.new_empty(shape, dtype=dtype) for shape in ((*stacks, 3), stacks, stacks)),
        x.new_empty(x.shape if is_rounded else 0),
        x.new_empty(stacks if inputs.read == "global" else 0, dtype=dtype),
        slots.new_empty((num_stored, *x.shape)),
        mask.new_empty((num_stored, *stacks)),
        slots.new_zeros(()).expand(num_new, *x.shape),
        mask.new_zeros(()).expand(num_new, *stacks),
    )


@torch.library.custom_op("stackexp::depth_step_backward", mutates_args=(), schema=_make_schema(StepGradInputs, 5))
def depth_step_backward(*args) -> tuple[Tensor, ...]:
    """Return the gradients of x, logits, query (no elements for `read: top`), and of the contents and M before."""
    inputs = StepGradInputs(*args)
    to_x, to_logits, to_query, to_slots, to_mask = _allocate_gradients(inputs)
    programs, _, repeat = compute_grid("backward", inputs.x)
    parts = None
    if inputs.query is not None:
        dtype = torch.promote_types(inputs.x.dtype, inputs.mask.dtype)
        parts = inputs.query.new_empty((programs, *inputs.query.shape), dtype=dtype)
    given = (inputs.query, inputs.slots, inputs.mask, *inputs[7:15])
    launch(
        "backward",
        (*inputs.pushed, inputs.x),
        (*inputs.pushed_logits, inputs.logits),
        StepBackward(*given, to_x, to_logits, parts, to_slots, to_mask),
        (inputs.discipline, inputs.read, inputs.read_mask),
        inputs.num_slots,
        num_old=inputs.num_old,
        num_new=min(inputs.num_old + 1, inputs.num_slots),
        repeat=repeat,
    )
    return to_x, to_logits, to_query if parts is None else parts.sum(0).to(inputs.query.dtype), to_slots, to_mask


@depth_step_backward.register_fake
def _(*args) -> tuple[Tensor, ...]:
    return _allocate_gradients(StepGradInputs(*args))


def _allocate_gradients(inputs: StepGradInputs) -> tuple[Tensor, ...]:
    x, query = inputs.x, inputs.query
    return (
        x.new_empty(x.shape),
        inputs.logits.new_empty(inputs.logits.shape),
        x.new_empty(0) if query is None else query.new_empty(query.shape),
        inputs.slots.new_empty((inputs.num_old, *x.shape)),
        inputs.mask.new_empty((inputs.num_old, *x.shape[:-1])),
    )


def _save_for_backward(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    inputs = StepInputs(*inputs)
    values, _, _, occupancy, rest, log_total, new_slots, new_mask, _, _ = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(occupancy, rest, log_total, new_slots, new_mask)
    ctx.num_old, ctx.num_pushed = inputs.to_slots.shape[0], len(inputs.pushed)
    ctx.options = inputs.num_slots, inputs.discipline, inputs.read, inputs.read_mask
    softmax: tuple[Tensor | None, ...] = (None, None, None)
    # additive: scores are up to 1e9, and one rounding of M between the two kernels changes them by 64
    if inputs.read == "global" and inputs.read_mask != "additive":
        softmax = tuple(map(_none_if_empty, (values, rest, log_total)))
    saved = (*inputs[:5], *softmax, *inputs.pushed, *inputs.pushed_logits)
    ctx.save_for_backward(*saved)  # type: ignore[arg-type]  # PyTorch accepts None


def _differentiate(ctx: FunctionCtx, *grads: Tensor | None) -> tuple:
    saved = ctx.saved_tensors
    given, pushed, pushed_logits = saved[:8], saved[8 : 8 + ctx.num_pushed], saved[8 + ctx.num_pushed :]
    to_read, to_action, to_entropy, *_, to_slots, to_mask = grads
    tensors = (*given[:5], list(pushed), list(pushed_logits), *given[5:], to_read, to_action, to_entropy)
    to_x, to_logits, to_query, *to_state = depth_step_backward(*tensors, to_slots, to_mask, ctx.num_old, *ctx.options)
    nothing = [None] * ctx.num_pushed
    query = None if given[2] is None else to_query
    return to_x, to_logits, query, None, None, nothing, nothing, *to_state, None, None, None, None, None


depth_step.register_autograd(_differentiate, setup_context=_save_for_backward)


def _none_if_empty(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.numel() else None
