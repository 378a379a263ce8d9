"""The arguments of the scan kernels: plain integers, and the addresses of tensors in a fixed order.

The same classes hold tensors or None in Python and flat arrays in numba, where a missing tensor has the address 0.
Tensors are contiguous. B is the number of sequences, T of tokens, n of occupied slots at the start, N at the end, C of
saved states, m of feedback units, and i of hidden feedback units (i = 2 m with gates, else m).
"""

from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """The sizes and options of one scan."""

    batch: int
    tokens: int
    heads: int
    head_dim: int
    num_actions: int  # 3, or 2 without pop
    first_slots: int  # n
    last_slots: int  # N = min(n + T, S)
    num_slots: int  # S
    read: int  # equations.TOP, MULTIPLY, LOG or ADDITIVE
    is_queue: int
    has_mask_grad: int  # backward: whether the mask has a gradient
    activation: int  # feedback.IDENTITY, TANH or GATED
    units: int  # m
    inner: int  # i
    save_every: int  # tokens between two saved states


class ForwardTensors(NamedTuple):
    """The inputs and outputs of the forward kernel."""

    slots: Any  # [B, H, n, D]
    mask: Any  # [B, H, n]
    x: Any  # [B, T, H, D]
    logits: Any  # [B, T, H, 3 or 2]
    query: Any  # [H, D]; missing for `read: top`
    feedback: Any  # P and Q side by side [m, H*D + H*3, padded]; missing without feedback
    from_read: Any  # V, transposed [H*D, i, padded]; missing without a hidden layer
    given: Any  # c [B, T, i]
    read: Any  # out [B, T, H, D]
    action: Any  # out [B, T, H, 3]
    entropy: Any  # out [B, T, H]
    occupancy: Any  # out [B, T, H]
    last_slots: Any  # out [B, H, N, D]
    last_mask: Any  # out [B, H, N]
    pushed: Any  # out, x with feedback [B, T, H, D]; missing if not needed
    first_read: Any  # out, R_{-1} [B, H, D]; missing without feedback
    saved_slots: Any  # out [B, H, C, N, D]; missing without gradients
    saved_mask: Any  # out [B, H, C, N]


class BackwardTensors(NamedTuple):
    """The inputs and outputs of the backward kernel. Each incoming gradient may be missing."""

    slots: Any  # [B, H, n, D]
    mask: Any  # [B, H, n]
    pushed: Any  # [B, T, H, D]
    query: Any  # [H, D]
    feedback_x: Any  # P, transposed [H*D, m, padded]
    feedback_logits: Any  # Q, transposed [H*3, m, padded]
    fed: Any  # the result of `feedback.activate` [B, T, i]
    from_read: Any  # V [i, H*D, padded]
    action: Any  # [B, T, H, 3]
    entropy: Any  # [B, T, H]
    saved_slots: Any  # [B, H, C, N, D]
    saved_mask: Any  # [B, H, C, N]
    grad_read: Any  # [B, T, H, D]
    grad_action: Any  # [B, T, H, 3]
    grad_entropy: Any  # [B, T, H]
    grad_last_slots: Any  # [B, H, N, D]
    grad_last_mask: Any  # [B, H, N]
    grad_slots: Any  # out [B, H, n, D]; missing if not needed
    grad_mask: Any  # out [B, H, n]
    grad_x: Any  # out [B, T, H, D]
    grad_logits: Any  # out [B, T, H, 3 or 2]
    grad_query: Any  # in, 0, and out [B, H, D]: one part for each sequence
    grad_given: Any  # out [B, T, i]
