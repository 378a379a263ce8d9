"""The specification: the equations of the memory between layers, one line each, over all S slots.

Read it beside section 3 of the paper (arXiv 2507.15343). Everything is per token position and per head i, with
x = h^(i) the pushed vector, slots j = 0..S-1 and the top at 0. Functions take any leading dimensions; below,
`...` stands for them, H for heads, S for slots, D for the size of a head (d_s). Nothing here is fast.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

ADDITIVE_PENALTY = -1e9
ACTIVATIONS = ("identity", "tanh", "gated")  # of the feedback


class StackState(NamedTuple):
    slots: Tensor  # St [..., H, S, D], the contents; an empty slot is 0
    mask: Tensor  # M [..., H, S], how far a slot is occupied: 0 <= M <= 1, non-increasing in j


class StackOutput(NamedTuple):
    read: Tensor  # R [..., H, D]
    action: Tensor  # a [..., H, 3], probabilities of push, pop, no-op
    entropy: Tensor  # of a, in nats [..., H]
    occupancy: Tensor  # sum of M' over the slots [..., H], without gradient


def empty(shape: tuple[int, ...], num_slots: int, head_dim: int, like: Tensor) -> StackState:
    """Empty stacks for leading dimensions `shape` (heads included), with the device and dtype of `like`."""
    return StackState(like.new_zeros(*shape, num_slots, head_dim), like.new_zeros(*shape, num_slots))


def actions(logits: Tensor) -> Tensor:
    """a = softmax(A x) [..., 3]: push, pop, no-op. Two logits are push and no-op (push_only): a_pop = 0."""
    if logits.shape[-1] == 2:
        push, no_op = logits.softmax(-1).unbind(-1)
        return torch.stack([push, torch.zeros_like(push), no_op], -1)
    return logits.softmax(-1)


def entropy(logits: Tensor) -> Tensor:
    """-sum a log a [...] in nats, from the logits: saturated actions give 0 with finite gradients."""
    log_a = logits.log_softmax(-1)
    return -(log_a.exp() * log_a).sum(-1)


def update(state: StackState, action: Tensor, x: Tensor, discipline: str = "stack") -> StackState:
    """The soft update of contents and mask. action [..., 3], x [..., D].

    St'[j] = a_push St[j-1] + a_pop St[j+1] + a_noop St[j]     St[-1] = x,  St[S] = 0
    M'[j]  = a_push M[j-1]  + a_pop M[j+1]  + a_noop M[j]      M[-1]  = 1,  M[S]  = 0

    A queue pops its oldest element instead: slot j keeps its content in proportion M[j+1] / M[j], so the mask moves as
    a stack's does. `push_only` is the stack with a_pop = 0.
    """
    slots, mask = state.slots, state.mask.unsqueeze(-1)  # [..., S, D], [..., S, 1]
    push, pop, no_op = action[..., None, None].unbind(-3)  # [..., 1, 1]
    popped = slots * ratio(_raised(mask), mask) if discipline == "queue" else _raised(slots)
    slots = push * _lowered(slots, x.unsqueeze(-2)) + pop * popped + no_op * slots
    mask = push * _lowered(mask, torch.ones_like(x[..., None, :1])) + pop * _raised(mask) + no_op * mask
    return StackState(slots, mask.squeeze(-1))


def ratio(following: Tensor, mask: Tensor) -> Tensor:
    """M[j+1] / M[j], and 0 where M[j] is 0: such a slot is empty and has nothing to keep.

    There 0/0 has no derivative (it depends on which slot fills first); no gradient flows, and none is NaN. Elsewhere
    the gradients are bounded, because |St[j]| <= M[j] max|x|. "0" is below the smallest normal number.
    """
    occupied = mask >= torch.finfo(mask.dtype).tiny
    return torch.where(occupied, following / torch.where(occupied, mask, 1), 0)


def scores(state: StackState, query: Tensor, read_mask: str = "multiply") -> Tensor:
    """One score per slot [..., H, S]; query is w_g [H, D].

    multiply: w_g . (St M)    log: w_g . St + log M    additive: w_g . St + (1 - M) * -1e9 (the authors' code)

    log M is cut at the smallest normal number, so that an empty stack has equal finite scores and reads 0.
    """
    slots, mask = state
    content = (query.unsqueeze(-2) * slots).sum(-1)
    if read_mask == "multiply":
        return content * mask
    if read_mask == "log":
        return content + mask.clamp_min(torch.finfo(mask.dtype).tiny).log()
    assert read_mask == "additive", read_mask
    return content + (1 - mask) * ADDITIVE_PENALTY


def read_slots(state: StackState, query: Tensor | None, read: str = "global", read_mask: str = "multiply") -> Tensor:
    """R [..., H, D]. global: softmax_j(scores) . St over all S slots, empty ones too. top: St[0], no query."""
    if read == "top":
        return state.slots[..., 0, :]
    assert read == "global", read
    weights = scores(state, query, read_mask).softmax(-1)
    return (weights.unsqueeze(-1) * state.slots).sum(-2)


def step(
    state: StackState,
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    *,
    num_slots: int,
    discipline: str = "stack",
    read: str = "global",
    read_mask: str = "multiply",
) -> tuple[StackOutput, StackState]:
    """Update, then read. x [..., H, D], logits [..., H, 3] (push_only: 2), query [H, D] or None for `read: top`."""
    assert state.slots.shape[-2] == num_slots, "the reference keeps all slots"
    action = actions(logits)
    state = update(state, action, x, discipline)
    output = read_slots(state, query, read, read_mask)
    return StackOutput(output, action, entropy(logits), state.mask.detach().sum(-1)), state


def scan(
    state: StackState,
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    *,
    feedback: tuple[Tensor, ...] | None = None,
    feedback_activation: str = "identity",
    step: Callable = step,
    read_slots: Callable = read_slots,
    read: str = "global",
    read_mask: str = "multiply",
    **options: str | int,
) -> tuple[StackOutput, StackState]:
    """`step` over the tokens t of x [B, T, H, D] and logits [B, T, H, 3]; outputs are stacked along T.

    `feedback` = (P [m, H, D], Q [m, H, 3]) adds P u_t to x_t and Q u_t to the logits. u_t is f(R_{t-1}), m = H*D; or,
    where `feedback` has two more, V [m, H*D] and c [B, T, m], f(c_t + V R_{t-1}): a hidden layer of any width. f is
    the `feedback_activation`, identity, tanh or gated: of V and c with 2 m rows, the tanh of the first m times that of
    the others. R_{-1} is what the given state reads (0 of an empty one), so a scan may be cut anywhere.
    """
    assert feedback_activation in ACTIVATIONS, feedback_activation
    outputs = []
    last_read = read_slots(state, query, read, read_mask) if feedback else None
    to_x, to_logits, *hidden = feedback or (None, None)
    for t, (x_t, logits_t) in enumerate(zip(x.unbind(1), logits.unbind(1), strict=True)):
        if feedback:
            now = (hidden[0], hidden[1][:, t]) if hidden else ()
            fed = fed_back(last_read.flatten(1), feedback_activation, *now)
            x_t = x_t + torch.einsum("bm,mhd->bhd", fed, to_x)
            logits_t = logits_t + torch.einsum("bm,mha->bha", fed, to_logits)
        output, state = step(state, x_t, logits_t, query, read=read, read_mask=read_mask, **options)
        last_read = output.read
        outputs.append(output)
    return StackOutput(*(torch.stack(values, 1) for values in zip(*outputs, strict=True))), state


def fed_back(read: Tensor, activation: str, of_read: Tensor | None = None, given: Tensor | None = None) -> Tensor:
    """u [..., m] of R_{t-1} [..., H*D]: f(R), or f(c + V R) of V [m, H*D] and c [..., m] (gated: 2 m)."""
    return gated(squashed(read, activation, of_read, given), activation)


def squashed(read: Tensor, activation: str, of_read: Tensor | None = None, given: Tensor | None = None) -> Tensor:
    """What `fed_back` is, but of gated both factors [..., 2 m]."""
    before = read if of_read is None else given + read @ of_read.T
    return before if activation == "identity" else before.tanh()


def gated(factors: Tensor, activation: str) -> Tensor:
    """u [..., m] of what `squashed` gives."""
    return math.prod(factors.chunk(2, -1)) if activation == "gated" else factors


def _lowered(values: Tensor, first: Tensor) -> Tensor:
    """values[j-1] along dim -2, with `first` at j = 0; what was in the last slot falls out."""
    return torch.cat([first, values[..., :-1, :]], -2)


def _raised(values: Tensor) -> Tensor:
    """values[j+1] along dim -2, with 0 at j = S-1."""
    return torch.cat([values[..., 1:, :], torch.zeros_like(values[..., :1, :])], -2)
