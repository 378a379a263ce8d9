"""Launch the Triton kernels of the depth step: tile sizes, compile-time options, tensors and grid.

Triton accepts NamedTuples of tensors and, as one `tl.constexpr`, a NamedTuple of options. The kernels call it
`settings`, because a kernel with a parameter named `options` cannot be launched: Triton's launcher has one itself.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stackexp.stack.eager import get_empty_score

ELEMENTS_PER_THREAD = 4  # of a tile: 8 bytes of bfloat16 in one load, 16 of float32; more for rows past 128
MAX_ELEMENTS_PER_THREAD = 16


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
    is_stored: bool  # whether the new stack is


class StepOptions(NamedTuple):
    """The compile-time options of a depth step."""

    heads: int
    head_dim: int
    num_actions: int
    tokens: int  # of one program
    group: int  # heads of one program, a power of two
    padded_dim: int  # D, a power of two
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
    kernel = _load_kernel(name, x.device)
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
        "enable_fp_fusion": False,  # see `depth_step_math`
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


def _load_kernel(name: str, device: torch.device) -> Any:
    from triton.runtime import JITFunction

    from stackexp.stack.triton import depth_step_kernels

    kernel = getattr(depth_step_kernels, name)
    if device.type != "cuda" and isinstance(kernel, JITFunction):
        raise ValueError(
            f"stack implementation triton: the kernels do not run on {device.type}; use CUDA, another implementation, "
            "or set TRITON_INTERPRET=1 in the environment"
        )
    return kernel
