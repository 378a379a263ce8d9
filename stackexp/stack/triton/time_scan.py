"""The scan over tokens on CUDA: one kernel, and one for its gradients.

The state and a single step are those of `eager`. The kernels compute in the dtype of x, float32 or float64, and hold
only the slots that the tokens can fill, min(n + T, S). For gradients, the forward pass saves the state before every
ceil(sqrt(T))-th token, and the backward pass recomputes the others: 2 sqrt(T) states instead of T.

The first scan imports Triton. With TRITON_INTERPRET=1 in the environment, scans run on a CPU, slowly.
"""

import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from stackexp.stack import eager, reference
from stackexp.stack import feedback as feedback_math
from stackexp.stack.eager import empty, step
from stackexp.stack.feedback import ACTIVATIONS
from stackexp.stack.reference import StackOutput, StackState
from stackexp.stack.triton.arguments import ScanBackward, ScanForward, ScanOptions

__all__ = ["empty", "scan", "step"]

MAX_WARPS = 8
ELEMENTS_PER_WARP = 512  # of a tile: 16 registers per thread for each tile of the backward pass; more would spill
MAP_BLOCK = 2048  # elements of P that a program multiplies at once


class ScanSettings(NamedTuple):
    """The options of one scan."""

    num_slots: int
    discipline: str
    read: str
    read_mask: str
    feedback_activation: str | None  # None: without feedback
    has_hidden: bool  # the feedback has a hidden layer
    interval: int  # tokens between saved states; 0: none are saved


def scan(
    state: StackState,
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    *,
    num_slots: int,
    discipline: str = "stack",
    read: str = "global",
    read_mask: str = "multiply",
    feedback: tuple[Tensor, ...] | None = None,
    feedback_activation: str = "identity",
) -> tuple[StackOutput, StackState]:
    """Scan the tokens; see `reference.scan`. All tensors have one dtype, float32 or float64."""
    num_tokens, occupied = x.shape[1], state.mask.shape[-1]
    assert occupied <= num_slots, (occupied, num_slots)
    assert feedback_activation in ACTIVATIONS, feedback_activation
    missing = min(occupied + num_tokens, num_slots) - occupied
    initial_read = eager.read_stack(state, query, read, read_mask, num_slots) if feedback else None
    tensors = (
        x,
        logits,
        query if read == "global" else None,
        F.pad(state.slots, (0, 0, 0, missing)),
        F.pad(state.mask, (0, missing)),
        *(*(feedback or ()), None, None, None, None)[:4],
        initial_read,
    )
    needs_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    interval = math.isqrt(num_tokens - 1) + 1 if needs_gradient else 0
    activation = feedback_activation if feedback else None
    hidden = feedback is not None and len(feedback) > 2
    options = ScanSettings(num_slots, discipline, read, read_mask, activation, hidden, interval)
    reads, occupancy, slots, mask, *fed_logits = _Scan.apply(*tensors, options)
    logits = fed_logits[0] if feedback else logits
    return StackOutput(
        reads, reference.compute_actions(logits), reference.compute_entropy(logits), occupancy
    ), StackState(slots, mask)


