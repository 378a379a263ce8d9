"""The scan over tokens on CUDA: one kernel, and one for its gradients.

The state and a single step are those of `eager`. The kernels compute in the dtype of x, float32 or float64, and hold
only the slots that the tokens can fill, min(n + T, S). For gradients, the forward pass saves the state before every
ceil(sqrt(T))-th token, and the backward pass recomputes the others: 2 sqrt(T) states instead of T.

The first scan imports Triton. With TRITON_INTERPRET=1 in the environment, scans run on a CPU, slowly.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from stackexp.stack import eager, reference
from stackexp.stack import feedback as feedback_math
from stackexp.stack.feedback import ACTIVATIONS
from stackexp.stack.reference import StackOutput, StackState
from stackexp.stack.triton.depth_step import round_up_to_power_of_2

MAX_WARPS = 8
ELEMENTS_PER_WARP = 512  # of a tile: 16 registers per thread for each tile of the backward pass; more would spill
MAP_BLOCK = 1024  # elements of P that a program multiplies at once, but one warp half of it; more would spill


class ScanOptions(NamedTuple):
    """The compile-time options of the kernels."""

    heads: int
    head_dim: int
    num_actions: int
    padded_heads: int  # of one program, a power of two: all with feedback, else 1
    padded_slots: int
    padded_dim: int
    discipline: str
    read: str
    read_mask: str
    activation: str | None  # of the feedback; None without feedback
    units: int  # m
    block: int  # rows of P, Q or V that are multiplied at once
    padded_width: int  # H*D, a power of two
    padded_logits: int  # H*3, a power of two
    warps: int
    empty_score: float
    tiny: float  # the smallest normal number


class ScanForward(NamedTuple):
    """The tensors of a scan: B rows, T tokens, N slots, C saved states, m feedback units (gated: 2 m in V and c)."""

    x: Any  # [B, T, H, D]
    logits: Any  # [B, T, H, 3 or 2]
    query: Any  # [H, D]
    slots: Any  # [B, H, N, D]
    mask: Any  # [B, H, N]
    feedback_x: Any  # P [m, H, D]
    feedback_logits: Any  # Q [m, H, 3 or 2]
    read_weight: Any  # V [m, H, D]
    token_bias: Any  # c [B, T, m]
    read: Any  # out [B, T, H, D]; with feedback [B, 1 + T, H, D], where the first is the input R_{-1}
    occupancy: Any  # out [B, T, H]
    last_slots: Any  # out [B, H, N, D]
    last_mask: Any  # out [B, H, N]
    x_with_feedback: Any  # out, with feedback [B, T, H, D]: x + P u
    logits_with_feedback: Any  # out, with feedback [B, T, H, 3 or 2]: logits + Q u
    saved_slots: Any  # out [C, B, H, N, D]: the states before tokens 0, interval, 2 interval ...
    saved_mask: Any  # out [C, B, H, N]


class ScanBackward(NamedTuple):
    """The tensors of the gradient of a scan."""

    x: Any  # with feedback x + P u [B, T, H, D]
    logits: Any  # with feedback logits + Q u [B, T, H, 3 or 2]
    query: Any
    feedback_x: Any
    feedback_logits: Any
    read_weight: Any
    fed: Any  # with feedback, u [B, T, m]; gated: both factors [B, T, 2 m]
    saved_slots: Any
    saved_mask: Any
    grad_read: Any  # [B, T, H, D]
    grad_logits_with_feedback: Any  # with feedback [B, T, H, 3 or 2]
    grad_last_slots: Any  # [B, H, N, D]
    grad_last_mask: Any  # [B, H, N]
    segment_slots: Any  # scratch [interval, B, H, N, D]
    segment_mask: Any  # scratch [interval, B, H, N]
    to_x: Any  # out [B, T, H, D]
    to_logits: Any  # out [B, T, H, 3 or 2]
    to_query: Any  # out [B, H, D]
    to_slots: Any  # out [B, H, N, D]
    to_mask: Any  # out [B, H, N]
    to_read: Any  # with feedback, 0 and out [B, H, D]: of the read before; at the end of R_{-1}
    grad_token_bias: Any  # out, with a hidden layer [B, T, m]


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
    kept = min(occupied + num_tokens, num_slots)
    initial_read = eager.read_stack(state, query, read, read_mask, num_slots) if feedback else None
    tensors = (
        x,
        logits,
        query if read == "global" else None,
        F.pad(state.slots, (0, 0, 0, kept - occupied)),
        F.pad(state.mask, (0, kept - occupied)),
        *(*(feedback or ()), None, None, None, None)[:4],
        initial_read,
    )
    units = len(feedback[0]) if feedback else 0
    activation = feedback_activation if feedback else None
    options = make_options(x, logits, kept, units, (discipline, read, read_mask, activation))
    needs_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    interval = math.isqrt(num_tokens - 1) + 1 if needs_gradient else num_tokens
    reads, occupancy, slots, mask, *logits_with_feedback = _Scan.apply(options, num_slots - kept, interval, *tensors)
    logits = logits_with_feedback[0] if feedback else logits
    action, entropy = reference.compute_actions(logits), reference.compute_entropy(logits)
    return StackOutput(reads, action, entropy, occupancy), StackState(slots, mask)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, options: ScanOptions, num_empty: int, interval: int, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return reads [B, T, H, D], occupancy [B, T, H], contents, mask; with feedback, also the changed logits."""
        *inputs, initial_read = map(_contiguous, inputs)
        x, logits, query, slots, mask, *feedback = inputs
        reads, x_with_feedback, logits_with_feedback = torch.empty_like(x), x, logits
        if options.activation:
            reads = torch.cat([initial_read.unsqueeze(1), reads], 1)
            x_with_feedback, logits_with_feedback = torch.empty_like(x), torch.empty_like(logits)
        saved = [tensor.new_empty(-(-x.shape[1] // interval), *tensor.shape) for tensor in (slots, mask)]
        final = torch.empty_like(slots), torch.empty_like(mask)
        occupancy = x.new_empty(x.shape[:3])
        tensors = ScanForward._make((*inputs, reads, occupancy, *final, x_with_feedback, logits_with_feedback, *saved))
        _launch("forward", tensors, options, num_empty, interval)
        ctx.save_for_backward(x_with_feedback, logits_with_feedback, query, *feedback, reads, *saved)
        ctx.constants = options, num_empty, interval
        ctx.mark_non_differentiable(occupancy)
        if options.activation:
            return reads[:, 1:], occupancy, *final, logits_with_feedback
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
        x, logits, query, *maps, token_bias, reads, saved_slots, saved_mask = ctx.saved_tensors
        options, _, interval = ctx.constants
        fed, last = None, reads[:, :-1].flatten(2)  # with feedback R_{t-1} [B, T, H*D]
        with torch.autocast(x.device.type, enabled=False):  # backward may be called under autocast
            if options.activation:
                fed = feedback_math.activate(last, options.activation, maps[2], token_bias).contiguous()
            to_query, to_read = x.new_zeros(2, x.shape[0], *x.shape[2:])  # [B, H, D]
            known = (x, logits, query, *maps, fed, saved_slots, saved_mask)
            incoming = map(_contiguous, (grad_read, grad_logits, grad_slots, grad_mask))
            segment = [states.new_empty(interval, *states.shape[1:]) for states in (saved_slots, saved_mask)]
            to_x, to_logits, to_slots, to_mask = map(torch.empty_like, (x, logits, saved_slots[0], saved_mask[0]))
            grad_token_bias = None if token_bias is None else torch.empty_like(token_bias)
            outputs = (to_x, to_logits, to_query, to_slots, to_mask, to_read, grad_token_bias)
            tensors = ScanBackward._make((*known, *incoming, *segment, *outputs))
            _launch("backward", tensors, *ctx.constants)
            to_maps: tuple[Tensor | None, ...] = (None,) * 5
            if fed is not None:
                u = feedback_math.multiply_gates(fed, options.activation)
                products = [torch.einsum("btm,bthd->mhd", u, grad) for grad in (to_x, to_logits)]
                hidden = None if token_bias is None else torch.einsum("btm,btk->mk", grad_token_bias, last)
                to_maps = (*products, hidden, grad_token_bias, to_read)
        to_query = None if query is None else to_query.sum(0)
        return None, None, None, to_x, to_logits, to_query, to_slots, to_mask, *to_maps


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None else tensor.contiguous()


def _launch(
    name: str, tensors: ScanForward | ScanBackward, options: ScanOptions, num_empty: int, interval: int
) -> None:
    """Run the kernel `name`: one program per row and head, or per row with feedback."""
    from stackexp.stack.triton import time_scan_kernels

    x = tensors.x
    assert {tensor.dtype for tensor in tensors if tensor is not None} == {x.dtype}, "one dtype"
    programs = x.shape[0] * (options.heads if options.activation is None else 1)
    with torch.cuda.device_of(x):
        getattr(time_scan_kernels, name)[(programs,)](
            tensors,
            num_tokens=x.shape[1],
            kept=tensors.saved_slots.shape[3],
            num_empty=num_empty,
            interval=interval,
            settings=options,
            **compiler_options(options),
        )


def make_options(
    x: Tensor, logits: Tensor, kept: int, units: int, names: tuple[str, str, str, str | None]
) -> ScanOptions:
    """Return the compile-time options. `kept`: N; `units`: m; `names`: discipline, read, read_mask, activation."""
    num_heads, head_dim = x.shape[-2:]
    discipline, read, read_mask, activation = names
    padded_width = round_up_to_power_of_2(num_heads * head_dim)
    padded_heads = 1 if activation is None else round_up_to_power_of_2(num_heads)
    padded_slots, padded_dim = round_up_to_power_of_2(kept), round_up_to_power_of_2(head_dim)
    elements = padded_heads * padded_slots * padded_dim * (1 if activation is None else 2)
    warps = min(MAX_WARPS, max(1, elements // ELEMENTS_PER_WARP))
    map_block = MAP_BLOCK // 2 if warps == 1 else MAP_BLOCK
    return ScanOptions(
        heads=num_heads,
        head_dim=head_dim,
        num_actions=logits.shape[-1],
        padded_heads=padded_heads,
        padded_slots=padded_slots,
        padded_dim=padded_dim,
        discipline=discipline,
        read=read,
        read_mask=read_mask,
        activation=activation,
        units=units,
        block=min(round_up_to_power_of_2(units), max(1, map_block // padded_width)),
        padded_width=padded_width,
        padded_logits=round_up_to_power_of_2(logits.shape[-2:].numel()),
        warps=warps,
        empty_score=eager.get_empty_score(read_mask, x.dtype),
        tiny=torch.finfo(x.dtype).tiny,
    )


def compiler_options(options: ScanOptions) -> dict[str, int]:
    """Return Triton's compiler options."""
    return {
        "num_stages": 1,  # loops load what they have stored, so loads must not move ahead
        "enable_fp_fusion": True,  # the default differs between versions
        "num_warps": options.warps,
        "maxnreg": 255,  # otherwise ptxas spills some, for more programs at once
    }
