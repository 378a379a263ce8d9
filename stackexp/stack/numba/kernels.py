"""The loops of `compiled`: a scan over the tokens, and its gradients, for the sequences begin .. end - 1 of a batch.

Tensors come as addresses, which costs a call with few tokens less than arrays do (0: there is none), and are flat, in
the order of `reference`'s dimensions unless a comment says otherwise. A stack in work lies in a row of a scratch
buffer, slot -1 (what a push pushes) in front and zeros behind: the update of all its slots is one loop over contiguous
numbers, new[i] = push old[i - D] + pop old[i + D] + no_op old[i]. Heads are walked one after the other; with feedback,
which mixes them, all at once.

Backward, the states of a segment of `every` tokens are computed anew from the one kept at its start.

What `forward` and `backward` make is kept on disk, with all that it calls. numba compiles what it kept anew when the
file of the function changes, or what its closure holds: here a digest of all the files.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numba import carray, cfunc, njit, types
from numba.core.ccallback import CFunc
from numba.np.unsafe.ndarray import to_fixed_tuple

from stackexp.stack.numba.update_read import TOP, load, read_back, read_row, softmax, softmax_back, update, update_back
from stackexp.stack.numba.vectors import (
    LANES,
    OPTIONS,
    add,
    add_product,
    array_at,
    clear,
    copy,
    next_part,
    padded,
    part,
    plain,
    tanh_into,
    view,
)

IDENTITY, TANH, GATED = range(3)  # of reference.ACTIVATIONS
SOURCES = ("numba/kernels.py", "numba/update_read.py", "numba/vectors.py", "reference.py")
whole = njit(inline="always", **OPTIONS)  # into the function that is kept: no pass of the compiler over it twice


@plain
def _feed_back(read, hidden, given, of_read, activation, before, fed):
    """u, f(R) or f(c + V R), in front of `fed`, which like the scratch `before` is a multiple of LANES long."""
    if hidden:
        copy(given, view(before, 0, given.shape[0]))
        add_product(read, of_read, before)
        read = view(before, 0, given.shape[0])
    if activation == IDENTITY:
        copy(read, view(fed, 0, read.shape[0]))
    else:
        tanh_into(read, fed)
    if activation == GATED:
        units = read.shape[0] // 2
        for i in range(units):
            fed[i] *= fed[units + i]


@plain
def _activate_back(g_fed, fed, activation, out):
    """From the gradient to u that to what the activation was of; `fed` is what `reference.squashed` gives."""
    one, units = fed.dtype.type(1), g_fed.shape[0]
    for i in range(units):
        a = fed[i]
        if activation == IDENTITY:
            out[i] = g_fed[i]
        elif activation == TANH:
            out[i] = g_fed[i] * (one - a * a)
        else:
            b = fed[units + i]
            out[i], out[units + i] = g_fed[i] * b * (one - a * a), g_fed[i] * a * (one - b * b)


@whole
def _forward(begin, end, like, options, inputs, outputs, kept):
    """Fill `outputs` and, for the backward pass, `kept`. `like` is an array of the dtype."""
    batch, tokens, heads, size, count, start, num_slots, how, queue, activation, units, inner, every = options
    room, width, actions, stacks = min(start + tokens, num_slots), heads * size, heads * count, batch * heads
    segments, span, length, dtype = (tokens - 1) // every, (room + 3) * size, room + 3, like.dtype
    feedback, pushes, keeps, tiny = inputs[5] != 0, kept[0] != 0, kept[2] != 0, dtype.type(np.finfo(dtype).tiny)
    hidden, lanes = inputs[6] != 0, padded(inner)
    slots, mask = array_at(inputs[0], stacks * start * size, like), array_at(inputs[1], stacks * start, like)
    x, logits = array_at(inputs[2], tokens * batch * width, like), array_at(inputs[3], tokens * batch * actions, like)
    query, columns = array_at(inputs[4], width, like), padded(width + actions)
    maps = array_at(inputs[5], units * columns, like)  # P and Q, side by side
    of_read, given = array_at(inputs[6], width * lanes, like), array_at(inputs[7], tokens * batch * inner, like)
    read, action = array_at(outputs[0], tokens * batch * width, like), array_at(outputs[1], tokens * stacks * 3, like)
    entropy, occupancy = array_at(outputs[2], tokens * stacks, like), array_at(outputs[3], tokens * stacks, like)
    last_slots, last_mask = array_at(outputs[4], stacks * room * size, like), array_at(outputs[5], stacks * room, like)
    pushed, first_read = array_at(kept[0], tokens * batch * width, like), array_at(kept[1], batch * width, like)
    states = array_at(kept[2], stacks * segments * room * size, like)  # [B, H, segments, room, D]
    masks = array_at(kept[3], stacks * segments * room, like)
    group = heads if feedback else 1
    rows, row_masks = np.zeros(group * 2 * span, dtype), np.zeros(group * 2 * length, dtype)
    weights, fed, before = np.zeros(3 * (room + LANES), dtype), np.zeros(lanes, dtype), np.zeros(lanes, dtype)
    mixed = np.zeros(columns, dtype)
    mixed_x, mixed_logits = view(mixed, 0, width), view(mixed, width, actions)
    for i in range(group * 2):
        row_masks[i * length] = 1
    for b in range(begin, end):
        for first in range(0, heads, group):
            for k in range(group):
                at, row, row_mask = b * heads + first + k, part(rows, 2 * k, span), part(row_masks, 2 * k, length)
                load(part(slots, at, start * size), part(mask, at, start), row, row_mask)
                if feedback:
                    own, out = part(query, first + k, size), part(first_read, at, size)
                    read_row(row, row_mask, own, how, start, num_slots, weights, out, tiny)
            for t in range(tokens):
                grown, here, now = min(start + t + 1, num_slots), b * tokens + t, t % 2
                if feedback:
                    last = part(read, here - 1, width) if t else part(first_read, b, width)
                    _feed_back(last, hidden, part(given, here, inner), of_read, activation, before, fed)
                    copy(part(x, here, width), mixed_x)
                    copy(part(logits, here, actions), mixed_logits)
                    add_product(view(fed, 0, units), maps, mixed)
                    if pushes:
                        copy(mixed_x, part(pushed, here, width))
                for k in range(group):
                    h, i, j = first + k, 2 * k + now, 2 * k + 1 - now
                    at = here * heads + h
                    row, row_mask = part(rows, i, span), part(row_masks, i, length)
                    new, new_mask = part(rows, j, span), part(row_masks, j, length)
                    if keeps and t and t % every == 0:
                        place = (b * heads + h) * segments + t // every - 1
                        copy(view(row, size, room * size), part(states, place, room * size))
                        copy(view(row_mask, 1, room), part(masks, place, room))
                    chosen = part(action, at, 3)
                    if feedback:
                        copy(part(mixed_x, h, size), view(row, 0, size))
                        entropy[at] = softmax(part(mixed_logits, h, count), chosen)
                    else:
                        copy(part(x, at, size), view(row, 0, size))
                        entropy[at] = softmax(part(logits, at, count), chosen)
                    occupancy[at] = update(row, new, row_mask, new_mask, chosen, grown, size, queue, tiny)
                    own, out = part(query, h, size), part(read, at, size)
                    read_row(new, new_mask, own, how, grown, num_slots, weights, out, tiny)
            for k in range(group):
                at, i = b * heads + first + k, 2 * k + tokens % 2
                copy(view(rows, i * span + size, room * size), part(last_slots, at, room * size))
                copy(view(row_masks, i * length + 1, room), part(last_mask, at, room))


@whole
def _backward(begin, end, like, options, inputs, outputs, kept, incoming, outgoing):
    """Fill `outgoing`: the gradients of the state, x, the logits and c; and add to w_g's, one for each sequence.

    `incoming`: those of read, action, entropy and the last state. `inputs` has, for x, what was pushed, and fed
    [B, T, m or 2 m], what `reference.squashed` gives.
    """
    batch, tokens, heads, size, count, start, num_slots, how, queue, activation, units, inner, every = options
    room, width, actions, stacks = min(start + tokens, num_slots), heads * size, heads * count, batch * heads
    segments, span, length, dtype = (tokens - 1) // every, (room + 3) * size, room + 3, like.dtype
    feedback, tiny = inputs[4] != 0, dtype.type(np.finfo(dtype).tiny)
    zero = dtype.type(0)
    slots, mask = array_at(inputs[0], stacks * start * size, like), array_at(inputs[1], stacks * start, like)
    pushed, query = array_at(inputs[2], tokens * batch * width, like), array_at(inputs[3], width, like)
    columns, fed = padded(units), array_at(inputs[5], tokens * batch * inner, like)
    hidden, of_read = inputs[6] != 0, array_at(inputs[6], inner * padded(width), like)
    map_x = array_at(inputs[4], width * columns, like)  # P, transposed; behind it Q
    map_logits = array_at(inputs[4] + map_x.nbytes, actions * columns, like)
    action, entropy = array_at(outputs[0], tokens * stacks * 3, like), array_at(outputs[1], tokens * stacks, like)
    states = array_at(kept[0], stacks * segments * room * size, like)
    masks = array_at(kept[1], stacks * segments * room, like)
    in_read = array_at(incoming[0], tokens * batch * width, like)
    in_action = array_at(incoming[1], tokens * stacks * 3, like)
    in_entropy = array_at(incoming[2], tokens * stacks, like)
    in_slots = array_at(incoming[3], stacks * room * size, like)
    in_mask = array_at(incoming[4], stacks * room, like)
    g_slots, g_mask = array_at(outgoing[0], stacks * start * size, like), array_at(outgoing[1], stacks * start, like)
    g_x = array_at(outgoing[2], tokens * batch * width, like)
    g_logits = array_at(outgoing[3], tokens * batch * actions, like)
    g_query, g_given = array_at(outgoing[4], batch * width, like), array_at(outgoing[5], tokens * batch * inner, like)
    use_mask = queue or how != TOP or incoming[4] != 0
    group = heads if feedback else 1
    rows, row_masks = np.zeros(group * (every + 1) * span, dtype), np.zeros(group * (every + 1) * length, dtype)
    grads, grad_masks = np.zeros(group * 2 * span, dtype), np.zeros(group * 2 * length, dtype)
    weights, g_read, g_fed = np.zeros(3 * (room + LANES), dtype), np.zeros(size, dtype), np.zeros(columns, dtype)
    g_before, g_last = np.zeros(inner, dtype), np.zeros(padded(width), dtype)  # of c + V R; of R_{t-1}
    for i in range(group * (every + 1)):
        row_masks[i * length] = 1
    for b in range(begin, end):
        for first in range(0, heads, group):
            clear(g_last)
            for k in range(group):
                at, i = b * heads + first + k, 2 * k + tokens % 2
                grad, grad_mask = part(grads, i, span), part(grad_masks, i, length)
                clear(grad)
                clear(grad_mask)
                if incoming[3]:
                    copy(part(in_slots, at, room * size), view(grad, size, room * size))
                if incoming[4]:
                    copy(part(in_mask, at, room), view(grad_mask, 1, room))
            for segment in range(segments, -1, -1):
                begun, ended = segment * every, min((segment + 1) * every, tokens)
                for k in range(group):
                    h, i = first + k, k * (every + 1)
                    row, row_mask = part(rows, i, span), part(row_masks, i, length)
                    at, held = b * heads + h, start
                    if segment:
                        at = at * segments + segment - 1
                        load(part(states, at, room * size), part(masks, at, room), row, row_mask)
                    else:
                        load(part(slots, at, held * size), part(mask, at, held), row, row_mask)
                    for t in range(begun, ended):
                        at = (b * tokens + t) * heads + h
                        row, row_mask = part(rows, i, span), part(row_masks, i, length)
                        i += 1
                        copy(part(pushed, at, size), view(row, 0, size))
                        if t + 1 < ended or how != TOP:
                            new, new_mask = part(rows, i, span), part(row_masks, i, length)
                            chosen, grown = part(action, at, 3), min(start + t + 1, num_slots)
                            update(row, new, row_mask, new_mask, chosen, grown, size, queue, tiny)
                for t in range(ended - 1, begun - 1, -1):
                    here, before, grown = b * tokens + t, min(start + t, num_slots), min(start + t + 1, num_slots)
                    for k in range(group):
                        h, i, now, then = first + k, k * (every + 1) + t - begun, 2 * k + (t + 1) % 2, 2 * k + t % 2
                        at, grad, grad_mask = here * heads + h, part(grads, now, span), part(grad_masks, now, length)
                        copy(part(g_last, h, size), g_read)
                        if incoming[0]:
                            add(part(in_read, at, size), g_read)
                        row, row_mask = part(rows, i + 1, span), part(row_masks, i + 1, length)
                        own, g_own = part(query, h, size), part(g_query, b * heads + h, size)
                        read_back(
                            row, row_mask, own, how, grown, num_slots, weights, g_read, grad, grad_mask, g_own, tiny
                        )
                        row, row_mask = part(rows, i, span), part(row_masks, i, length)
                        out, out_mask = part(grads, then, span), part(grad_masks, then, length)
                        chosen = part(action, at, 3)
                        g_push, g_pop, g_no_op = update_back(
                            row, row_mask, chosen, grad, grad_mask, out, out_mask, before, grown, size, queue, use_mask,
                            tiny, part(g_x, at, size),
                        )  # fmt: skip
                        if incoming[1]:
                            g_push += in_action[at * 3]
                            g_pop += in_action[at * 3 + 1]
                            g_no_op += in_action[at * 3 + 2]
                        of_entropy = in_entropy[at] if incoming[2] else zero
                        out = part(g_logits, at, count)
                        softmax_back(chosen, g_push, g_pop, g_no_op, of_entropy, entropy[at], out)
                    if feedback:
                        clear(g_fed)
                        add_product(part(g_x, here, width), map_x, g_fed)
                        add_product(part(g_logits, here, actions), map_logits, g_fed)
                        _activate_back(view(g_fed, 0, units), part(fed, here, inner), activation, g_before)
                        if hidden:
                            copy(g_before, part(g_given, here, inner))
                            clear(g_last)
                            add_product(g_before, of_read, g_last)
                        else:
                            copy(g_before, view(g_last, 0, width))
            for k in range(group):
                h, at = first + k, b * heads + first + k
                grad, grad_mask = part(grads, 2 * k, span), part(grad_masks, 2 * k, length)
                if feedback and start:  # R_{-1} was read from the given state
                    row, row_mask = part(rows, k * (every + 1), span), part(row_masks, k * (every + 1), length)
                    load(part(slots, at, start * size), part(mask, at, start), row, row_mask)
                    own, g_own, out = part(query, h, size), part(g_query, at, size), part(g_last, h, size)
                    read_back(row, row_mask, own, how, start, num_slots, weights, out, grad, grad_mask, g_own, tiny)
                if outgoing[0]:
                    copy(view(grad, size, start * size), part(g_slots, at, start * size))
                    copy(view(grad_mask, 1, start), part(g_mask, at, start))


JOB = 40
"""Numbers of a job: parts of the batch that have begun, parts, the options, and addresses of the tensors."""


def _kept(function: Callable) -> CFunc:
    """A C function of a job's address, kept on disk: beside this file, else in the user's cache, or not at all."""
    signature = types.intp(types.CPointer(types.intp))
    try:
        return cfunc(signature, cache=True, **OPTIONS)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return cfunc(signature, **OPTIONS)(function)


def digest(folder: Path = Path(__file__).parents[1]) -> int:
    """Of the text of all that the kernels are made of."""
    texts = (hashlib.sha256((folder / name).read_bytes()).digest() for name in SOURCES)
    return int.from_bytes(hashlib.sha256(b"".join(texts)).digest()[:7], "big")


@functools.cache
def forward(dtype: type) -> CFunc:
    """`_forward` for numbers of a dtype, as all that is kept on disk: a function of a job's address.

    It does a part of the job after the other, beside whoever is at it too, until all have begun. It returns the digest
    of `SOURCES`, so that it is in the closure.
    """
    like, sources = np.zeros(0, dtype), digest()

    def run_forward(address):
        job = carray(address, JOB)
        options, inputs = to_fixed_tuple(job[2:], 13), to_fixed_tuple(job[15:], 8)
        outputs, kept = to_fixed_tuple(job[23:], 6), to_fixed_tuple(job[29:], 4)
        batch, parts, part = job[2], job[1], next_part(job)
        while part < parts:
            _forward(batch * part // parts, batch * (part + 1) // parts, like, options, inputs, outputs, kept)
            part = next_part(job)
        return sources

    return _kept(run_forward)


@functools.cache
def backward(dtype: type) -> CFunc:
    """`_backward`, likewise."""
    like, sources = np.zeros(0, dtype), digest()

    def run_backward(address):
        job = carray(address, JOB)
        options, inputs = to_fixed_tuple(job[2:], 13), to_fixed_tuple(job[15:], 7)
        outputs, kept = to_fixed_tuple(job[22:], 2), to_fixed_tuple(job[24:], 2)
        incoming, outgoing = to_fixed_tuple(job[26:], 5), to_fixed_tuple(job[31:], 6)
        batch, parts, part = job[2], job[1], next_part(job)
        while part < parts:
            begin, end = batch * part // parts, batch * (part + 1) // parts
            _backward(begin, end, like, options, inputs, outputs, kept, incoming, outgoing)
            part = next_part(job)
        return sources

    return _kept(run_backward)
