"""The specification: the memory equations of StackTrans (arXiv 2507.15343, section 3), one function for each.

Symbols for one token and one head; slots are j = 0 .. S-1 with the top at 0:

    h      [d]        hidden state            A      [3, D]     action weights (D is the paper's d_s)
    x      [D]        pushed vector           W_down [H D, d]   down projection, all heads
    a      [3]        push, pop, no-op        w_g    [D]        read query
    St     [S, D]     slot contents           W_up   [d, H D]   up projection, all heads
    M      [S]        slot occupancy          g_h    scalar     residual gate
    R      [D]        read vector             lambda scalar     entropy weight

Equations (our numbers; only (4) is known to be the paper's):

    (0)  x      = W_down h                                                          `memory_layer`
    (1)  a      = softmax(A x)                                                      `compute_actions`
    (2)  St'[j] = a_push St[j-1] + a_pop St[j+1] + a_noop St[j],  St[-1] = x, St[S] = 0   `update_stack`
    (3)  M'[j]  = a_push M[j-1]  + a_pop M[j+1]  + a_noop M[j],   M[-1]  = 1, M[S]  = 0   `update_stack`
    (4)  R      = softmax_j(w_g . (St'[j] M'[j])) . St'                             `compute_scores`, `read_stack`
    (5)  h'     = g_h h + W_up concat(R of all heads)                               `memory_layer`
    (6)  L      = L_LM + lambda * mean entropy(a)                                   `training_loss`

Three deviations: the paper prints W_g in R^S, but each slot needs one score, so the query here is w_g in R^D. By its
indices, the paper's (4) reads the stack before the update; here it reads after. Its entropy term is a sum over tokens;
ours is a mean.

Functions accept any leading dimensions, written `...`. H is the number of heads. This code is written to be read, not
to be fast; every other implementation is tested against it. `models/memories/stack.py` holds the trained module.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from stackexp.stack.feedback import scan_tokens

ADDITIVE_PENALTY = -1e9


class StackState(NamedTuple):
    """The contents and occupancy of every stack."""

    slots: Tensor  # St [..., H, S, D]; an empty slot is 0
    mask: Tensor  # M [..., H, S]; 0 <= M <= 1, non-increasing in j


class StackOutput(NamedTuple):
    """The results of one update and read."""

    read: Tensor  # R [..., H, D]
    action: Tensor  # a [..., H, 3], probabilities of push, pop, no-op
    entropy: Tensor  # entropy of a in nats [..., H]
    occupancy: Tensor  # sum of M' over the slots [..., H], without gradient


class LayerWeights(NamedTuple):
    """The parameters of one memory layer."""

    down: Tensor  # W_down [H, D, d]
    actions: Tensor  # A [H, 3, D]
    query: Tensor  # w_g [H, D]
    up: Tensor  # W_up [d, H, D]
    gate: Tensor  # g_h, scalar


def empty(shape: tuple[int, ...], num_slots: int, head_dim: int, like: Tensor) -> StackState:
    """Return empty stacks for the leading dimensions `shape` (heads included), with device and dtype of `like`."""
    return StackState(like.new_zeros(*shape, num_slots, head_dim), like.new_zeros(*shape, num_slots))


def memory_layer(h: Tensor, state: StackState, weights: LayerWeights) -> tuple[Tensor, Tensor, StackState]:
    """Return h' [..., d], the action entropy [..., H] and the next state. Equations 0 to 5."""
    x = torch.einsum("...m,hdm->...hd", h, weights.down)  # (0)
    logits = torch.einsum("...hd,had->...ha", x, weights.actions)
    output, state = step(state, x, logits, weights.query, num_slots=state.mask.shape[-1])  # (1) to (4)
    h = weights.gate * h + torch.einsum("...hd,mhd->...m", output.read, weights.up)  # (5)
    return h, output.entropy, state


def training_loss(language_model_loss: Tensor, entropy: Tensor, entropy_weight: float) -> Tensor:
    """Return the loss with the entropy term (equation 6); `entropy` has one value per token, layer and head."""
    return language_model_loss + entropy_weight * entropy.mean()


def compute_actions(logits: Tensor) -> Tensor:
    """Return a [..., 3], the softmax of the logits. Equation 1.

    Two logits are push and no-op (discipline `push_only`); then a_pop is 0.
    """
    if logits.shape[-1] == 2:
        push, no_op = logits.softmax(-1).unbind(-1)
        return torch.stack([push, torch.zeros_like(push), no_op], -1)
    return logits.softmax(-1)


def compute_entropy(logits: Tensor) -> Tensor:
    """Return -sum a log a [...] in nats, with finite gradients for saturated actions."""
    log_a = logits.log_softmax(-1)
    return -(log_a.exp() * log_a).sum(-1)


