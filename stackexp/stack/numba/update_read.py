"""A token's part of the kernels of `compiled`: actions, the update and the read of one stack, and their gradients.

Equations and their order as in `reference`. `tiny` is the smallest normal number of the dtype, below which a mask is 0.
Zeros and ones have the dtype too: numba takes a float32 times an integer for float64, and all sums with it. Only two
sums over the slots are in float64 always: those that all weights of a read, or all their gradients, depend on.
"""

import math

import numpy as np

from stackexp.stack.numba.vectors import (
    LANES,
    add_outer,
    add_product,
    clear,
    copy,
    dot,
    exp_vectors,
    part,
    plain,
    view,
)
from stackexp.stack.reference import ADDITIVE_PENALTY

TOP, MULTIPLY, LOG, ADDITIVE = range(4)  # how to read


@plain
def softmax(logits, action):
    """a of one head into action [3]; its entropy. Two logits are push and no-op."""
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
def _ratio(following, mask, tiny):
    """M[j+1] / M[j], 0 where M[j] is."""
    return following / mask if mask >= tiny else tiny - tiny


@plain
def update(old, new, old_mask, new_mask, action, grown, size, queue, tiny):
    """The row of a state into the row of the next, of `grown` slots of `size` numbers; sum of M'."""
    push, pop, no_op = action[0], action[1], action[2]
    total = grown * size
    here, raised, out = view(old, size, total), view(old, 2 * size, total), view(new, size, total)
    if queue:
        for j in range(grown):
            stays = no_op + pop * _ratio(old_mask[j + 2], old_mask[j + 1], tiny)
            for i in range(j * size, (j + 1) * size):
                out[i] = push * old[i] + stays * here[i]
    else:
        for i in range(total):
            out[i] = push * old[i] + pop * raised[i] + no_op * here[i]
    clear(view(new, size + total, 2 * size))
    here, raised, out = view(old_mask, 1, grown), view(old_mask, 2, grown), view(new_mask, 1, grown)
    occupancy = old_mask.dtype.type(0)
    for j in range(grown):
        mask = push * old_mask[j] + pop * raised[j] + no_op * here[j]
        out[j] = mask
        occupancy += mask
    clear(view(new_mask, grown + 1, 2))
    return occupancy


@plain
def _weigh(row, mask, query, how, slots, num_slots, weights, g_read, tiny):
    """The softmax of the global read, in which the empty slots count; a third of `weights` on, w_g . St[j]; and with
    the read's gradient, two thirds on, its dR . St[j]."""
    size, third = query.shape[0], weights.shape[0] // 3
    contents, g_weights = part(weights, 1, third), part(weights, 2, third)
    number = mask.dtype.type
    penalty, empty_score, one = number(ADDITIVE_PENALTY), number(0), number(1)
    if how == LOG:
        empty_score = math.log(tiny)
    elif how == ADDITIVE:
        empty_score = penalty
    for j in range(slots):
        slot = view(row, (j + 1) * size, size)
        contents[j] = dot(slot, query)
        if g_read is not None:
            g_weights[j] = dot(slot, g_read)
    if how == MULTIPLY:
        for j in range(slots):
            weights[j] = contents[j] * mask[j + 1]
    elif how == LOG:
        for j in range(slots):
            weights[j] = contents[j] + math.log(max(mask[j + 1], tiny))
    else:
        for j in range(slots):
            weights[j] = contents[j] + (one - mask[j + 1]) * penalty
    largest = empty_score if num_slots > slots else -number(np.inf)
    for j in range(slots):
        largest = max(largest, weights[j])
    total = 0.0
    for j in range(slots):
        weights[j] -= largest
    for j in range(0, slots, LANES):
        exp_vectors(weights, j)
    for j in range(slots):
        total += weights[j]
    if num_slots > slots:
        total += number(num_slots - slots) * math.exp(empty_score - largest)
    for j in range(slots):
        weights[j] /= number(total)


@plain
def read_row(row, mask, query, how, slots, num_slots, weights, out, tiny):
    """R [D] into `out`."""
    size = out.shape[0]
    if how == TOP:
        copy(view(row, size, size), out)
        return
    _weigh(row, mask, query, how, slots, num_slots, weights, None, tiny)
    clear(out)
    add_product(view(weights, 0, slots), view(row, size, slots * size), out)


@plain
def load(slots, mask, row, row_mask):
    """A state, slots [n * D] and mask [n], into a row, with zeros behind."""
    numbers, count = slots.shape[0], mask.shape[0]
    size = row.shape[0] // row_mask.shape[0]
    copy(slots, view(row, size, numbers))
    clear(view(row, size + numbers, row.shape[0] - size - numbers))
    copy(mask, view(row_mask, 1, count))
    clear(view(row_mask, 1 + count, row_mask.shape[0] - 1 - count))


