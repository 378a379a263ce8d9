"""The depth axis as one kernel a layer for CUDA, and one for its gradients. Values and gradients as `reference`.

No stack is written and read between the layers. Every k-th stack is stored (`checkpoint_every`, k = 4). A layer in
between starts from the last stored stack and repeats the updates since then, from the pushed vectors and the action
logits of those layers: H(d_s + 3) numbers a layer instead of H n (d_s + 1), for n = min(l + 1, S) occupied slots at
layer l. So does its backward pass.

Forward, a layer reads the kept stack, and x and the logits of up to k layers; it writes R, a, entropy, occupancy, what
the gradients need (16 bits that R lost in rounding to bfloat16, and the log of the softmax's sum) and, if it is a
k-th layer, its stack. Backward it reads the same, R, and the gradients to R and to the stack, and writes those to x, to
the logits and to the stack before. The part of w_g's gradient that a program has is its own row, summed afterwards:
nothing is added atomically, and a second run is the same to the bit.

Of the gradient to the stack one is read and one written by each layer: it cannot be rebuilt. Autograd carries it from
layer to layer as the gradient to two tensors of the state that have its shape, hold zeros, and take no storage: the
values of a stack and the way back to it are apart. Recomputing whole blocks (activation checkpointing) keeps no stacks
either, therefore: a block is given the kept one, which others have too, some x and logits, and these zeros.

Bytes per token and layer, mean over the 32 layers of 360m, H = 4, d_s = 16, S = 24 (`traffic`):

                                              forward   backward   kept for the backward pass
    stack read and written once, bfloat16       4,080          -
    k = 1 (each layer's is kept)                4,824      7,146     2,638
    k = 2                                       3,766      7,168     1,558
    k = 4                                       3,270      7,212     1,018    of which x and R are there anyway: 256
    k = 8                                       3,088      7,300       748
    k = 4, float32                              5,906     13,440     1,698

4,200 of the 7,212 are the gradient to the stack. Above k = 4 little is saved, and arithmetic and registers grow with k.
At an H100's 3.35 TB/s k = 4 is 3.1 ns a token and layer, 1.5 % of what the Transformer takes at 45 % of the card's peak
(205 ns). Compiled for it (Triton 3.6), a warp has for one slot of 8 stacks 93 to 149 instructions forward and 194 to
231 backward, 2.8 ns a token and layer at full rate: bandwidth and arithmetic are near balance, and overlap only in
part. Nothing here has been measured on a GPU yet.

Everything is computed in float32, or float64 where x or the state is; contents are stored as `empty` is told,
rounded only in what is kept; M always in float32 at least. The kernels are opaque operators to torch.compile, with fake
and autograd implementations; no size depends on data, nothing waits for the device. Triton is imported by the first
step. With TRITON_INTERPRET=1 in the environment before, steps run on a CPU, slowly.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from stackexp.stack.eager import empty_score
from stackexp.stack.reference import StackOutput

SEGMENT = 4  # k
NUMBERS_PER_THREAD = 4  # of a tile: of bfloat16 8 bytes to load at once, of float32 16; more for rows past 128
MOST_NUMBERS_PER_THREAD = 16
MOST_PROGRAMS = 2**14  # of the backward pass: what they have of the gradient to w_g stays in the L2 cache


class DepthState(NamedTuple):
    """A state as the last one kept and what has come since. n = min(updates so far, S) slots; `...` is [B, T]."""

    slots: Tensor  # contents kept, V_0 [n_0, ..., H, D]; this, and all but the last two, has no gradient
    mask: Tensor  # M of V_0 [n_0, ..., H], in float32 at least
    pushed: list[Tensor]  # x of each layer since [..., H, D]
    logits: list[Tensor]  # of each layer since [..., H, 3 or 2]
    to_slots: Tensor  # [n, ..., H, D], zeros without storage, whose gradient is that to the contents
    to_mask: Tensor  # [n, ..., H], the same for M


def empty(
    shape: tuple[int, ...], num_slots: int, head_dim: int, like: Tensor, dtype: torch.dtype | None = None
) -> DepthState:
    """Empty stacks for leading dimensions `shape`, heads included, to be stored in `dtype`, else as `like`."""
    slots = like.new_empty((0, *shape, head_dim), dtype=dtype)
    mask = slots.new_empty((0, *shape), dtype=_wide(slots, like.new_empty(0, dtype=torch.float32)))
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
    checkpoint_every: int = SEGMENT,
) -> tuple[StackOutput, DepthState]:
    """As `reference.step`, of x, logits and query in any dtypes; the read has that of x. `checkpoint_every` is k."""
    x, logits = x.contiguous(), logits.contiguous()
    is_kept = len(state.pushed) + 1 >= checkpoint_every
    options = (num_slots, discipline, read, read_mask)
    outputs = depth_step(x, logits, query if read == "global" else None, *state, *options, is_kept)
    slots, mask, to_slots, to_mask = outputs[-4:]
    kept = slots, mask, [], []
    if not is_kept:
        kept = *state[:2], [*state.pushed, x.detach()], [*state.logits, logits.detach()]
    return StackOutput(*outputs[:4]), DepthState(*kept, to_slots, to_mask)


STATE = "Tensor slots, Tensor mask, Tensor[] pushed, Tensor[] pushed_logits"


@torch.library.custom_op(
    "stackexp::depth_step",
    mutates_args=(),
    schema=f"(Tensor x, Tensor logits, Tensor? query, {STATE}, Tensor to_slots, Tensor to_mask, int num_slots, "
    f"str discipline, str read, str read_mask, bool is_kept) -> ({', '.join(['Tensor'] * 10)})",
)
def depth_step(
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    slots: Tensor,  # this, and those that follow: `DepthState`
    mask: Tensor,
    pushed: list[Tensor],
    pushed_logits: list[Tensor],
    to_slots: Tensor,
    to_mask: Tensor,
    num_slots: int,
    discipline: str,
    read: str,
    read_mask: str,
    is_kept: bool,  # whether the new state is
) -> tuple[Tensor, ...]:
    """R, a, its entropy, occupancy; for the gradients rest, log_total; the new slots, mask, to_slots, to_mask.

    rest [..., H, D] is what R lost in rounding to the dtype of x; log_total [..., H] the log of the softmax's sum. What
    is not needed, slots and mask of a state that is not kept too, has no elements.
    """
    outputs = _outputs(x, slots, mask, to_slots, num_slots, read, is_kept)
    tensors = ((*pushed, x), (*pushed_logits, logits), query, slots, mask, *map(_if_any, outputs[:8]))
    _launch("forward", tensors, (num_slots, discipline, read, read_mask), {"num_new": outputs[-1].shape[0]})
    return outputs


@depth_step.register_fake
def _(x, logits, query, slots, mask, pushed, pushed_logits, to_slots, to_mask, num_slots, discipline, read, *last):
    return _outputs(x, slots, mask, to_slots, num_slots, read, is_kept=last[-1])


def _outputs(
    x: Tensor, slots: Tensor, mask: Tensor, to_slots: Tensor, num_slots: int, read: str, is_kept: bool
) -> tuple[Tensor, ...]:
    stacks, dtype = x.shape[:-1], _wide(x, mask)
    num_new = min(to_slots.shape[0] + 1, num_slots)
    num_kept = num_new if is_kept else 0
    rounded = read == "global" and x.dtype != dtype
    return (
        x.new_empty(x.shape),
        *(x.new_empty(shape, dtype=dtype) for shape in ((*stacks, 3), stacks, stacks)),
        x.new_empty(x.shape if rounded else 0),
        x.new_empty(stacks if read == "global" else 0, dtype=dtype),
        slots.new_empty((num_kept, *x.shape)),
        mask.new_empty((num_kept, *stacks)),
        slots.new_zeros(()).expand(num_new, *x.shape),
        mask.new_zeros(()).expand(num_new, *stacks),
    )


@torch.library.custom_op(
    "stackexp::depth_step_backward",
    mutates_args=(),
    schema=f"(Tensor x, Tensor logits, Tensor? query, {STATE}, Tensor? values, Tensor? rest, Tensor? log_total, "
    "Tensor? grad_read, Tensor? grad_action, Tensor? grad_entropy, Tensor? grad_slots, Tensor? grad_mask, int num_old, "
    f"int num_slots, str discipline, str read, str read_mask) -> ({', '.join(['Tensor'] * 5)})",
)
def depth_step_backward(
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    slots: Tensor,
    mask: Tensor,
    pushed: list[Tensor],
    pushed_logits: list[Tensor],
    values: Tensor | None,  # R; this, rest and log_total are None where the softmax is to be made again
    rest: Tensor | None,
    log_total: Tensor | None,
    grad_read: Tensor | None,
    grad_action: Tensor | None,
    grad_entropy: Tensor | None,
    grad_slots: Tensor | None,
    grad_mask: Tensor | None,
    num_old: int,  # slots of the state before
    num_slots: int,
    discipline: str,
    read: str,
    read_mask: str,
) -> tuple[Tensor, ...]:
    """The gradients to x, logits, query (none for `read: top`: no elements), and to the contents and M before."""
    to_x, to_logits, to_query, *to_state = _gradients(x, logits, query, slots, mask, num_old)
    programs, _, repeat = grid("backward", x)
    parts = None if query is None else query.new_empty((programs, *query.shape), dtype=_wide(x, mask))
    gradients = (grad_read, grad_action, grad_entropy, grad_slots, grad_mask)
    tensors = ((*pushed, x), (*pushed_logits, logits), query, slots, mask, values, rest, log_total, *gradients)
    sizes = {"num_old": num_old, "num_new": min(num_old + 1, num_slots), "repeat": repeat}
    _launch("backward", (*tensors, to_x, to_logits, parts, *to_state), (num_slots, discipline, read, read_mask), sizes)
    return to_x, to_logits, to_query if parts is None else parts.sum(0).to(query.dtype), *to_state


@depth_step_backward.register_fake
def _(x, logits, query, slots, mask, *others):
    return _gradients(x, logits, query, slots, mask, num_old=others[-5])


def _gradients(
    x: Tensor, logits: Tensor, query: Tensor | None, slots: Tensor, mask: Tensor, num_old: int
) -> tuple[Tensor, ...]:
    return (
        x.new_empty(x.shape),
        logits.new_empty(logits.shape),
        x.new_empty(0) if query is None else query.new_empty(query.shape),
        slots.new_empty((num_old, *x.shape)),
        mask.new_empty((num_old, *x.shape[:-1])),
    )


def _remember(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, logits, query, slots, mask, pushed, pushed_logits, to_slots, _, *ctx.options, _ = inputs
    values, _, _, occupancy, rest, log_total, new_slots, new_mask, _, _ = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(occupancy, rest, log_total, new_slots, new_mask)
    ctx.num_old, ctx.num_pushed = to_slots.shape[0], len(pushed)
    _, _, read, read_mask = ctx.options
    softmax = map(_if_any, (values, rest, log_total)) if _remembers(read, read_mask) else (None, None, None)
    ctx.save_for_backward(x, logits, query, slots, mask, *softmax, *pushed, *pushed_logits)


def _remembers(read: str, read_mask: str) -> bool:
    """Whether the backward pass gets the softmax's sum from the forward pass.

    Scores of the additive mask are up to 1e9, and M in two kernels may differ by a rounding: by 64 in such a score.
    """
    return read == "global" and read_mask != "additive"


def _differentiate(ctx: FunctionCtx, *grads: Tensor | None) -> tuple:
    saved = ctx.saved_tensors
    given, pushed, pushed_logits = saved[:8], saved[8 : 8 + ctx.num_pushed], saved[8 + ctx.num_pushed :]
    to_read, to_action, to_entropy, *_, to_slots, to_mask = grads
    tensors = (
        *given[:5],
        list(pushed),
        list(pushed_logits),
        *given[5:],
        to_read,
        to_action,
        to_entropy,
        to_slots,
        to_mask,
    )
    to_x, to_logits, to_query, *to_state = depth_step_backward(*tensors, ctx.num_old, *ctx.options)
    nothing = [None] * ctx.num_pushed
    query = None if given[2] is None else to_query
    return to_x, to_logits, query, None, None, nothing, nothing, *to_state, None, None, None, None, None


depth_step.register_autograd(_differentiate, setup_context=_remember)


def _launch(name: str, tensors: tuple, how: tuple[int, str, str, str], sizes: dict[str, int]) -> None:
    """Run the kernel `name` of `triton_depth_kernels` on as many programs as the tokens and heads need."""
    (*_, x), (*_, logits), _, slots, mask = tensors[:5]
    num_slots, *options = how
    capped = slots.shape[0] + len(tensors[0]) > num_slots
    made_for = constants(*x.shape[-2:], logits.shape[-1], _wide(x, mask), options, capped)
    programs, groups, _ = grid(name, x)
    if programs == 0:
        return
    kernel = _kernel(name, x.device)
    with torch.cuda.device_of(x):
        kernel[(programs, groups)](
            *map(_contiguous, tensors),
            num_tokens=x.shape[:-2].numel(),
            num_occupied=slots.shape[0],
            num_slots=num_slots,
            **sizes,
            **made_for,
            **compiler_options(x.shape[-1]),
        )


def constants(
    num_heads: int, head_dim: int, num_actions: int, dtype: torch.dtype, options: list[str], capped: bool
) -> dict[str, object]:
    """What both kernels are compiled for: their `tl.constexpr` arguments. `options`: discipline, read, read_mask."""
    import triton.language as tl

    discipline, read, read_mask = options
    return tile(num_heads, head_dim) | {
        "HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "NUM_ACTIONS": num_actions,
        "DISCIPLINE": discipline,
        "READ": read,
        "READ_MASK": read_mask,
        "CAPPED": capped,
        "EMPTY": empty_score(read_mask, dtype),
        "TINY": torch.finfo(dtype).tiny,
        "DTYPE": tl.float64 if dtype == torch.float64 else tl.float32,
    }


def tile(num_heads: int, head_dim: int) -> dict[str, int]:
    """TOKENS and GROUP heads that a program takes at once, and D."""
    padded = _power_of_2(head_dim)
    numbers = compiler_options(head_dim)["num_warps"] * 32 * _per_thread(padded)
    group = min(_power_of_2(num_heads), numbers // padded)
    return {"TOKENS": numbers // padded // group, "GROUP": group, "D": padded}


def compiler_options(head_dim: int) -> dict[str, int]:
    """How Triton compiles the kernels: a row of a tile lies within a warp, if it can."""
    padded = _power_of_2(head_dim)
    return {
        "num_warps": max(1, padded // (32 * _per_thread(padded))),  # one, if it can: several need barriers
        "num_stages": 1,  # they load ahead by themselves
        "enable_fp_fusion": False,  # but what is spelled: see `triton_depth_math`
    }


def _per_thread(padded: int) -> int:
    """Numbers of a tile: of one row, whose probabilities and M every thread of the row has."""
    return min(max(min(NUMBERS_PER_THREAD, padded), padded // 32), MOST_NUMBERS_PER_THREAD)


def grid(name: str, x: Tensor) -> tuple[int, int, int]:
    """Programs along the tokens and along the heads, and how many blocks of tokens each takes in turn."""
    (num_heads, head_dim), num_tokens = x.shape[-2:], x.shape[:-2].numel()
    sizes = tile(num_heads, head_dim)
    blocks, groups = -(-num_tokens // sizes["TOKENS"]), -(-num_heads // sizes["GROUP"])
    repeat = max(1, -(-blocks * groups // MOST_PROGRAMS)) if name == "backward" else 1
    return -(-blocks // repeat), groups, repeat


def _wide(tensor: Tensor, mask: Tensor) -> torch.dtype:
    """What is computed in: float64 where either is, else float32; M is float32 or float64."""
    return torch.promote_types(tensor.dtype, mask.dtype)


def _contiguous(tensor: Tensor | tuple[Tensor, ...] | None) -> Tensor | tuple[Tensor, ...] | None:
    if tensor is None:
        return None
    return tensor.contiguous() if isinstance(tensor, Tensor) else tuple(map(_contiguous, tensor))


def _if_any(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.numel() else None


def _power_of_2(size: int) -> int:
    """The smallest that is not below `size`."""
    return 1 << (size - 1).bit_length()


def _kernel(name: str, device: torch.device) -> Any:
    from triton.runtime import JITFunction

    from stackexp.stack.triton import depth_step_kernels as triton_depth_kernels

    kernel = getattr(triton_depth_kernels, name)
    if device.type != "cuda" and isinstance(kernel, JITFunction):
        raise ValueError(
            f"Triton's kernels run on CUDA, not on {device.type}: take another implementation of the stack, "
            "or set TRITON_INTERPRET=1 in the environment"
        )
    return kernel
