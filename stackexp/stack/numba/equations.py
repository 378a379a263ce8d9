"""The equations of `reference` for one stack and one token, and their gradients.

A stack is a `StackRow` of pointers to its slots, with the pushed vector in front and zeros behind. So one loop over
adjacent numbers updates all slots: new[i] = push old[i - D] + pop old[i + D] + no_op old[i]. `count` is the number of
occupied slots. Zeros and ones have the dtype of the row, because numba widens a float32 times an integer to float64.
Only two sums over the slots use float64: the softmax denominator and the mean of its gradient.

The `scratch` of a read has the arrays [N] weights (the softmax), contents (w_g . St[j]) and grads (dR . St[j], then the
gradients of the scores).
"""

import math
from typing import Any, NamedTuple

import numpy as np

from stackexp.stack.numba.vectors import add_outer, add_product, clear, copy, dot, plain, view
from stackexp.stack.reference import ADDITIVE_PENALTY

TOP, MULTIPLY, LOG, ADDITIVE = range(4)  # Sizes.read


class StackRow(NamedTuple):
    """The slots and mask of one stack, with an element in front for the push and two zero elements behind."""

    slots: Any  # [(1 + N + 2) * D]
    mask: Any  # [1 + N + 2]; the first is 1


@plain
def tiny(array):
    """Return the smallest normal number; smaller mask values count as 0."""
    return array.dtype.type(np.finfo(array.dtype).tiny)


@plain
def load_row(slots, mask, row, sizes):
    """Copy a state, slots [n * D] and mask [n], into a row."""
    size, count, rest = sizes.head_dim, mask.shape[0], sizes.last_slots + 2 - mask.shape[0]
    row.mask[0] = 1
    copy(slots, view(row.slots, size, count * size))
    clear(view(row.slots, size + count * size, rest * size))
    copy(mask, view(row.mask, 1, count))
    clear(view(row.mask, 1 + count, rest))


@plain
def store_row(row, slots, mask, sizes):
    """Copy the slots [n * D] and mask [n] of a row."""
    size, count = sizes.head_dim, mask.shape[0]
    copy(view(row.slots, size, count * size), slots)
    copy(view(row.mask, 1, count), mask)


@plain
def compute_action(logits, action):
    """Write a [3] of one head; return its entropy. Two logits are push and no-op."""
    last = logits.shape[0] - 1
    largest = logits[0]
    for i in range(1, last + 1):
        largest = max(largest, logits[i])
    action[1] = 0
    total = logits.dtype.type(0)
    for i in range(last + 1):
        weight = math.exp(logits[i] - largest)
        action[2 if i == last else i] = weight
        total += weight
    log_total = math.log(total)
    entropy = logits.dtype.type(0)
    for i in range(last + 1):
        a = action[2 if i == last else i] / total
        action[2 if i == last else i] = a
        entropy -= a * (logits[i] - largest - log_total)
    return entropy


@plain
def action_backward(action, grads, grad_entropy, entropy, grad_logits):
    """Write the gradient of the logits of one head. `grads`: of a_push, a_pop, a_noop."""
    g_push, g_pop, g_no_op = grads
    mean = action[0] * g_push + action[1] * g_pop + action[2] * g_no_op
    last = grad_logits.shape[0] - 1
    for i in range(last + 1):
        k = 2 if i == last else i
        g = g_push if k == 0 else g_pop if k == 1 else g_no_op
        gradient = action[k] * (g - mean)
        if grad_entropy != 0 and action[k] > 0:
            gradient -= grad_entropy * action[k] * (math.log(action[k]) + entropy)
        grad_logits[i] = gradient


@plain
def _mask_ratio(following, mask, smallest):
    """Return M[j+1] / M[j], or 0 in the same dtype if M[j] counts as 0."""
    return following / mask if mask >= smallest else smallest - smallest


@plain
def update_stack(old, new, action, count, sizes):
    """Write the row after an update, which has `count` slots. Return the sum of M'."""
    push, pop, no_op, size = action[0], action[1], action[2], sizes.head_dim
    total, smallest = count * size, tiny(action)
    above, here, below = view(old.slots, 0, total), view(old.slots, size, total), view(old.slots, 2 * size, total)
    out = view(new.slots, size, total)
    if sizes.is_queue:
        for j in range(count):
            keep = no_op + pop * _mask_ratio(old.mask[j + 2], old.mask[j + 1], smallest)
            for i in range(j * size, (j + 1) * size):
                out[i] = push * above[i] + keep * here[i]
    else:
        for i in range(total):
            out[i] = push * above[i] + pop * below[i] + no_op * here[i]
    clear(view(new.slots, size + total, 2 * size))
    new.mask[0] = 1
    mask, occupancy = view(new.mask, 1, count), action.dtype.type(0)
    for j in range(count):
        m = push * old.mask[j] + pop * old.mask[j + 2] + no_op * old.mask[j + 1]
        mask[j] = m
        occupancy += m
    clear(view(new.mask, count + 1, 2))
    return occupancy


