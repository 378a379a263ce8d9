"""The loops of `compiled`: a scan over the tokens, and its gradients, for the sequences begin .. end - 1 of a batch.

Arrays are flat and contiguous; in the order of `reference`'s dimensions unless a comment says otherwise. A stack in
work lies in a row of a scratch buffer, slot -1 (what a push pushes) in front and zeros behind: the update of all its
slots is one loop over contiguous numbers, new[i] = push old[i - D] + pop old[i + D] + no_op old[i]. Heads are walked
one after the other; with feedback, which mixes them, all at once.

Backward, the states of a segment of `every` tokens are computed anew from the one kept at its start.
"""

import math

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from stackexp.stack.reference import ADDITIVE_PENALTY

TOP, MULTIPLY, LOG, ADDITIVE = range(4)  # how to read
SUMS = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; infinities and NaN stay what they are
compiled = njit(nogil=True, cache=True, fastmath=SUMS, error_model="numpy")


@intrinsic
def view(typing_context, array, start, count):
    """array[start : start + count], not counted as a reference (an atomic addition for each) and not checked.

    The array must outlive it.
    """

    def generate(context, builder, signature, arguments):
        whole = make_array(signature.args[0])(context, builder, arguments[0])
        part = make_array(signature.return_type)(context, builder)
        size = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(array.dtype)))
        data = cgutils.gep_inbounds(builder, whole.data, arguments[1])
        populate_array(part, data=data, shape=[arguments[2]], strides=[size], itemsize=size, meminfo=None)
        return part._getvalue()

    return types.Array(array.dtype, 1, "C")(array, types.intp, types.intp), generate


@compiled
def _copy(source, target):
    for i in range(target.shape[0]):
        target[i] = source[i]


@compiled
def _clear(target):
    for i in range(target.shape[0]):
        target[i] = 0


@compiled
def _softmax(logits, action):
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


@compiled
def _ratio(following, mask, tiny):
    """M[j+1] / M[j], 0 where M[j] is."""
    return following / mask if mask >= tiny else tiny * 0


@compiled
def _update(old, new, old_mask, new_mask, action, grown, size, queue, tiny):
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
    _clear(view(new, size + total, 2 * size))
    here, raised, out = view(old_mask, 1, grown), view(old_mask, 2, grown), view(new_mask, 1, grown)
    occupancy = tiny * 0
    for j in range(grown):
        mask = push * old_mask[j] + pop * raised[j] + no_op * here[j]
        out[j] = mask
        occupancy += mask
    _clear(view(new_mask, grown + 1, 2))
    return occupancy


@compiled
def _weigh(row, mask, query, how, slots, num_slots, weights, tiny):
    """Weights [slots] of the global read: their softmax with that of the empty slots."""
    size = query.shape[0]
    penalty, empty_score = mask.dtype.type(ADDITIVE_PENALTY), tiny * 0
    if how == LOG:
        empty_score = math.log(tiny)
    elif how == ADDITIVE:
        empty_score = penalty
    largest = empty_score if num_slots > slots else -mask.dtype.type(np.inf)
    for j in range(slots):
        slot = view(row, (j + 1) * size, size)
        score = tiny * 0
        for i in range(size):
            score += slot[i] * query[i]
        if how == MULTIPLY:
            score *= mask[j + 1]
        elif how == LOG:
            score += math.log(max(mask[j + 1], tiny))
        else:
            score += (1 - mask[j + 1]) * penalty
        weights[j] = score
        largest = max(largest, score)
    total = tiny * 0
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
        _copy(view(row, size, size), out)
        return
    _weigh(row, mask, query, how, slots, num_slots, weights, tiny)
    _clear(out)
    for j in range(slots):
        slot = view(row, (j + 1) * size, size)
        for i in range(size):
            out[i] += weights[j] * slot[i]


@compiled
def _load(slots, mask, row, row_mask):
    """A state, slots [n * D] and mask [n], into a row, with zeros behind."""
    numbers, count = slots.shape[0], mask.shape[0]
    size = row.shape[0] // row_mask.shape[0]
    _copy(slots, view(row, size, numbers))
    _clear(view(row, size + numbers, row.shape[0] - size - numbers))
    _copy(mask, view(row_mask, 1, count))
    _clear(view(row_mask, 1 + count, row_mask.shape[0] - 1 - count))


