"""The loops of `compiled`: a scan over the tokens, and its gradients, for the sequences begin .. end - 1 of a batch.

Shapes are those of `reference`, the heads flat: x [B, T, H*D], logits [B, T, H*A], action [B, T, H*3]. A stack in work
lies in a row of a scratch buffer, slot -1 (what a push pushes) in front and zeros behind: the update of all its slots
is one loop over contiguous numbers, `new[i] = push old[i - D] + pop old[i + D] + no_op old[i]`. Heads are walked one
after the other; with feedback, which mixes them, all at once.

Backward, the states of a segment of `every` tokens are computed anew from the one kept at its start.
"""

import math

import numpy as np
from numba import njit

from stackexp.stack.reference import ADDITIVE_PENALTY

TOP, MULTIPLY, LOG, ADDITIVE = range(4)  # how to read
SUMS = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; infinities and NaN stay what they are
compiled = njit(nogil=True, cache=True, fastmath=SUMS, error_model="numpy")


@compiled
def _softmax(logits, action):
    """a of one head into action [3]; its entropy. Two logits are push and no-op."""
    count = logits.shape[0]
    last = count - 1
    largest = logits[0]
    for i in range(1, count):
        largest = max(largest, logits[i])
    action[1] = 0
    total = logits.dtype.type(0)
    for i in range(count):
        weight = math.exp(logits[i] - largest)
        action[2 if i == last else i] = weight
        total += weight
    log_total = math.log(total)
    entropy = logits.dtype.type(0)
    for i in range(count):
        log_a = logits[i] - largest - log_total
        a = action[2 if i == last else i] / total
        action[2 if i == last else i] = a
        entropy -= a * log_a
    return entropy


@compiled
def _ratio(following, mask, tiny):
    """M[j+1] / M[j], 0 where M[j] is."""
    return following / mask if mask >= tiny else following * 0


@compiled
def _update(old, new, old_mask, new_mask, action, grown, size, queue, tiny):
    """The row of a state into the row of the next, of `grown` slots of `size` numbers; sum of M'."""
    push, pop, no_op = action[0], action[1], action[2]
    total = grown * size
    lowered, here, raised = old[:total], old[size : size + total], old[2 * size : 2 * size + total]
    out = new[size : size + total]
    if queue:
        for j in range(grown):
            stays = no_op + pop * _ratio(old_mask[j + 2], old_mask[j + 1], tiny)
            for i in range(j * size, (j + 1) * size):
                out[i] = push * lowered[i] + stays * here[i]
    else:
        for i in range(total):
            out[i] = push * lowered[i] + pop * raised[i] + no_op * here[i]
    new[size + total : 3 * size + total] = 0
    occupancy = new.dtype.type(0)
    for j in range(grown):
        mask = push * old_mask[j] + pop * old_mask[j + 2] + no_op * old_mask[j + 1]
        new_mask[j + 1] = mask
        occupancy += mask
    new_mask[grown + 1 : grown + 3] = 0
    return occupancy


@compiled
def _scores(row, mask, query, how, slots, num_slots, weights, tiny):
    """Weights [slots] of the global read: their softmax with that of the empty slots."""
    size = query.shape[0]
    empty_score = row.dtype.type(0)
    if how == LOG:
        empty_score = math.log(tiny)
    elif how == ADDITIVE:
        empty_score = row.dtype.type(ADDITIVE_PENALTY)
    largest = empty_score if num_slots > slots else row.dtype.type(-np.inf)
    for j in range(slots):
        score = row.dtype.type(0)
        slot = row[(j + 1) * size : (j + 2) * size]
        for i in range(size):
            score += slot[i] * query[i]
        if how == MULTIPLY:
            score *= mask[j + 1]
        elif how == LOG:
            score += math.log(max(mask[j + 1], tiny))
        else:
            score += (1 - mask[j + 1]) * row.dtype.type(ADDITIVE_PENALTY)
        weights[j] = score
        largest = max(largest, score)
    total = row.dtype.type(0)
    for j in range(slots):
        weights[j] = math.exp(weights[j] - largest)
        total += weights[j]
    if num_slots > slots:
        total += (num_slots - slots) * math.exp(empty_score - largest)
    for j in range(slots):
        weights[j] /= total


@compiled
def _read(row, mask, query, how, slots, num_slots, weights, out, tiny):
    """R [D] into `out`."""
    size = out.shape[0]
    if how == TOP:
        out[:] = row[size : 2 * size]
        return
    _scores(row, mask, query, how, slots, num_slots, weights, tiny)
    out[:] = 0
    for j in range(slots):
        slot = row[(j + 1) * size : (j + 2) * size]
        for i in range(size):
            out[i] += weights[j] * slot[i]