@plain
def read_back(row, mask, query, how, slots, num_slots, weights, g_read, grad, g_mask, g_query, tiny):
    """Add to the gradients of a row and its mask, and of w_g, what the read's gradient gives."""
    size = query.shape[0]
    if how == TOP:
        top = view(grad, size, size)
        for i in range(size):
            top[i] += g_read[i]
        return
    _weigh(row, mask, query, how, slots, num_slots, weights, g_read, tiny)
    third = weights.shape[0] // 3
    contents, g_weights = part(weights, 1, third), part(weights, 2, third)
    mean = 0.0  # dR . R
    for j in range(slots):
        mean += weights[j] * g_weights[j]
    penalty = mask.dtype.type(ADDITIVE_PENALTY)
    for j in range(slots):
        g_weights[j] = weights[j] * mask.dtype.type(g_weights[j] - mean)  # the score's
    if how == MULTIPLY:
        for j in range(slots):
            g_mask[j + 1] += g_weights[j] * contents[j]
            g_weights[j] *= mask[j + 1]
    elif how == LOG:
        for j in range(slots):
            if mask[j + 1] >= tiny:
                g_mask[j + 1] += g_weights[j] / mask[j + 1]
    else:
        for j in range(slots):
            g_mask[j + 1] -= g_weights[j] * penalty
    add_product(view(g_weights, 0, slots), view(row, size, slots * size), g_query)
    add_outer(view(weights, 0, slots), g_read, g_weights, query, view(grad, size, slots * size))


@plain
def update_back(old, old_mask, action, new, g_mask, out, out_mask, before, grown, size, queue, use_mask, tiny, g_x):
    """Gradients of an update: of the state before it (`before` slots) into `out`, of x into g_x; of the action.

    new, g_mask: those of the state after it (`grown` slots).
    """
    push, pop, no_op = action[0], action[1], action[2]
    zero = old.dtype.type(0)
    g_push, g_pop, g_no_op = zero, zero, zero
    total = grown * size
    here, raised = view(old, size, total), view(old, 2 * size, total)
    g_here, g_raised, g_old = view(new, size, total), view(new, 2 * size, total), view(out, size, total)
    if use_mask:
        for j in range(1, grown + 1):
            g = g_mask[j]
            g_push += g * old_mask[j - 1]
            g_pop += g * old_mask[j + 1]
            g_no_op += g * old_mask[j]
            out_mask[j] = push * g_mask[j + 1] + pop * g_mask[j - 1] + no_op * g
        clear(view(out_mask, grown + 1, 2))
    if queue:
        for j in range(grown):
            ratio = _ratio(old_mask[j + 2], old_mask[j + 1], tiny)
            stays, g_stays = no_op + pop * ratio, zero
            for i in range(j * size, (j + 1) * size):
                g = g_here[i]
                g_push += g * old[i]
                g_stays += g * here[i]
                g_old[i] = push * g_raised[i] + stays * g
            g_no_op += g_stays
            g_pop += g_stays * ratio
            if old_mask[j + 1] >= tiny:
                g_ratio = g_stays * pop / old_mask[j + 1]
                out_mask[j + 2] += g_ratio
                out_mask[j + 1] -= g_ratio * ratio
    else:
        for i in range(total):
            g = g_here[i]
            g_push += g * old[i]
            g_pop += g * raised[i]
            g_no_op += g * here[i]
            g_old[i] = push * g_raised[i] + pop * new[i] + no_op * g
    for i in range(size):
        g_x[i] = push * g_here[i]
    clear(view(out, (before + 1) * size, 2 * size))
    clear(view(out_mask, before + 1, 2))
    return g_push, g_pop, g_no_op


@plain
def softmax_back(action, g_push, g_pop, g_no_op, g_entropy, entropy, g_logits):
    """Gradients of the logits of one head, from those of the action and of its entropy."""
    mean = action[0] * g_push + action[1] * g_pop + action[2] * g_no_op
    last = g_logits.shape[0] - 1
    for i in range(last + 1):
        k = 2 if i == last else i
        g = g_push if k == 0 else g_pop if k == 1 else g_no_op
        gradient = action[k] * (g - mean)
        if g_entropy != 0 and action[k] > 0:
            gradient -= g_entropy * action[k] * (math.log(action[k]) + entropy)
        g_logits[i] = gradient