@compiled
def _activate(read, tanh, fed):
    for i in range(fed.shape[0]):
        fed[i] = math.tanh(read[i]) if tanh else read[i]


@compiled
def _add_product(vector, matrix, out):
    """out [n] += vector [m] matrix [m, n]."""
    columns = out.shape[0]
    for k in range(vector.shape[0]):
        factor, line = vector[k], view(matrix, k * columns, columns)
        for i in range(columns):
            out[i] += factor * line[i]


@compiled
def forward(begin, end, options, inputs, outputs, kept):
    """Fill `outputs` and, for the backward pass, `kept` (of size 0 where there will be none)."""
    tokens, heads, size, count, start, num_slots, how, queue, tanh, every = options
    slots, mask, x, logits, query, maps = inputs  # maps [H*D, H*D + H*A] or of size 0: P and Q beside each other
    read, action, entropy, occupancy, last_slots, last_mask = outputs
    pushed, first_read, states, masks = kept  # states [B, H, segments - 1, room, D]
    feedback, tiny, dtype = maps.size > 0, np.finfo(x.dtype).tiny, x.dtype
    tiny = x.dtype.type(tiny)
    room, group, width = min(start + tokens, num_slots), heads if feedback else 1, heads * size
    segments, span = (tokens - 1) // every, (room + 3) * size
    rows, row_masks = np.zeros(group * 2 * span, dtype), np.zeros(group * 2 * (room + 3), dtype)
    weights, fed, mixed = np.zeros(room, dtype), np.zeros(width, dtype), np.zeros(width + heads * count, dtype)
    for i in range(group * 2):
        row_masks[i * (room + 3)] = 1
    for b in range(begin, end):
        for first in range(0, heads, group):
            for k in range(group):
                at = b * heads + first + k
                row, row_mask = view(rows, 2 * k * span, span), view(row_masks, 2 * k * (room + 3), room + 3)
                _load(view(slots, at * start * size, start * size), view(mask, at * start, start), row, row_mask)
                if feedback:
                    own, out = view(query, (first + k) * size, size), view(first_read, at * size, size)
                    _read(row, row_mask, own, how, start, num_slots, weights, out, tiny)
            if feedback:
                _activate(view(first_read, b * width, width), tanh, fed)
            for t in range(tokens):
                grown, here, now = min(start + t + 1, num_slots), b * tokens + t, t % 2
                if feedback:
                    _copy(view(x, here * width, width), view(mixed, 0, width))
                    _copy(view(logits, here * heads * count, heads * count), view(mixed, width, heads * count))
                    _add_product(fed, maps, mixed)
                    if pushed.size:
                        _copy(mixed, view(pushed, here * width, width))
                for k in range(group):
                    h = first + k
                    at = here * heads + h
                    own, out = view(query, h * size, size), view(read, at * size, size)
                    row, row_mask = (
                        view(rows, (2 * k + now) * span, span),
                        view(row_masks, (2 * k + now) * (room + 3), room + 3),
                    )
                    new, new_mask = (
                        view(rows, (2 * k + 1 - now) * span, span),
                        view(row_masks, (2 * k + 1 - now) * (room + 3), room + 3),
                    )
                    if states.size and t and t % every == 0:
                        place = ((b * heads + h) * segments + t // every - 1) * room
                        _copy(view(row, size, room * size), view(states, place * size, room * size))
                        _copy(view(row_mask, 1, room), view(masks, place, room))
                    chosen = view(action, at * 3, 3)
                    if feedback:
                        _copy(view(mixed, h * size, size), view(row, 0, size))
                        entropy[at] = _softmax(view(mixed, width + h * count, count), chosen)
                    else:
                        _copy(view(x, at * size, size), view(row, 0, size))
                        entropy[at] = _softmax(view(logits, at * count, count), chosen)
                    occupancy[at] = _update(row, new, row_mask, new_mask, chosen, grown, size, queue, tiny)
                    _read(new, new_mask, own, how, grown, num_slots, weights, out, tiny)
                if feedback:
                    _activate(view(read, here * width, width), tanh, fed)
            for k in range(group):
                at = b * heads + first + k
                _copy(
                    view(rows, (2 * k + tokens % 2) * span + size, room * size),
                    view(last_slots, at * room * size, room * size),
                )
                _copy(view(row_masks, (2 * k + tokens % 2) * (room + 3) + 1, room), view(last_mask, at * room, room))


@compiled
def _read_back(row, mask, query, how, slots, num_slots, weights, g_read, grad, g_mask, g_query, tiny):
    """Add to the gradients of a row and its mask, and of w_g, what the read's gradient gives."""
    size = query.shape[0]
    if how == TOP:
        top = view(grad, size, size)
        for i in range(size):
            top[i] += g_read[i]
        return
    _weigh(row, mask, query, how, slots, num_slots, weights, tiny)
    mean = tiny * 0  # dR . R
    for j in range(slots):
        slot = view(row, (j + 1) * size, size)
        of_slot = tiny * 0
        for i in range(size):
            of_slot += slot[i] * g_read[i]
        mean += weights[j] * of_slot
    for j in range(slots):
        slot, g_slot = view(row, (j + 1) * size, size), view(grad, (j + 1) * size, size)
        g_weight, content = tiny * 0, tiny * 0
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
            g_mask[j + 1] -= g_score * mask.dtype.type(ADDITIVE_PENALTY)
        for i in range(size):
            g_slot[i] += weights[j] * g_read[i] + factor * query[i]
            g_query[i] += factor * slot[i]


@compiled
def _update_back(old, old_mask, action, new, g_mask, out, out_mask, before, grown, size, queue, use_mask, tiny, g_x):
    """Gradients of an update: of the state before it (`before` slots) into `out`, of x into g_x; of the action.

    new, g_mask: those of the state after it (`grown` slots).
    """
    push, pop, no_op = action[0], action[1], action[2]
    g_push, g_pop, g_no_op = tiny * 0, tiny * 0, tiny * 0
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
        _clear(view(out_mask, grown + 1, 2))
    if queue:
        for j in range(grown):
            ratio = _ratio(old_mask[j + 2], old_mask[j + 1], tiny)
            stays, g_stays = no_op + pop * ratio, tiny * 0
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
    _clear(view(out, (before + 1) * size, 2 * size))
    _clear(view(out_mask, before + 1, 2))
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
def backward(begin, end, options, inputs, outputs, kept, incoming, outgoing):
    """Fill `outgoing`: the gradients of the state, x, the logits and w_g (one for each sequence, from zeros).

    `incoming`: those of read, action, entropy and the last state, each of size 0 if there is none.
    """
    tokens, heads, size, count, start, num_slots, how, queue, tanh, every = options
    slots, mask, pushed, query, maps, fed = inputs  # maps [H*D + H*A, H*D], transposed; fed [B, T, H*D]: f(R_{t-1})
    action, entropy = outputs
    states, masks = kept
    in_read, in_action, in_entropy, in_slots, in_mask = incoming
    g_slots, g_mask, g_x, g_logits, g_query = outgoing
    feedback, tiny, dtype = maps.size > 0, np.finfo(pushed.dtype).tiny, pushed.dtype
    tiny = pushed.dtype.type(tiny)
    use_mask = queue or how != TOP or in_mask.size > 0
    room, group, width = min(start + tokens, num_slots), heads if feedback else 1, heads * size
    segments, span, long = (tokens - 1) // every, (room + 3) * size, room + 3
    rows, row_masks = np.zeros(group * (every + 1) * span, dtype), np.zeros(group * (every + 1) * long, dtype)
    grads, grad_masks = np.zeros(group * 2 * span, dtype), np.zeros(group * 2 * long, dtype)
    weights, g_read = np.zeros(room, dtype), np.zeros(size, dtype)
    g_fed, g_mixed = np.zeros(width, dtype), np.zeros(width + heads * count, dtype)
    for i in range(group * (every + 1)):
        row_masks[i * long] = 1
    for b in range(begin, end):
        for first in range(0, heads, group):
            _clear(g_fed)
            for k in range(group):
                i, at = 2 * k + tokens % 2, (b * heads + first + k) * room
                _clear(view(grads, i * span, span))
                _clear(view(grad_masks, i * long, long))
                if in_slots.size:
                    _copy(view(in_slots, at * size, room * size), view(grads, i * span + size, room * size))
                if in_mask.size:
                    _copy(view(in_mask, at, room), view(grad_masks, i * long + 1, room))
            for segment in range(segments, -1, -1):
                begun, ended = segment * every, min((segment + 1) * every, tokens)
                for k in range(group):
                    h, i = first + k, k * (every + 1)
                    row, row_mask = view(rows, i * span, span), view(row_masks, i * long, long)
                    at, held = (b * heads + h) * start, start
                    if segment:
                        at = ((b * heads + h) * segments + segment - 1) * room
                        _load(view(states, at * size, room * size), view(masks, at, room), row, row_mask)
                    else:
                        _load(view(slots, at * size, held * size), view(mask, at, held), row, row_mask)
                    for t in range(begun, ended):
                        at = (b * tokens + t) * heads + h
                        row, row_mask = view(rows, i * span, span), view(row_masks, i * long, long)
                        i += 1
                        _copy(view(pushed, at * size, size), view(row, 0, size))
                        if t + 1 < ended or how != TOP:
                            new, new_mask = view(rows, i * span, span), view(row_masks, i * long, long)
                            grown = min(start + t + 1, num_slots)
                            _update(row, new, row_mask, new_mask, view(action, at * 3, 3), grown, size, queue, tiny)
                for t in range(ended - 1, begun - 1, -1):
                    here, now = b * tokens + t, (t + 1) % 2
                    before, grown = min(start + t, num_slots), min(start + t + 1, num_slots)
                    for k in range(group):
                        h, i = first + k, k * (every + 1) + t - begun
                        at = here * heads + h
                        grad, grad_mask = (
                            view(grads, (2 * k + now) * span, span),
                            view(grad_masks, (2 * k + now) * long, long),
                        )
                        out, out_mask = (
                            view(grads, (2 * k + 1 - now) * span, span),
                            view(grad_masks, (2 * k + 1 - now) * long, long),
                        )
                        for d in range(size):
                            g_read[d] = g_fed[h * size + d]
                        if in_read.size:
                            for d in range(size):
                                g_read[d] += in_read[at * size + d]
                        _read_back(
                            view(rows, (i + 1) * span, span), view(row_masks, (i + 1) * long, long),
                            view(query, h * size, size), how, grown, num_slots, weights, g_read,
                            grad, grad_mask, view(g_query, (b * heads + h) * size, size), tiny,
                        )  # fmt: skip
                        chosen = view(action, at * 3, 3)
                        g_push, g_pop, g_no_op = _update_back(
                            view(rows, i * span, span), view(row_masks, i * long, long), chosen, grad, grad_mask,
                            out, out_mask, before, grown, size, queue, use_mask, tiny, view(g_x, at * size, size),
                        )  # fmt: skip
                        if in_action.size:
                            g_push += in_action[at * 3]
                            g_pop += in_action[at * 3 + 1]
                            g_no_op += in_action[at * 3 + 2]
                        of_entropy = in_entropy[at] if in_entropy.size else tiny * 0
                        own = view(g_logits, at * count, count)
                        _softmax_back(chosen, g_push, g_pop, g_no_op, of_entropy, entropy[at], own)
                    if feedback:
                        _copy(view(g_x, here * width, width), view(g_mixed, 0, width))
                        _copy(view(g_logits, here * heads * count, heads * count), view(g_mixed, width, heads * count))
                        _clear(g_fed)
                        _add_product(g_mixed, maps, g_fed)
                        if tanh:
                            for d in range(width):
                                g_fed[d] *= 1 - fed[here * width + d] * fed[here * width + d]
            for k in range(group):
                at = (b * heads + first + k) * start
                if feedback and start:  # R_{-1} was read from the given state
                    h, i = first + k, k * (every + 1)
                    row, row_mask = view(rows, i * span, span), view(row_masks, i * long, long)
                    _load(view(slots, at * size, start * size), view(mask, at, start), row, row_mask)
                    _read_back(
                        row, row_mask, view(query, h * size, size), how, start, num_slots, weights,
                        view(g_fed, h * size, size), view(grads, 2 * k * span, span),
                        view(grad_masks, 2 * k * long, long), view(g_query, (b * heads + h) * size, size), tiny,
                    )  # fmt: skip
                if g_slots.size:
                    _copy(view(grads, 2 * k * span + size, start * size), view(g_slots, at * size, start * size))
                    _copy(view(grad_masks, 2 * k * long + 1, start), view(g_mask, at, start))
