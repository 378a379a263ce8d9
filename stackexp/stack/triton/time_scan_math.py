"""The equations of `reference` and their gradients on the tiles of `time_scan_kernels`.

St is a tile [H, S, D], M one [H, S, 1], with every size padded to a power of two; beyond the `kept` slots both are 0.
A state is (St, M); an index is (j, N, S - N), with j [1, S, 1] the numbers of the slots and N the kept ones.

All values are blocks, except N, S - N and `settings`, so names have no prefixes.
"""

import triton
import triton.language as tl


@triton.jit
def divide(x, y):
    """Divide with correct rounding, so that 1 / 1 is 1; the float32 default is approximate."""
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, y)


@triton.jit
def _shift(values, offset: tl.constexpr):
    """Return values[h, j + offset, d], with the index clamped at both ends."""
    size: tl.constexpr = values.shape[1]
    j = tl.arange(0, size)[None, :, None] + offset
    j = tl.minimum(tl.maximum(j, 0), size - 1)
    return tl.gather(values, tl.broadcast_to(j, values.shape), 1)


@triton.jit
def _shift_down(values, first, j, kept):
    """Return values[j-1], with `first` at j = 0."""
    return tl.where(j == 0, first, tl.where(j < kept, _shift(values, -1), 0))


@triton.jit
def _shift_up(values, j, kept):
    """Return values[j+1], with 0 at the last slot."""
    return tl.where(j + 1 < kept, _shift(values, 1), 0)


@triton.jit
def _mask_ratio(mask, j, kept, TINY: tl.constexpr):
    """Return `reference.mask_ratio`, and whether M[j] is not 0."""
    occupied = mask >= TINY
    return tl.where(occupied, divide(_shift_up(mask, j, kept), tl.where(occupied, mask, 1)), 0), occupied


@triton.jit
def update(state, x, action, index, settings: tl.constexpr):
    """Compute `reference.update_stack`. x [H, 1, D]; action: the probabilities of push, pop, no-op [H, 1, 1]."""
    slots, mask = state
    push, pop, no_op = action
    j, kept, _ = index
    new_slots = push * _shift_down(slots, x, j, kept) + no_op * slots
    new_mask = push * _shift_down(mask, 1, j, kept) + no_op * mask
    if settings.discipline == "queue":
        new_slots += pop * slots * _mask_ratio(mask, j, kept, settings.tiny)[0]
    elif settings.discipline == "stack":
        new_slots += pop * _shift_up(slots, j, kept)
    if settings.discipline != "push_only":
        new_mask += pop * _shift_up(mask, j, kept)
    return new_slots, new_mask


@triton.jit
def compute_read_weights(state, query, index, settings: tl.constexpr):
    """Return the softmax [H, S, 1] of `reference.compute_scores`, over all S slots, and w_g . St."""
    slots, mask = state
    j, kept, num_empty = index
    content = tl.sum(query * slots, 2, keep_dims=True)
    if settings.read_mask == "multiply":
        scores = content * mask
    elif settings.read_mask == "log":
        scores = content + tl.log(tl.maximum(mask, settings.tiny))
    else:
        scores = content + (1 - mask) * settings.empty_score  # the penalty is the score of an empty slot
    scores = tl.where(j < kept, scores, float("-inf"))
    highest = tl.max(scores, 1, keep_dims=True)  # [H, 1, 1]
    empty = tl.full(highest.shape, settings.empty_score, highest.dtype)
    highest = tl.where(num_empty > 0, tl.maximum(highest, empty), highest)
    weights = tl.exp(scores - highest)
    total = tl.sum(weights, 1, keep_dims=True) + num_empty * tl.exp(tl.minimum(empty - highest, 0))
    return weights / total, content


@triton.jit
def softmax(push, pop, no_op):
    """Return the softmax of three logits, elementwise; a logit of -inf has probability 0."""
    highest = tl.maximum(tl.maximum(push, pop), no_op)
    push, pop, no_op = tl.exp(push - highest), tl.exp(pop - highest), tl.exp(no_op - highest)
    total = push + pop + no_op
    return divide(push, total), divide(pop, total), divide(no_op, total)


@triton.jit
def read_backward(grad, state, w, index, settings: tl.constexpr):
    """Return the gradients of St, M and w_g, given that of a global read [H, 1, D]."""
    slots, mask = state
    weights, content = compute_read_weights(state, w, index, settings)
    towards = tl.sum(grad * slots, 2, keep_dims=True)  # to each weight [H, S, 1]
    grad_score = weights * (towards - tl.sum(weights * towards, 1, keep_dims=True))
    if settings.read_mask == "multiply":
        grad_content, grad_mask = grad_score * mask, grad_score * content
    elif settings.read_mask == "log":
        grad_content = grad_score
        grad_mask = tl.where(mask >= settings.tiny, divide(grad_score, tl.maximum(mask, settings.tiny)), 0)
    else:
        grad_content, grad_mask = grad_score, grad_score * -settings.empty_score
    return weights * grad + grad_content * w, grad_mask, tl.sum(grad_content * slots, 1, keep_dims=True)


@triton.jit
def _sum_tile(values):
    """Sum over slots and dimensions [H, 1, 1]."""
    return tl.sum(tl.sum(values, 2, keep_dims=True), 1, keep_dims=True)


@triton.jit
def update_backward(grads, state, x, action, index, settings: tl.constexpr):
    """Return the gradients of (St, M), of x and of the action probabilities, given those of (St', M')."""
    grad_slots, grad_mask = grads
    slots, mask = state
    push, pop, no_op = action
    j, kept, _ = index
    above, above_mask = _shift_up(grad_slots, j, kept), _shift_up(grad_mask, j, kept)  # where a push moves slot j
    below_mask = _shift_down(grad_mask, 0, j, kept)  # and a pop
    first = tl.sum(tl.where(j == 0, grad_slots, 0), 1, keep_dims=True)  # [H, 1, D]
    grad_push = _sum_tile(slots * above) + _sum_tile(mask * above_mask)
    grad_push += tl.sum(first * x, 2, keep_dims=True) + tl.sum(tl.where(j == 0, grad_mask, 0), 1, keep_dims=True)
    stays = tl.sum(slots * grad_slots, 2, keep_dims=True)  # [H, S, 1]
    grad_no_op = tl.sum(stays + mask * grad_mask, 1, keep_dims=True)
    new_slots = push * above + no_op * grad_slots
    new_mask = push * above_mask + no_op * grad_mask
    grad_pop = tl.zeros_like(grad_push)
    if settings.discipline != "push_only":
        grad_pop = tl.sum(mask * below_mask, 1, keep_dims=True)
        new_mask += pop * below_mask
    if settings.discipline == "stack":
        below = _shift_down(grad_slots, 0, j, kept)
        grad_pop += _sum_tile(slots * below)
        new_slots += pop * below
    if settings.discipline == "queue":
        ratio, occupied = _mask_ratio(mask, j, kept, settings.tiny)
        grad_pop += tl.sum(ratio * stays, 1, keep_dims=True)
        new_slots += pop * ratio * grad_slots
        grad_following = tl.where(occupied, divide(pop * stays, tl.where(occupied, mask, 1)), 0)
        new_mask += _shift_down(grad_following, 0, j, kept) - ratio * grad_following
    return (new_slots, new_mask), push * first, (grad_push, grad_pop, grad_no_op)
