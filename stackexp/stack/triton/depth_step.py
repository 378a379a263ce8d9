"""The depth axis on CUDA: one kernel per layer, and one for its gradients.

Only every k-th layer stores its stack (`checkpoint_every`, k = 4). The layers between start from the last stored stack
and repeat the updates since then, from the pushed vectors and the action logits of those layers. They read H(D + 3)
numbers per layer instead of H n (D + 1), for n = min(l + 1, S) occupied slots at layer l. The backward pass does the
same. At 360m in bfloat16, a layer moves 3,270 bytes forward and 7,212 bytes backward per token; 4,200 of these are the
gradient of the stack (tests/stack_traffic.py computes them). A larger k saves little more.

Autograd carries the gradient of the stack from layer to layer as the gradient of two state tensors of the same shape,
which contain zeros and use no storage. So activation checkpointing of whole blocks keeps no stacks.

Computation runs in float32, or in float64 if x or the state has it. The contents are stored in the dtype given to
`empty`, M in at least float32. Each program stores its part of w_g's gradient in its own row, and the rows are summed
afterwards, so results are deterministic.

To torch.compile the kernels are opaque operators with fake implementations. An autograd.Function calls them, because
registered autograd formulas would take 110 µs more per layer, on the CPU. With TRITON_INTERPRET=1 in the environment,
steps run on a CPU, slowly.

Triton accepts NamedTuples of tensors and, as one `tl.constexpr`, a NamedTuple of options. The kernels call it
`settings`: Triton's launcher has a parameter named `options`, so a kernel cannot have one.
"""

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from stackexp.stack.eager import get_empty_score
from stackexp.stack.reference import StackOutput

ELEMENTS_PER_THREAD = 4  # of a tile: 8 bytes of bfloat16 in one load, 16 of float32; more for rows past 128
MAX_ELEMENTS_PER_THREAD = 16
MAX_SLOTS_AHEAD = 4  # loads in flight hide the latency of the memory
MAX_ELEMENTS_AHEAD = 16  # of a thread, in all slots that are loaded ahead; more would spill


class StepInputs(NamedTuple):
    """The arguments of the operator `depth_step`. Those from `slots` to `pushed_logits` are a `DepthState`."""

    x: Tensor  # [..., H, D]
    logits: Tensor  # [..., H, 3 or 2]
    query: Tensor | None  # [H, D]; None for `read: top`
    slots: Tensor
    mask: Tensor
    to_slots: Tensor
    to_mask: Tensor
    pushed: list[Tensor]
    pushed_logits: list[Tensor]
    num_slots: int
    discipline: str
    read: str
    read_mask: str
    is_stored: bool  # whether the new stack is stored


class StepOptions(NamedTuple):
    """The compile-time options of a depth step."""

    heads: int
    head_dim: int
    num_actions: int
    tokens: int  # of one program
    group: int  # heads of one program, a power of two
    padded_dim: int  # D, a power of two
    slots_ahead: int  # loaded before their use, in the loops that visit the slots
    discipline: str
    read: str
    read_mask: str
    empty_score: float
    tiny: float  # the smallest normal number
    dtype: Any  # of the computation


class StepForward(NamedTuple):
    """The tensors of a depth step. Optional outputs are None if they are not needed."""

    query: Any  # [H, D]
    slots: Any  # V_0 [num_occupied, tokens, H, D]
    mask: Any  # [num_occupied, tokens, H]
    read: Any  # out [tokens, H, D]
    action: Any  # out [tokens, H, 3]
    entropy: Any  # out [tokens, H]
    occupancy: Any  # out [tokens, H]
    rest: Any  # out [tokens, H, D], the rounding error of `read`; or None
    log_total: Any  # out [tokens, H], log of the sum of exp(score); or None
    new_slots: Any  # out [num_new, tokens, H, D], or None
    new_mask: Any  # out [num_new, tokens, H], or None


class StepBackward(NamedTuple):
    """The tensors of the gradient of a depth step. Each incoming gradient may be None."""

    query: Any
    slots: Any
    mask: Any
    read: Any  # with rest and log_total as above, or all None to compute the softmax again
    rest: Any
    log_total: Any
    grad_read: Any  # [tokens, H, D]
    grad_action: Any  # [tokens, H, 3]
    grad_entropy: Any  # [tokens, H]
    grad_slots: Any  # of St' [num_new, tokens, H, D]
    grad_mask: Any  # [num_new, tokens, H]
    to_x: Any  # out [tokens, H, D]
    to_logits: Any  # out [tokens, H, 3 or 2]
    to_query: Any  # out [programs, H, D], to be summed; None for `read: top`
    to_slots: Any  # out, of St [num_old, tokens, H, D]
    to_mask: Any  # out [num_old, tokens, H]


