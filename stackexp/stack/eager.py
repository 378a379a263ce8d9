"""The stack in plain torch, touching only occupied slots.

A state holds n = min(updates so far, S) slots, so shapes are static where the number of updates is (every layer of the
depth axis) and torch.compile sees no graph break. Equals `reference` in values and gradients.
"""

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from stackexp.stack import reference
from stackexp.stack.reference import ADDITIVE_PENALTY, StackOutput, StackState


def empty(shape: tuple[int, ...], num_slots: int, head_dim: int, like: Tensor) -> StackState:
    """Empty stacks: no slots yet, whatever `num_slots`."""
    return reference.empty(shape, 0, head_dim, like)


def update(state: StackState, action: Tensor, x: Tensor, discipline: str, num_slots: int) -> StackState:
    """n slots -> min(n + 1, S) slots. action [..., H, 3], x [..., H, D]."""
    slots, mask = state.slots, state.mask.unsqueeze(-1)  # [..., H, n, D], [..., H, n, 1]
    grown = min(mask.shape[-2] + 1, num_slots)
    push, pop, no_op = action[..., None, None].unbind(-3)  # [..., H, 1, 1]

    def mix(values: Tensor, first: Tensor, stays: Tensor, leaves: Tensor | None) -> Tensor:
        """push values[j-1] + stays values[j] + leaves values[j+1]."""
        mixed = push * torch.cat([first, values[..., : grown - 1, :]], -2) + _pad(stays * values, grown)
        return mixed if leaves is None else mixed + _pad(leaves * values[..., 1:, :], grown)

    pop = None if discipline == "push_only" else pop
    new_mask = mix(mask, torch.ones_like(x[..., None, :1]), no_op, pop).squeeze(-1)
    if discipline == "queue":
        following = _pad(mask[..., 1:, :], mask.shape[-2])
        return StackState(mix(slots, x.unsqueeze(-2), no_op + pop * reference.ratio(following, mask), None), new_mask)
    return StackState(mix(slots, x.unsqueeze(-2), no_op, pop), new_mask)


def _pad(values: Tensor, num_slots: int) -> Tensor:
    """Zeros after the last slot (dim -2), up to `num_slots`."""
    return F.pad(values, (0, 0, 0, num_slots - values.shape[-2]))


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
        scores = torch.cat([scores, empty_scores(scores[..., :1], num_empty, read_mask)], -1)
    weights = scores.softmax(-1)[..., : mask.shape[-1]]
    return (weights.unsqueeze(-1) * slots).sum(-2)


def empty_scores(like: Tensor, number: int, read_mask: str) -> Tensor:
    """One score that stands for `number` empty slots in a softmax, in the shape of `like`."""
    return torch.full_like(like, empty_score(read_mask, like.dtype) + math.log(number))


def empty_score(read_mask: str, dtype: torch.dtype) -> float:
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
    assert state.mask.shape[-1] <= num_slots, (state.mask.shape[-1], num_slots)
    read = functools.partial(read_slots, num_slots=num_slots)
    return reference.scan(state, x, logits, query, step=step, read_slots=read, num_slots=num_slots, **options)
