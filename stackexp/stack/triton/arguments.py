"""The arguments of the Triton kernels: compile-time options, and the tensors of each kernel.

Triton accepts NamedTuples of tensors and, as one `tl.constexpr`, a NamedTuple of options.
"""

from typing import Any, NamedTuple


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
    is_capped: bool  # since V_0 an element may have moved past slot S, and must be dropped
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


class ScanOptions(NamedTuple):
    """The compile-time options of a scan."""

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
    has_hidden: bool  # the feedback has a hidden layer
    units: int  # m
    block: int  # rows of P, Q or V that are multiplied at once
    padded_width: int  # H*D, a power of two
    padded_logits: int  # H*3, a power of two
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
    from_read: Any  # V [m, H, D]
    given: Any  # c [B, T, m]
    read: Any  # out [B, T, H, D]; with feedback [B, 1 + T, H, D], where the first is the input R_{-1}
    occupancy: Any  # out [B, T, H]
    last_slots: Any  # out [B, H, N, D]
    last_mask: Any  # out [B, H, N]
    fed_x: Any  # out, with feedback [B, T, H, D]: x + P u
    fed_logits: Any  # out, with feedback [B, T, H, 3 or 2]: logits + Q u
    saved_slots: Any  # out [C, B, H, N, D]: the states before tokens 0, interval, 2 interval ...
    saved_mask: Any  # out [C, B, H, N]


class ScanBackward(NamedTuple):
    """The tensors of the gradient of a scan."""

    x: Any  # with feedback [B, T, H, D]
    logits: Any  # with feedback [B, T, H, 3 or 2]
    query: Any
    feedback_x: Any
    feedback_logits: Any
    from_read: Any
    fed: Any  # with feedback, u [B, T, m]; gated: both factors [B, T, 2 m]
    saved_slots: Any
    saved_mask: Any
    grad_read: Any  # [B, T, H, D]
    grad_fed_logits: Any  # with feedback [B, T, H, 3 or 2]
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
    to_given: Any  # out, with a hidden layer [B, T, m]
