"""The stack in plain PyTorch, computed on the occupied slots only.

A state holds n = min(number of updates, S) slots. On the depth axis n depends only on the layer, so torch.compile
traces it without graph breaks.
"""

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from stackexp.stack import reference
from stackexp.stack.feedback import scan_tokens
from stackexp.stack.reference import ADDITIVE_PENALTY, StackOutput, StackState


def empty(shape: tuple[int, ...], num_slots: int, head_dim: int, like: Tensor) -> StackState:
    """Return empty stacks, whose state has no slots yet."""
    return reference.empty(shape, 0, head_dim, like)


def update_stack(state: StackState, action: Tensor, x: Tensor, discipline: str, num_slots: int) -> StackState:
    """Return the state after one update: n slots become min(n + 1, S). action [..., H, 3], x [..., H, D]."""
    slots, mask = state.slots, state.mask.unsqueeze(-1)  # [..., H, n, D], [..., H, n, 1]
    new_size = min(mask.shape[-2] + 1, num_slots)
    push, pop, no_op = action[..., None, None].unbind(-3)  # [..., H, 1, 1]

    def mix(values: Tensor, first: Tensor, keep: Tensor, pop: Tensor | None) -> Tensor:
        """Return push values[j-1] + keep values[j] + pop values[j+1]."""
        mixed = push * torch.cat([first, values[..., : new_size - 1, :]], -2) + _pad(keep * values, new_size)
        return mixed if pop is None else mixed + _pad(pop * values[..., 1:, :], new_size)

    popped = None if discipline == "push_only" else pop
    new_mask = mix(mask, torch.ones_like(x[..., None, :1]), no_op, popped).squeeze(-1)
    if discipline == "queue":
        following = _pad(mask[..., 1:, :], mask.shape[-2])
        keep = no_op + pop * reference.mask_ratio(following, mask)
        return StackState(mix(slots, x.unsqueeze(-2), keep, None), new_mask)
    return StackState(mix(slots, x.unsqueeze(-2), no_op, popped), new_mask)


def _pad(values: Tensor, num_slots: int) -> Tensor:
    """Append zeros along dim -2, up to `num_slots`."""
    return F.pad(values, (0, 0, 0, num_slots - values.shape[-2]))


def read_stack(
    state: StackState,
    query: Tensor | None,
    read: str,
    read_mask: str,
    num_slots: int,
    empty_score: Tensor | None = None,
) -> Tensor:
    """Return R [..., H, D]. The softmax of the global read includes the S - n empty slots."""
    slots, mask = state
    num_empty = num_slots - mask.shape[-1]
    if mask.shape[-1] == 0:
        return slots.sum(-2)
    if read == "top":
        return slots[..., 0, :]
    assert query is not None, read
    scores = reference.compute_scores(state, query, read_mask)  # [..., H, n]
    if num_empty:  # one score replaces those of all empty slots; in float32, `additive` rounds log(num_empty) to 0
        score = get_empty_score(read_mask, scores.dtype) + math.log(num_empty)
        scores = torch.cat([scores, torch.full_like(scores[..., :1], score)], -1)
    weights = reference.add_score(scores, empty_score).softmax(-1)[..., : mask.shape[-1]]
    return (weights.unsqueeze(-1) * slots).sum(-2)


def get_empty_score(read_mask: str, dtype: torch.dtype) -> float:
    """Return the score of a slot with St = 0 and M = 0."""
    return {"multiply": 0.0, "log": math.log(torch.finfo(dtype).tiny), "additive": ADDITIVE_PENALTY}[read_mask]


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
    """Update, then read; see `reference.step`."""
    action = reference.compute_actions(logits)
    state = update_stack(state, action, x, discipline, num_slots)
    output = read_stack(state, query, read, read_mask, num_slots, empty_score)
    return StackOutput(output, action, reference.compute_entropy(logits), state.mask.detach().sum(-1)), state


def scan(state: StackState, x: Tensor, logits: Tensor, query: Tensor | None, *, num_slots: int, **options) -> tuple:
    """Apply `step` to the tokens, one after the other; see `reference.scan`."""
    assert state.mask.shape[-1] <= num_slots, (state.mask.shape[-1], num_slots)
    read = functools.partial(read_stack, num_slots=num_slots)
    return scan_tokens(step, read, state, x, logits, query, num_slots=num_slots, **options)
