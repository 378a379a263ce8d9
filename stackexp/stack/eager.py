"""The stack in plain torch, touching only occupied slots.

A state holds n = min(updates so far, S) slots, so shapes are static where the number of updates is (every layer of the
depth axis) and torch.compile sees no graph break. Equals `reference` in values and gradients.
"""

import functools
import math

import torch
from torch import Tensor

from stackexp.stack import reference
from stackexp.stack.reference import ADDITIVE_PENALTY, StackOutput, StackState


def empty(shape: tuple[int, ...], num_slots: int, head_dim: int, like: Tensor) -> StackState:
    """Empty stacks: no slots yet, whatever `num_slots`."""
    return reference.empty(shape, 0, head_dim, like)


def update(state: StackState, action: Tensor, x: Tensor, discipline: str, num_slots: int) -> StackState:
    """n slots -> min(n + 1, S) slots. action [..., H, 3], x [..., H, D]."""
    slots, mask = state
    n, grown = mask.shape[-1], min(mask.shape[-1] + 1, num_slots)
    # St[-1..grown] and M[-1..grown]: views of these are what a push, a no-op and a pop put into slots 0..grown-1.
    padding = slots.new_zeros(()).expand(*slots.shape[:-2], grown - n + 1, slots.shape[-1])
    column = torch.cat([x.unsqueeze(-2), slots, padding], -2)  # [..., H, grown + 2, D]
    mask = torch.cat([torch.ones_like(x[..., :1]), mask, padding[..., 0]], -1)  # [..., H, grown + 2]
    push, pop, no_op = action.unsqueeze(-2).unbind(-1)  # [..., H, 1]
    new_mask = push * mask[..., :-2] + pop * mask[..., 2:] + no_op * mask[..., 1:-1]
    pushed, kept, popped = column[..., :-2, :], column[..., 1:-1, :], column[..., 2:, :]
    if discipline == "queue":
        stays = no_op + pop * reference.ratio(mask[..., 2:], mask[..., 1:-1])
        return StackState(push.unsqueeze(-1) * pushed + stays.unsqueeze(-1) * kept, new_mask)
    new_slots = push.unsqueeze(-1) * pushed + no_op.unsqueeze(-1) * kept
    if discipline == "stack":
        new_slots = new_slots + pop.unsqueeze(-1) * popped
    return StackState(new_slots, new_mask)


def read_slots(state: StackState, query: Tensor | None, read: str, read_mask: str, num_slots: int) -> Tensor:
    """R [..., H, D]; the softmax of the global read counts the S - n empty slots too."""
    slots, mask = state
    num_empty = num_slots - mask.shape[-1]
    if mask.shape[-1] == 0:
        return slots.sum(-2)
    if read == "top":
        return slots[..., 0, :]
    scores = reference.scores(state, query, read_mask)  # [..., H, n]
    if num_empty:
        score = _empty_score(read_mask, mask.dtype) + math.log(num_empty)
        scores = torch.cat([scores, torch.full_like(scores[..., :1], score)], -1)
    weights = scores.softmax(-1)[..., : mask.shape[-1]]
    return (weights.unsqueeze(-1) * slots).sum(-2)


def _empty_score(read_mask: str, dtype: torch.dtype) -> float:
    """The score of a slot with St = 0 and M = 0."""
    log_nothing = math.log(torch.finfo(dtype).tiny)
    return {"multiply": 0.0, "log": log_nothing, "additive": ADDITIVE_PENALTY}[read_mask]


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
    """As `reference.step`."""
    action = reference.actions(logits)
    state = update(state, action, x, discipline, num_slots)
    output = read_slots(state, query, read, read_mask, num_slots)
    return StackOutput(output, action, reference.entropy(logits), state.mask.detach().sum(-1)), state


def scan(state: StackState, x: Tensor, logits: Tensor, query: Tensor | None, *, num_slots: int, **options):
    """As `reference.scan`."""
    read = functools.partial(read_slots, num_slots=num_slots)
    return reference.scan(state, x, logits, query, step=step, read_slots=read, num_slots=num_slots, **options)