@plain
def update_backward(old, action, grad_new, grad_old, counts, sizes, grad_x):
    """Write the gradients of the row before an update and of x; return those of a_push, a_pop, a_noop.

    `counts`: the occupied slots before and after the update.
    """
    push, pop, no_op, size = action[0], action[1], action[2], sizes.head_dim
    old_count, new_count = counts
    zero, smallest, total = action.dtype.type(0), tiny(action), new_count * size
    g_push, g_pop, g_no_op = zero, zero, zero
    above, here, below = view(old.slots, 0, total), view(old.slots, size, total), view(old.slots, 2 * size, total)
    g_above, g_here = view(grad_new.slots, 0, total), view(grad_new.slots, size, total)
    g_below, out = view(grad_new.slots, 2 * size, total), view(grad_old.slots, size, total)
    mask, g_mask, out_mask = old.mask, grad_new.mask, grad_old.mask
    if sizes.has_mask_grad:
        for j in range(1, new_count + 1):
            g = g_mask[j]
            g_push += g * mask[j - 1]
            g_pop += g * mask[j + 1]
            g_no_op += g * mask[j]
            out_mask[j] = push * g_mask[j + 1] + pop * g_mask[j - 1] + no_op * g
        clear(view(out_mask, new_count + 1, 2))
    if sizes.is_queue:
        for j in range(new_count):
            ratio = _mask_ratio(mask[j + 2], mask[j + 1], smallest)
            keep, g_keep = no_op + pop * ratio, zero
            for i in range(j * size, (j + 1) * size):
                g = g_here[i]
                g_push += g * above[i]
                g_keep += g * here[i]
                out[i] = push * g_below[i] + keep * g
            g_no_op += g_keep
            g_pop += g_keep * ratio
            if mask[j + 1] >= smallest:
                g_ratio = g_keep * pop / mask[j + 1]
                out_mask[j + 2] += g_ratio
                out_mask[j + 1] -= g_ratio * ratio
    else:
        for i in range(total):
            g = g_here[i]
            g_push += g * above[i]
            g_pop += g * below[i]
            g_no_op += g * here[i]
            out[i] = push * g_below[i] + pop * g_above[i] + no_op * g
    for i in range(size):
        grad_x[i] = push * g_here[i]
    clear(view(grad_old.slots, (old_count + 1) * size, 2 * size))
    clear(view(out_mask, old_count + 1, 2))
    return g_push, g_pop, g_no_op


@plain
def _compute_read_weights(row, query, count, sizes, scratch, grad_read):
    """Write the softmax of the global read, which includes the empty slots, and w_g . St[j].

    With `grad_read`, also write dR . St[j].
    """
    number, size, weights, smallest = query.dtype.type, query.shape[0], scratch.weights, tiny(query)
    empty_score = number(0)
    if sizes.read == LOG:
        empty_score = math.log(smallest)
    elif sizes.read == ADDITIVE:
        empty_score = number(ADDITIVE_PENALTY)
    for j in range(count):
        slot = view(row.slots, (j + 1) * size, size)
        scratch.contents[j] = dot(slot, query)
        if grad_read is not None:
            scratch.grads[j] = dot(slot, grad_read)
    if sizes.read == MULTIPLY:
        for j in range(count):
            weights[j] = scratch.contents[j] * row.mask[j + 1]
    elif sizes.read == LOG:
        for j in range(count):
            weights[j] = scratch.contents[j] + math.log(max(row.mask[j + 1], smallest))
    else:
        # in float64, because sums may be reordered: contents + penalty - M penalty in float32 would lose the contents
        for j in range(count):
            empty = 1.0 - np.float64(row.mask[j + 1])
            weights[j] = number(np.float64(scratch.contents[j]) + empty * ADDITIVE_PENALTY)
    largest = empty_score if sizes.num_slots > count else -number(np.inf)
    for j in range(count):
        largest = max(largest, weights[j])
    total = 0.0
    for j in range(count):
        weights[j] = math.exp(weights[j] - largest)
        total += weights[j]
    if sizes.num_slots > count:
        total += number(sizes.num_slots - count) * math.exp(empty_score - largest)
    for j in range(count):
        weights[j] /= number(total)


@plain
def read_stack(row, query, count, sizes, scratch, out):
    """Write R [D]."""
    size = out.shape[0]
    if sizes.read == TOP:
        copy(view(row.slots, size, size), out)
        return
    _compute_read_weights(row, query, count, sizes, scratch, None)
    clear(out)
    add_product(view(scratch.weights, 0, count), view(row.slots, size, count * size), out)


@plain
def read_backward(row, query, count, sizes, scratch, grad_read, grad_row, grad_query):
    """Add the gradients of the row and of w_g."""
    size = query.shape[0]
    if sizes.read == TOP:
        top = view(grad_row.slots, size, size)
        for i in range(size):
            top[i] += grad_read[i]
        return
    _compute_read_weights(row, query, count, sizes, scratch, grad_read)
    weights, grads, number = scratch.weights, scratch.grads, query.dtype.type
    mean, penalty, smallest = 0.0, number(ADDITIVE_PENALTY), tiny(query)  # mean is dR . R
    for j in range(count):
        mean += weights[j] * grads[j]
    for j in range(count):
        grads[j] = weights[j] * number(grads[j] - mean)  # of the scores
    if sizes.read == MULTIPLY:
        for j in range(count):
            grad_row.mask[j + 1] += grads[j] * scratch.contents[j]
            grads[j] *= row.mask[j + 1]
    elif sizes.read == LOG:
        for j in range(count):
            if row.mask[j + 1] >= smallest:
                grad_row.mask[j + 1] += grads[j] / row.mask[j + 1]
    else:
        for j in range(count):
            grad_row.mask[j + 1] -= grads[j] * penalty
    add_product(view(grads, 0, count), view(row.slots, size, count * size), grad_query)
    add_outer(
        view(weights, 0, count), grad_read, view(grads, 0, count), query, view(grad_row.slots, size, count * size)
    )