def update_stack(state: StackState, action: Tensor, x: Tensor, discipline: str = "stack") -> StackState:
    """Return St' and M' for action [..., 3] and x [..., D]. Equations 2 and 3.

    A queue pops its oldest element instead: slot j keeps the fraction M[j+1] / M[j] of its content, and the mask moves
    as in a stack. `push_only` is the stack with a_pop = 0.
    """
    slots, mask = state.slots, state.mask.unsqueeze(-1)  # [..., S, D], [..., S, 1]
    push, pop, no_op = action[..., None, None].unbind(-3)  # [..., 1, 1]
    popped = slots * mask_ratio(_shift_up(mask), mask) if discipline == "queue" else _shift_up(slots)
    slots = push * _shift_down(slots, x.unsqueeze(-2)) + pop * popped + no_op * slots  # (2)
    mask = push * _shift_down(mask, torch.ones_like(x[..., None, :1])) + pop * _shift_up(mask) + no_op * mask  # (3)
    return StackState(slots, mask.squeeze(-1))


def mask_ratio(following: Tensor, mask: Tensor) -> Tensor:
    """Return M[j+1] / M[j], and 0 where M[j] is below the smallest normal number.

    Such a slot is empty: no gradient flows through it, and none is NaN. Elsewhere gradients are bounded, because
    |St[j]| <= M[j] max|x|.
    """
    occupied = mask >= torch.finfo(mask.dtype).tiny
    return torch.where(occupied, following / torch.where(occupied, mask, 1), 0)


def compute_scores(state: StackState, query: Tensor, read_mask: str = "multiply") -> Tensor:
    """Return one score per slot [..., H, S] for the query w_g [H, D]: the argument of the softmax in equation 4.

    multiply: w_g . (St M)    log: w_g . St + log M    additive: w_g . St + (1 - M) * -1e9 (the authors' code)

    log M is clamped at the smallest normal number, so that an empty stack has equal finite scores and reads 0.
    """
    slots, mask = state
    content = (query.unsqueeze(-2) * slots).sum(-1)
    if read_mask == "multiply":
        return content * mask
    if read_mask == "log":
        return content + mask.clamp_min(torch.finfo(mask.dtype).tiny).log()
    assert read_mask == "additive", read_mask
    return content + (1 - mask) * ADDITIVE_PENALTY


def read_stack(
    state: StackState,
    query: Tensor | None,
    read: str = "global",
    read_mask: str = "multiply",
    empty_score: Tensor | None = None,
) -> Tensor:
    """Return R [..., H, D]. Equation 4.

    global: softmax_j(scores) . St over all S slots, empty ones included.    top: St[0], without a query.
    The softmax includes another slot, with content 0, if it has a score `empty_score` [H].
    """
    if read == "top":
        return state.slots[..., 0, :]
    assert read == "global", read
    assert query is not None, "a global read requires a query"
    weights = add_score(compute_scores(state, query, read_mask), empty_score).softmax(-1)
    return (weights[..., : state.slots.shape[-2], None] * state.slots).sum(-2)  # (4)


def add_score(scores: Tensor, empty_score: Tensor | None) -> Tensor:
    """Append a score [H] to scores [..., H, S], if there is one."""
    if empty_score is None:
        return scores
    return torch.cat([scores, empty_score.unsqueeze(-1).expand(*scores.shape[:-1], 1)], -1)


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
    empty_score: Tensor | None = None,
) -> tuple[StackOutput, StackState]:
    """Update, then read: equations 1 to 4.

    x [..., H, D], logits [..., H, 3] (push_only: 2), query [H, D], or None for `read: top`; empty_score [H], see
    `read_stack`.
    """
    assert state.slots.shape[-2] == num_slots, "the reference stores all slots"
    action = compute_actions(logits)
    state = update_stack(state, action, x, discipline)
    output = read_stack(state, query, read, read_mask, empty_score)
    return StackOutput(output, action, compute_entropy(logits), state.mask.detach().sum(-1)), state


def scan(state: StackState, x: Tensor, logits: Tensor, query: Tensor | None, **options) -> tuple:
    """Apply `step` to the tokens of x [B, T, H, D] and logits [B, T, H, 3], one after the other.

    The outputs are stacked along T. For the options `feedback` and `feedback_activation`, which extend the paper, see
    `feedback.scan_tokens`.
    """
    return scan_tokens(step, read_stack, state, x, logits, query, **options)


def _shift_down(values: Tensor, first: Tensor) -> Tensor:
    """Return values[j-1] along dim -2, with `first` at j = 0. The last slot is dropped."""
    return torch.cat([first, values[..., :-1, :]], -2)


def _shift_up(values: Tensor) -> Tensor:
    """Return values[j+1] along dim -2, with 0 at j = S-1."""
    return torch.cat([values[..., 1:, :], torch.zeros_like(values[..., :1, :])], -2)