@compiled
def _load(slots, mask, row, row_mask):
    """A state [n, D], [n] into a row, with zeros behind."""
    count, size = slots.shape
    for j in range(count):
        row[(j + 1) * size : (j + 2) * size] = slots[j]
        row_mask[j + 1] = mask[j]
    row[(count + 1) * size :] = 0
    row_mask[count + 1 :] = 0


@compiled
def _store(row, row_mask, slots, mask):
    """The first n slots of a row into a state [n, D], [n]."""
    count, size = slots.shape
    for j in range(count):
        slots[j] = row[(j + 1) * size : (j + 2) * size]
        mask[j] = row_mask[j + 1]


@compiled
def _activate(read, tanh, fed):
    for i in range(fed.shape[0]):
        fed[i] = math.tanh(read[i]) if tanh else read[i]


@compiled
def _add_product(vector, matrix, out):
    """out [n] += vector [m] matrix [m, n]."""
    for k in range(vector.shape[0]):
        factor, line = vector[k], matrix[k]
        for i in range(out.shape[0]):
            out[i] += factor * line[i]


@compiled
def forward(begin, end, options, given, inputs, outputs, kept):
    """Fill `outputs` and, for the backward pass, `kept` (of size 0 where there will be none)."""
    num_slots, how, queue, tanh, every = options
    slots, mask = given
    x, logits, query, maps = inputs  # maps [H*D, H*D + H*A] or of size 0: P and Q beside each other
    read, action, entropy, occupancy, last_slots, last_mask = outputs
    pushed, first_read, states, masks = kept
    heads, start, size = slots.shape[1:]
    tokens, count = x.shape[1], logits.shape[2] // heads
    feedback, tiny = maps.size > 0, x.dtype.type(np.finfo(x.dtype).tiny)
    room, group = min(start + tokens, num_slots), heads if feedback else 1
    rows = np.zeros((group, 2, (room + 3) * size), x.dtype)
    row_masks = np.zeros((group, 2, room + 3), x.dtype)
    row_masks[:, :, 0] = 1
    weights, fed, mixed = np.zeros(room, x.dtype), np.zeros(heads * size, x.dtype), np.zeros(maps.shape[1], x.dtype)
    for b in range(begin, end):
        for first in range(0, heads, group):
            for k in range(group):
                h = first + k
                _load(slots[b, h], mask[b, h], rows[k, 0], row_masks[k, 0])
                if feedback:
                    out = first_read[b, h * size : (h + 1) * size]
                    _read(rows[k, 0], row_masks[k, 0], query[h], how, start, num_slots, weights, out, tiny)
            if feedback:
                _activate(first_read[b], tanh, fed)
            for t in range(tokens):
                grown, now = min(start + t + 1, num_slots), t % 2
                if feedback:
                    mixed[: heads * size] = x[b, t]
                    mixed[heads * size :] = logits[b, t]
                    _add_product(fed, maps, mixed)
                for k in range(group):
                    h = first + k
                    at = h * size
                    row, row_mask = rows[k, now], row_masks[k, now]
                    if states.size and t and t % every == 0:
                        _store(row, row_mask, states[b, h, t // every - 1], masks[b, h, t // every - 1])
                    if feedback:
                        row[:size] = mixed[at : at + size]
                        own = mixed[heads * size + h * count : heads * size + (h + 1) * count]
                        if pushed.size:
                            pushed[b, t, at : at + size] = row[:size]
                    else:
                        row[:size] = x[b, t, at : at + size]
                        own = logits[b, t, h * count : (h + 1) * count]
                    chosen = action[b, t, 3 * h : 3 * h + 3]
                    entropy[b, t, h] = _softmax(own, chosen)
                    new, new_mask = rows[k, 1 - now], row_masks[k, 1 - now]
                    occupancy[b, t, h] = _update(row, new, row_mask, new_mask, chosen, grown, size, queue, tiny)
                    out = read[b, t, at : at + size]
                    _read(new, new_mask, query[h], how, grown, num_slots, weights, out, tiny)
                if feedback:
                    _activate(read[b, t], tanh, fed)
            for k in range(group):
                h = first + k
                _store(rows[k, tokens % 2], row_masks[k, tokens % 2], last_slots[b, h], last_mask[b, h])


@compiled
def _read_back(row, mask, query, how, slots, num_slots, weights, g_read, grad, g_mask, g_query, tiny):
    """Add to the gradients of a row and its mask, and of w_g, what the read's gradient gives."""
    size = query.shape[0]
    if how == TOP:
        for i in range(size):
            grad[size + i] += g_read[i]
        return
    _scores(row, mask, query, how, slots, num_slots, weights, tiny)
    mean = row.dtype.type(0)  # dR . R
    for j in range(slots):
        slot = row[(j + 1) * size : (j + 2) * size]
        for i in range(size):
            mean += weights[j] * slot[i] * g_read[i]
    for j in range(slots):
        slot, g_slot = row[(j + 1) * size : (j + 2) * size], grad[(j + 1) * size : (j + 2) * size]
        g_weight, content = row.dtype.type(0), row.dtype.type(0)
        for i in range(size):
            g_weight += slot[i] * g_read[i]
            content += slot[i] * query[i]
        g_score = weights[j] * (g_weight - mean)
        factor = g_score
        if how == MULTIPLY:
            g_mask[j + 1] += g_score * content
            factor = g_score * mask[j + 1]
        elif how == LOG:
            if mask[j + 1] >= tiny:
                g_mask[j + 1] += g_score / mask[j + 1]
        else:
            g_mask[j + 1] -= g_score * row.dtype.type(ADDITIVE_PENALTY)
        for i in range(size):
            g_slot[i] += weights[j] * g_read[i] + factor * query[i]
            g_query[i] += factor * slot[i]


@compiled
def _update_back(old, old_mask, action, new, g_mask, out, out_mask, before, grown, size, queue, use_mask, tiny, g_x):
    """Gradients of an update: of the state before it (`before` slots) into `out`, of x into g_x; of the action.

    new, g_mask: those of the state after it (`grown` slots).
    """
    push, pop, no_op = action[0], action[1], action[2]
    zero = old.dtype.type(0)
    g_push, g_pop, g_no_op = zero, zero, zero
    total = grown * size
    lowered, here, raised = old[:total], old[size : size + total], old[2 * size : 2 * size + total]
    g_lowered, g_here, g_raised = new[:total], new[size : size + total], new[2 * size : 2 * size + total]
    g_old = out[size : size + total]
    if use_mask:
        for j in range(1, grown + 1):
            g = g_mask[j]
            g_push += g * old_mask[j - 1]
            g_pop += g * old_mask[j + 1]
            g_no_op += g * old_mask[j]
            out_mask[j] = push * g_mask[j + 1] + pop * g_mask[j - 1] + no_op * g
        out_mask[1] -= pop * g_mask[0]
    if queue:
        for j in range(grown):
            ratio = _ratio(old_mask[j + 2], old_mask[j + 1], tiny)
            stays, g_stays = no_op + pop * ratio, zero
            for i in range(j * size, (j + 1) * size):
                g = g_here[i]
                g_push += g * lowered[i]
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
            g_push += g * lowered[i]
            g_pop += g * raised[i]
            g_no_op += g * here[i]
            g_old[i] = push * g_raised[i] + pop * g_lowered[i] + no_op * g
    for i in range(size):
        g_x[i] = push * g_here[i]
    out[(before + 1) * size : (before + 3) * size] = 0
    out_mask[before + 1 : before + 3] = 0
    return g_push, g_pop, g_no_op


@compiled
def _softmax_back(action, g_push, g_pop, g_no_op, g_entropy, entropy, g_logits):
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


@compiled
def backward(begin, end, options, given, inputs, outputs, kept, incoming, outgoing):
    """Fill `outgoing`: the gradients of the state, x, the logits and w_g (one for each sequence).

    `incoming`: those of read, action, entropy and the last state, each of size 0 if there is none.
    """
    num_slots, how, queue, tanh, every = options
    slots, mask = given
    pushed, fed, query, maps = inputs  # maps [H*D + H*A, H*D], transposed; fed [B, T, H*D]: what was fed back to t
    action, entropy = outputs
    states, masks = kept
    in_read, in_action, in_entropy, in_slots, in_mask = incoming
    g_slots, g_mask, g_x, g_logits, g_query = outgoing
    heads, start, size = slots.shape[1:]
    tokens, count, width = pushed.shape[1], g_logits.shape[2] // heads, heads * size
    feedback, tiny = maps.size > 0, pushed.dtype.type(np.finfo(pushed.dtype).tiny)
    use_mask = queue or how != TOP or in_mask.size > 0
    room, group = min(start + tokens, num_slots), heads if feedback else 1
    rows = np.zeros((group, every + 1, (room + 3) * size), pushed.dtype)
    row_masks = np.zeros((group, every + 1, room + 3), pushed.dtype)
    row_masks[:, :, 0] = 1
    grads = np.zeros((group, 2, (room + 3) * size), pushed.dtype)
    grad_masks = np.zeros((group, 2, room + 3), pushed.dtype)
    weights, g_read = np.zeros(room, pushed.dtype), np.zeros(size, pushed.dtype)
    g_fed, g_mixed = np.zeros(width, pushed.dtype), np.zeros(maps.shape[0], pushed.dtype)
    for b in range(begin, end):
        for first in range(0, heads, group):
            g_fed[:] = 0
            grads[:, tokens % 2] = 0
            grad_masks[:, tokens % 2] = 0
            for k in range(group):
                if in_slots.size:
                    for j in range(in_slots.shape[2]):
                        grads[k, tokens % 2, (j + 1) * size : (j + 2) * size] = in_slots[b, first + k, j]
                if in_mask.size:
                    grad_masks[k, tokens % 2, 1 : 1 + in_mask.shape[2]] = in_mask[b, first + k]
            for segment in range((tokens - 1) // every, -1, -1):
                begun, ended = segment * every, min((segment + 1) * every, tokens)
                for k in range(group):
                    h = first + k
                    if segment:
                        held = min(start + begun, num_slots)
                        state, state_mask = states[b, h, segment - 1, :held], masks[b, h, segment - 1, :held]
                    else:
                        state, state_mask = slots[b, h], mask[b, h]
                    _load(state, state_mask, rows[k, 0], row_masks[k, 0])
                    for t in range(begun, ended):
                        i = t - begun
                        rows[k, i, :size] = pushed[b, t, h * size : (h + 1) * size]
                        if t + 1 < ended or how != TOP:
                            chosen, grown = action[b, t, 3 * h : 3 * h + 3], min(start + t + 1, num_slots)
                            row, row_mask = rows[k, i], row_masks[k, i]
                            new, new_mask = rows[k, i + 1], row_masks[k, i + 1]
                            _update(row, new, row_mask, new_mask, chosen, grown, size, queue, tiny)
                for t in range(ended - 1, begun - 1, -1):
                    i, now = t - begun, (t + 1) % 2
                    before, grown = min(start + t, num_slots), min(start + t + 1, num_slots)
                    for k in range(group):
                        h = first + k
                        at = h * size
                        grad, grad_mask = grads[k, now], grad_masks[k, now]
                        if in_read.size:
                            g_read[:] = in_read[b, t, at : at + size]
                        else:
                            g_read[:] = 0
                        if feedback:
                            for d in range(size):
                                g_read[d] += g_fed[at + d]
                        row, row_mask = rows[k, i + 1], row_masks[k, i + 1]
                        _read_back(
                            row, row_mask, query[h], how, grown, num_slots, weights, g_read,
                            grad, grad_mask, g_query[b, h], tiny,
                        )  # fmt: skip
                        chosen = action[b, t, 3 * h : 3 * h + 3]
                        g_push, g_pop, g_no_op = _update_back(
                            rows[k, i], row_masks[k, i], chosen, grad, grad_mask, grads[k, 1 - now],
                            grad_masks[k, 1 - now], before, grown, size, queue, use_mask, tiny,
                            g_x[b, t, at : at + size],
                        )  # fmt: skip
                        if in_action.size:
                            g_push += in_action[b, t, 3 * h]
                            g_pop += in_action[b, t, 3 * h + 1]
                            g_no_op += in_action[b, t, 3 * h + 2]
                        of_entropy = in_entropy[b, t, h] if in_entropy.size else tiny * 0
                        own = g_logits[b, t, h * count : (h + 1) * count]
                        _softmax_back(chosen, g_push, g_pop, g_no_op, of_entropy, entropy[b, t, h], own)
                    if feedback:
                        g_mixed[:width] = g_x[b, t]
                        g_mixed[width:] = g_logits[b, t]
                        g_fed[:] = 0
                        _add_product(g_mixed, maps, g_fed)
                        if tanh:
                            for d in range(width):
                                g_fed[d] *= 1 - fed[b, t, d] * fed[b, t, d]
            for k in range(group):
                h = first + k
                if feedback and start:  # R_{-1} was read from the given state
                    _load(slots[b, h], mask[b, h], rows[k, 0], row_masks[k, 0])
                    _read_back(
                        rows[k, 0], row_masks[k, 0], query[h], how, start, num_slots, weights,
                        g_fed[h * size : (h + 1) * size], grads[k, 0], grad_masks[k, 0], g_query[b, h], tiny,
                    )  # fmt: skip
                if g_slots.size:
                    _store(grads[k, 0], grad_masks[k, 0], g_slots[b, h], g_mask[b, h])
