"""The differentiable stack: `step` for one layer of the depth axis, `scan` along the tokens. Both update, then read.

Create a state with `empty` and pass it from call to call; its contents are private to the implementation. `dispatch`
chooses the implementation. `reference` is the specification, against which all others are tested.

Computation runs in float32, or in float64 for float64 inputs, also under autocast. The state has the same dtype, except
that the Triton depth step may store it in 16 bits.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from stackexp.stack import dispatch
from stackexp.stack.dispatch import IMPLEMENTATIONS, use_implementation
from stackexp.stack.reference import StackOutput, StackState
from stackexp.stack.triton import coefficients, depth_step
from stackexp.stack.triton.coefficients import CoefficientState
from stackexp.stack.triton.depth_step import DepthState

__all__ = ["IMPLEMENTATIONS", "StackOutput", "StackState", "empty", "scan", "step", "use_implementation", "widen"]


def empty(
    shape: tuple[int, ...],
    num_slots: int,
    head_dim: int,
    like: Tensor,
    axis: str = "time",
    dtype: torch.dtype | None = None,
    num_updates: int | None = None,
) -> StackState | DepthState | CoefficientState:
    """Return empty stacks for the leading dimensions `shape` (heads included), on the device of `like`.

    Args:
        shape: [..., H]; on the depth axis [B, T, H].
        num_slots: S.
        head_dim: D.
        like: A tensor with the dtype of the pushed vectors.
        axis: "depth" for a state that `step` updates, "time" for one that `scan` updates.
        dtype: The storage dtype of the Triton depth step; by default that of `like`. Ignored elsewhere.
        num_updates: The number of steps that follow, if it is known. Only then can the Triton depth step use the
            coefficient form; see `triton/coefficients.py`.
    """
    module, empty_like = dispatch.choose_state_module(like, axis), like[..., :0]  # only its device and dtype matter
    if module is not depth_step:
        return module.empty(shape, num_slots, head_dim, widen(empty_like))
    if num_updates and dispatch.uses_coefficients(like, num_updates, num_slots, head_dim):
        return coefficients.empty(shape, num_slots, head_dim, empty_like, num_updates, dtype)
    return depth_step.empty(shape, num_slots, head_dim, empty_like, dtype=dtype)


def step(
    state: StackState | DepthState | CoefficientState,
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    checkpoint_every: int | None = None,
    empty_score: Tensor | None = None,
    **options: Any,
) -> tuple[StackOutput, Any]:
    """Update and read every stack once; return the outputs and the next state.

    Args:
        state: From `empty(axis="depth")` or the previous step.
        x: Pushed vectors [..., H, D]; on the depth axis [B, T, H, D].
        logits: Action logits [..., H, 3] for push, pop, no-op; [..., H, 2] for push and no-op with `push_only`.
        query: w_g [H, D], or None for `read: top`.
        checkpoint_every: Layers between stored stacks in the Triton depth step. It does not change any result.
        empty_score: Score [H] of another slot, which is always empty. Only plain PyTorch supports it; the state must
            come from `empty(axis="time")`.
        options: num_slots, discipline, read, read_mask; see `reference.step`.
    """
    with torch.autocast(x.device.type, enabled=False):
        if isinstance(state, CoefficientState):
            dispatch.log_once(logging.INFO, "stack implementation: triton, in coefficient form")
            return coefficients.step(state, x, logits, query, **options)
        if isinstance(state, DepthState):
            dispatch.log_once(logging.INFO, "stack implementation: triton")
            if checkpoint_every is not None:
                options["checkpoint_every"] = checkpoint_every
            return depth_step.step(state, x, logits, query, **options)
        if empty_score is not None:
            module = dispatch.choose_plain_module()
            options["empty_score"] = widen(empty_score)
        else:
            module = dispatch.choose_step_module(x)
        return module.step(state, widen(x), widen(logits), None if query is None else widen(query), **options)


def scan(
    state: StackState,
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    feedback: tuple[Tensor, ...] | None = None,
    **options: str | int,
) -> tuple[StackOutput, StackState]:
    """Apply `step` to the tokens, one after the other; return the outputs [B, T, H, ...] and the last state.

    Under torch.compile the loop is unrolled, so the compile time grows with T; a warning is logged.

    Args:
        state: From `empty(axis="time")` or the previous scan.
        x: Pushed vectors [B, T, H, D]. With T = 0 the state is returned unchanged.
        logits: Action logits [B, T, H, 3], or [B, T, H, 2] with `push_only`.
        query: w_g [H, D], or None for `read: top`.
        feedback: (P, Q) or (P, Q, V, c); see `feedback.scan_tokens`.
        options: num_slots, discipline, read, read_mask, feedback_activation.
    """
    if x.shape[1] == 0:
        x = widen(x.detach())
        zeros = x.new_zeros(x.shape[:3])
        return StackOutput(x, x.new_zeros(*x.shape[:3], 3), entropy=zeros, occupancy=zeros), state
    with torch.autocast(x.device.type, enabled=False):
        feedback = feedback and tuple(map(widen, feedback))
        query = None if query is None else widen(query)
        module = dispatch.choose_scan_module(x)
        return module.scan(state, widen(x), widen(logits), query, feedback=feedback, **options)


def widen(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