class _Scan(torch.autograd.Function):
    """The scan with gradients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,  # [B, T, H, D]
        logits: Tensor,  # [B, T, H, 3 or 2]
        query: Tensor | None,  # [H, D]
        slots: Tensor,  # [B, H, N, D]
        mask: Tensor,  # [B, H, N]
        feedback_x: Tensor | None,  # [m, H, D]
        feedback_logits: Tensor | None,  # [m, H, 3 or 2]
        from_read: Tensor | None,  # [m, H*D]; gated: 2 m
        fed_given: Tensor | None,  # [B, T, m]; gated: 2 m
        initial_read: Tensor | None,  # [B, H, D]
        options: ScanSettings,
    ) -> tuple[Tensor, ...]:
        """Return reads [B, T, H, D], occupancy [B, T, H], contents, mask; with feedback, also the changed logits."""
        inputs = (x, logits, query, slots, mask, feedback_x, feedback_logits, from_read, fed_given)
        given = [_contiguous(tensor) for tensor in inputs]
        x, logits, query, slots, mask, *feedback = given  # type: ignore[assignment]  # x to mask are tensors
        num_tokens = x.shape[1]
        reads, fed_x, fed_logits = torch.empty_like(x), x, logits
        if options.feedback_activation:
            reads = torch.cat([initial_read.unsqueeze(1), reads], 1)
            fed_x, fed_logits = torch.empty_like(x), torch.empty_like(logits)
        num_checkpoints = -(-num_tokens // options.interval) if options.interval else 0
        saved = [tensor.new_empty(num_checkpoints, *tensor.shape) for tensor in (slots, mask)]
        final = torch.empty_like(slots), torch.empty_like(mask)
        occupancy = x.new_empty(x.shape[:3])
        outputs = (reads, occupancy, *final, fed_x, fed_logits, *saved)
        _launch("forward", ScanForward(*given, *outputs), kept=slots.shape[2], settings=options)
        kept = (fed_x, fed_logits, query, *feedback, reads, *saved)
        ctx.save_for_backward(*kept)  # type: ignore[arg-type]  # PyTorch accepts None
        ctx.options = options
        ctx.mark_non_differentiable(occupancy)
        if options.feedback_activation:
            return reads[:, 1:], occupancy, *final, fed_logits
        return reads, occupancy, *final

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx,
        grad_read: Tensor,
        _: Tensor,
        grad_slots: Tensor,
        grad_mask: Tensor,
        grad_logits: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        x, logits, query, feedback_x, feedback_logits, from_read, fed_given, reads, *saved = ctx.saved_tensors
        options: ScanSettings = ctx.options
        fed = None
        autocast = torch.autocast(x.device.type, enabled=False)  # backward may be called under autocast
        if options.feedback_activation:
            last = reads[:, :-1].flatten(2)  # R_{t-1} [B, T, H*D]
            with autocast:
                fed = feedback_math.activate(last, options.feedback_activation, from_read, fed_given).contiguous()
        given = map(_contiguous, (grad_read, grad_logits, grad_slots, grad_mask))
        segment = [states.new_empty(options.interval, *states.shape[1:]) for states in saved]
        to_x, to_logits, to_slots, to_mask = map(torch.empty_like, (x, logits, saved[0][0], saved[1][0]))
        to_query, to_read = x.new_zeros(2, x.shape[0], *x.shape[2:])  # [B, H, D]
        to_given = None if from_read is None else torch.empty_like(fed_given)
        outputs = (to_x, to_logits, to_query, to_slots, to_mask, to_read, to_given)
        known = (x, logits, query, feedback_x, feedback_logits, from_read, fed, *saved)
        _launch(
            "backward",
            ScanBackward._make((*known, *given, *segment, *outputs)),
            kept=to_slots.shape[2],
            settings=options,
        )
        to_query = None if query is None else to_query.sum(0)
        to_feedback: tuple[Tensor | None, ...] = (None,) * 5
        if options.feedback_activation:
            assert fed is not None
            fed = feedback_math.multiply_gates(fed, options.feedback_activation)
            with autocast:
                to_maps = [torch.einsum("btm,bthd->mhd", fed, gradient) for gradient in (to_x, to_logits)]
                to_from_read = None if to_given is None else torch.einsum("btm,btk->mk", to_given, last)
            to_feedback = (*to_maps, to_from_read, to_given, to_read)
        return to_x, to_logits, to_query, to_slots, to_mask, *to_feedback, None


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None else tensor.contiguous()


def _launch(name: str, tensors: ScanForward | ScanBackward, kept: int, settings: ScanSettings) -> None:
    """Run the kernel `name`: one program per row and head, or per row with feedback. `kept`: N slots of S."""
    x, feedback_x = tensors.x, tensors.feedback_x
    assert {tensor.dtype for tensor in tensors if tensor is not None} == {x.dtype}, "one dtype"
    batch_size, num_tokens, num_heads, head_dim = x.shape
    units = num_heads * head_dim if feedback_x is None else len(feedback_x)
    options = make_options((num_heads, head_dim), tensors.logits.shape[-1], kept, units, x.dtype, settings)
    interval = settings.interval or num_tokens  # any value works without saved states
    num_checkpoints = -(-num_tokens // interval) if settings.interval else 0
    with torch.cuda.device_of(x):
        getattr(_kernels(), name)[(batch_size * (num_heads if options.activation is None else 1),)](
            tensors,
            num_tokens=num_tokens,
            kept=kept,
            num_empty=settings.num_slots - kept,
            interval=interval,
            num_checkpoints=num_checkpoints,
            options=options,
            **compiler_options(options),
        )


def make_options(
    head_shape: tuple[int, int], num_actions: int, kept: int, units: int, dtype: torch.dtype, settings: ScanSettings
) -> ScanOptions:
    """Return the compile-time options. `head_shape`: H and D; `kept`: N; `units`: m."""
    num_heads, head_dim = head_shape
    padded_width = _power_of_2(num_heads * head_dim)
    return ScanOptions(
        heads=num_heads,
        head_dim=head_dim,
        num_actions=num_actions,
        padded_heads=1 if settings.feedback_activation is None else _power_of_2(num_heads),
        padded_slots=_power_of_2(kept),
        padded_dim=_power_of_2(head_dim),
        discipline=settings.discipline,
        read=settings.read,
        read_mask=settings.read_mask,
        activation=settings.feedback_activation,
        has_hidden=settings.has_hidden,
        units=units,
        block=min(_power_of_2(units), max(1, MAP_BLOCK // padded_width)),
        padded_width=padded_width,
        padded_logits=_power_of_2(num_heads * num_actions),
        empty_score=eager.empty_score(settings.read_mask, dtype),
        tiny=torch.finfo(dtype).tiny,
    )


def compiler_options(options: ScanOptions) -> dict[str, int]:
    """Return Triton's compiler options."""
    tiles = options.padded_heads * options.padded_slots * options.padded_dim
    tiles *= 1 if options.activation is None else 2
    return {
        "num_stages": 1,  # loops load what they have stored, so loads must not move ahead
        "enable_fp_fusion": True,  # the default differs between versions
        "num_warps": min(MAX_WARPS, max(1, tiles // ELEMENTS_PER_WARP)),
    }


def _power_of_2(size: int) -> int:
    """Return the smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def _kernels() -> ModuleType:
    from stackexp.stack.triton import time_scan_kernels as kernels

    return kernels
