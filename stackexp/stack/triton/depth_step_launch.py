"""Launch the Triton kernels of the depth step: tile sizes, compile-time options and grid."""

from typing import Any

import torch
from torch import Tensor

from stackexp.stack.eager import empty_score
from stackexp.stack.triton.arguments import StepBackward, StepForward, StepOptions

ELEMENTS_PER_THREAD = 4  # of a tile: 8 bytes of bfloat16 in one load, 16 of float32; more for rows past 128
MAX_ELEMENTS_PER_THREAD = 16
MAX_PROGRAMS = 2**14  # of the backward pass: their parts of the gradient of w_g stay in the L2 cache


def launch(
    name: str,
    xs: tuple[Tensor, ...],
    logits: tuple[Tensor, ...],
    tensors: StepForward | StepBackward,
    read_options: tuple[str, str, str],
    num_slots: int,
    **sizes: int,
) -> None:
    """Run the kernel `name` on all tokens and heads. `read_options`: discipline, read, read_mask."""
    x, num_occupied = xs[-1], tensors.slots.shape[0]
    programs, groups, _ = compute_grid(name, x)
    if programs == 0:
        return
    is_capped = num_occupied + len(xs) > num_slots
    dtype = torch.promote_types(x.dtype, tensors.mask.dtype)
    options = make_options(x.shape[-2:], logits[-1].shape[-1], dtype, read_options, is_capped)
    kernel = _load_kernel(name, x.device)
    with torch.cuda.device_of(x):
        kernel[(programs, groups)](
            tuple(_make_contiguous(xs)),
            tuple(_make_contiguous(logits)),
            type(tensors)(*_make_contiguous(tensors)),
            num_tokens=x.shape[:-2].numel(),
            num_occupied=num_occupied,
            num_slots=num_slots,
            **sizes,
            options=options,
            **compiler_options(x.shape[-1]),
        )


def make_options(
    head_shape: tuple[int, ...],
    num_actions: int,
    dtype: torch.dtype,
    read_options: tuple[str, str, str],
    is_capped: bool,
) -> StepOptions:
    """Return the compile-time options. `head_shape`: H and D; `read_options`: discipline, read, read_mask."""
    import triton.language as tl

    heads, head_dim = head_shape
    tokens, group, padded_dim = compute_tile(heads, head_dim)
    discipline, read, read_mask = read_options
    return StepOptions(
        heads=heads,
        head_dim=head_dim,
        num_actions=num_actions,
        tokens=tokens,
        group=group,
        padded_dim=padded_dim,
        discipline=discipline,
        read=read,
        read_mask=read_mask,
        is_capped=is_capped,
        empty_score=empty_score(read_mask, dtype),
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
    """Return the tile elements of one thread, all of one row: each thread holds the probabilities and M of its row."""
    return min(max(min(ELEMENTS_PER_THREAD, padded), padded // 32), MAX_ELEMENTS_PER_THREAD)


def compute_grid(name: str, x: Tensor) -> tuple[int, int, int]:
    """Return the programs along the tokens and along the heads, and the blocks of tokens of each program."""
    (num_heads, head_dim), num_tokens = x.shape[-2:], x.shape[:-2].numel()
    tokens, group, _ = compute_tile(num_heads, head_dim)
    blocks, groups = -(-num_tokens // tokens), -(-num_heads // group)
    repeat = max(1, -(-blocks * groups // MAX_PROGRAMS)) if name == "backward" else 1
    return -(-blocks // repeat), groups, repeat


def round_up_to_power_of_2(size: int) -> int:
    """Return the smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def _make_contiguous(tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


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