def launch(name: str, inputs: StepInputs, tensors: StepForward | StepBackward, **sizes: int) -> None:
    """Run the kernel `name` on all tokens and heads."""
    x, grid = inputs.x, compute_grid(inputs.x)
    if grid[0] == 0:
        return
    kernel = load_kernel(f"depth_step_{name}", name, x.device)
    with torch.cuda.device_of(x):
        kernel[grid](
            (*inputs.pushed, x),
            (*inputs.pushed_logits, inputs.logits),
            type(tensors)(*(tensor if tensor is None else tensor.contiguous() for tensor in tensors)),
            num_tokens=x.shape[:-2].numel(),
            num_occupied=inputs.slots.shape[0],
            num_slots=inputs.num_slots,
            **sizes,
            settings=make_options(inputs),
            **compiler_options(x.shape[-1]),
            maxnreg=255 if name == "backward" else None,  # otherwise ptxas spills some, for more programs at once
        )


def make_options(inputs: StepInputs) -> StepOptions:
    """Return the compile-time options."""
    import triton.language as tl

    heads, head_dim = inputs.x.shape[-2:]
    tokens, group, padded_dim = compute_tile(heads, head_dim)
    dtype = torch.promote_types(inputs.x.dtype, inputs.mask.dtype)
    return StepOptions(
        heads=heads,
        head_dim=head_dim,
        num_actions=inputs.logits.shape[-1],
        tokens=tokens,
        group=group,
        padded_dim=padded_dim,
        slots_ahead=min(MAX_SLOTS_AHEAD, MAX_ELEMENTS_AHEAD // _elements_per_thread(padded_dim)),
        discipline=inputs.discipline,
        read=inputs.read,
        read_mask=inputs.read_mask,
        empty_score=get_empty_score(inputs.read_mask, dtype),
        tiny=torch.finfo(dtype).tiny,
        dtype=tl.float64 if dtype == torch.float64 else tl.float32,
    )


def compute_tile(num_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Return the tokens and heads of one program, and the padded D."""
    padded = round_up_to_power_of_2(head_dim)
    elements = compiler_options(head_dim)["num_warps"] * 32 * _elements_per_thread(padded)
    group = min(round_up_to_power_of_2(num_heads), elements // padded)
    return elements // padded // group, group, padded


def compiler_options(head_dim: int) -> dict[str, int]:
    """Return Triton's compiler options. A row of a tile lies within one warp if it fits."""
    padded = round_up_to_power_of_2(head_dim)
    return {
        "num_warps": max(1, padded // (32 * _elements_per_thread(padded))),  # several warps need barriers
        "num_stages": 1,  # the kernels load ahead by themselves
        "enable_fp_fusion": False,  # see `depth_step_pipeline`
    }


def _elements_per_thread(padded: int) -> int:
    """Return the tile elements of one thread, all in one row, because a thread holds the actions and M of its row."""
    return min(max(min(ELEMENTS_PER_THREAD, padded), padded // 32), MAX_ELEMENTS_PER_THREAD)


def compute_grid(x: Tensor) -> tuple[int, int]:
    """Return the programs along the tokens and along the heads."""
    num_heads, head_dim = x.shape[-2:]
    tokens, group, _ = compute_tile(num_heads, head_dim)
    return -(-x.shape[:-2].numel() // tokens), -(-num_heads // group)


def round_up_to_power_of_2(size: int) -> int:
    """Return the smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def load_kernel(module: str, name: str, device: torch.device) -> Any:
    """Return a kernel of a module of this package. Raises ValueError if it cannot run on the device."""
    from triton.runtime import JITFunction

    kernel = getattr(importlib.import_module(f"stackexp.stack.triton.{module}"), name)
    if device.type != "cuda" and isinstance(kernel, JITFunction):
        raise ValueError(
            f"stack implementation triton: the kernels do not run on {device.type}; use CUDA, another implementation, "
            "or set TRITON_INTERPRET=1 in the environment"
        )
    return kernel


CHECKPOINT_EVERY = 4  # k


class DepthState(NamedTuple):
    """The last stored stack and the updates since then; n = min(updates, S) slots, and `...` is [B, T]."""

    slots: Tensor  # stored contents, V_0 [n_0, ..., H, D]; only to_slots and to_mask have gradients
    mask: Tensor  # M of V_0 [n_0, ..., H], in float32 at least
    to_slots: Tensor  # [n, ..., H, D], zeros without storage, which carry the gradient of the contents
    to_mask: Tensor  # [n, ..., H], the same for M
    pushed: list[Tensor]  # x of each layer since [..., H, D]
    logits: list[Tensor]  # of each layer since [..., H, 3 or 2]


def empty(
    shape: tuple[int, ...], num_slots: int, head_dim: int, like: Tensor, dtype: torch.dtype | None = None
) -> DepthState:
    """Return empty stacks for the leading dimensions `shape` (heads included), stored in `dtype` or as `like`."""
    slots = like.new_empty((0, *shape, head_dim), dtype=dtype)
    mask = slots.new_empty((0, *shape), dtype=torch.promote_types(slots.dtype, torch.float32))
    return DepthState(slots, mask, slots.clone(), mask.clone(), [], [])  # compiled autograd takes no tensor twice


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
    given = (x, logits, query if read == "global" else None, *state[:4], *state.pushed, *state.logits)
    outputs = _Step.apply((num_slots, discipline, read, read_mask, is_stored), *given)
    slots, mask, to_slots, to_mask = outputs[-4:]
    if is_stored:
        state = DepthState(slots, mask, to_slots, to_mask, [], [])
    else:
        pushed, pushed_logits = [*state.pushed, x.detach()], [*state.logits, logits.detach()]
        state = DepthState(state.slots, state.mask, to_slots, to_mask, pushed, pushed_logits)
    return StackOutput(*outputs[:4]), state


INPUTS = (
    "Tensor x, Tensor logits, Tensor? query, Tensor slots, Tensor mask, Tensor to_slots, Tensor to_mask, "
    "Tensor[] pushed, Tensor[] pushed_logits, int num_slots, str discipline, str read, str read_mask, bool is_stored"
)


@torch.library.custom_op(
    "stackexp::depth_step", mutates_args=(), schema=f"({INPUTS}) -> ({', '.join(['Tensor'] * 10)})"
)
def depth_step(*args) -> tuple[Tensor, ...]:
    """Return R, a, its entropy, occupancy, rest, log_total, and the new slots, mask, to_slots, to_mask.

    rest [..., H, D] is the rounding error of R in the dtype of x, log_total [..., H] the log of the softmax
    denominator. Outputs that are not needed have no elements.
    """
    inputs = StepInputs(*args)
    outputs = _allocate_outputs(inputs)
    tensors = StepForward(inputs.query, inputs.slots, inputs.mask, *map(_none_if_empty, outputs[:8]))
    launch("forward", inputs, tensors, num_new=outputs[-1].shape[0])
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


@torch.library.custom_op(
    "stackexp::depth_step_backward",
    mutates_args=(),
    schema=f"({INPUTS}, Tensor?[] softmax, Tensor?[] grads) -> ({', '.join(['Tensor'] * 5)})",
)
def depth_step_backward(*args) -> tuple[Tensor, ...]:
    """Return the gradients of x, logits, query, and of the contents and M before.

    The gradient of the query has one row per block of tokens, or no elements for `read: top`. `softmax`: R, rest
    and log_total, or three times None to compute the softmax again. `grads`: those of R, a, the entropy, and the new
    contents and M; each may be None.
    """
    inputs, softmax, grads = StepInputs(*args[:-2]), args[-2], args[-1]
    outputs = _allocate_gradients(inputs)
    given = (inputs.query, inputs.slots, inputs.mask, *softmax, *grads)
    tensors = StepBackward._make((*given, *outputs[:2], _none_if_empty(outputs[2]), *outputs[3:]))
    num_old = len(outputs[-1])
    launch("backward", inputs, tensors, num_old=num_old, num_new=min(num_old + 1, inputs.num_slots))
    return outputs


@depth_step_backward.register_fake
def _(*args) -> tuple[Tensor, ...]:
    return _allocate_gradients(StepInputs(*args[:-2]))


def _allocate_gradients(inputs: StepInputs) -> tuple[Tensor, ...]:
    x, query = inputs.x, inputs.query
    to_query = x.new_empty(0)
    if query is not None:
        dtype = torch.promote_types(x.dtype, inputs.mask.dtype)
        to_query = query.new_empty((compute_grid(x)[0], *query.shape), dtype=dtype)
    return (
        x.new_empty(x.shape),
        inputs.logits.new_empty(inputs.logits.shape),
        to_query,
        inputs.slots.new_empty(inputs.to_slots.shape),
        inputs.mask.new_empty(inputs.to_mask.shape),
    )


class _Step(torch.autograd.Function):
    """The step with gradients of x, logits, query, to_slots and to_mask."""

    @staticmethod
    def forward(ctx: FunctionCtx, options: tuple, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Return the outputs of `depth_step`. Its arguments are `tensors`, in two lists at the end, and `options`."""
        outputs = depth_step(*_group_updates(tensors), *options)
        values, _, _, occupancy, rest, log_total, new_slots, new_mask, _, _ = outputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(occupancy, rest, log_total, new_slots, new_mask)
        softmax: tuple[Tensor | None, ...] = (None, None, None)
        _, _, read, read_mask, _ = options
        # additive: scores are up to 1e9, and one rounding of M between the two kernels changes them by 64
        if read == "global" and read_mask != "additive":
            softmax = tuple(map(_none_if_empty, (values, rest, log_total)))
        ctx.options = options
        ctx.save_for_backward(*softmax, *tensors)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        softmax, tensors = list(saved[:3]), saved[3:]
        given = [grad if grad is None else grad.contiguous() for grad in (*grads[:3], *grads[-2:])]
        to_x, to_logits, to_query, *to_state = depth_step_backward(
            *_group_updates(tensors), *ctx.options, softmax, given
        )
        query = tensors[2]
        to_query = None if query is None else to_query.sum(0).to(query.dtype)
        return None, to_x, to_logits, to_query, None, None, *to_state, *[None] * len(tensors[7:])


def _group_updates(tensors: tuple[Tensor | None, ...]) -> tuple:
    """Return the arguments of the operators up to `pushed_logits`: the updates since V_0 become two lists."""
    updates = tensors[7:]
    half = len(updates) // 2
    return *tensors[:7], list(updates[:half]), list(updates[half:])


def _none_if_empty(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.numel() else None
