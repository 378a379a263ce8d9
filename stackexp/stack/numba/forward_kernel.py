"""The forward kernel: scan the tokens of one sequence.

Each stack has two rows of scratch memory, for the states before and after a token; they swap roles after each token.
Heads run one after the other. With feedback, which mixes the heads, all heads advance together as one group.
"""

from stackexp.stack.numba.equations import Row, compute_action, load_row, read_stack, store_row, update_stack
from stackexp.stack.numba.vectors import (
    add_product,
    copy,
    inlined,
    is_given,
    padded,
    part,
    plain,
    pointer,
    tanh_into,
    view,
)

IDENTITY, TANH, GATED = range(3)  # in the order of feedback.ACTIVATIONS


@plain
def get_row(number, scan):
    """Return a row of scratch."""
    length = scan.sizes.last_slots + 3
    slots = pointer(scan.scratch.slots, number * length * scan.sizes.head_dim)
    return Row(slots, pointer(scan.scratch.mask, number * length))


@inlined
def scan_forward(sequence, scan):
    """Fill the outputs of one sequence."""
    sizes, tensors = scan.sizes, scan.tensors
    group = sizes.heads if is_given(tensors.feedback) else 1
    for first_head in range(0, sizes.heads, group):
        for k in range(group):
            _load_state(sequence * sizes.heads + first_head + k, first_head + k, get_row(2 * k, scan), scan)
        for t in range(sizes.tokens):
            token = sequence * sizes.tokens + t
            if is_given(tensors.feedback):
                _add_feedback(sequence, t, scan)
            for k in range(group):
                old, new = get_row(2 * k + t % 2, scan), get_row(2 * k + 1 - t % 2, scan)
                if is_given(tensors.saved_slots) and t and t % sizes.save_every == 0:
                    states = (sizes.tokens - 1) // sizes.save_every
                    saved = (sequence * sizes.heads + first_head + k) * states + t // sizes.save_every - 1
                    _store_state(old, tensors.saved_slots, tensors.saved_mask, saved, sizes)
                _step(token, first_head + k, min(sizes.first_slots + t + 1, sizes.num_slots), old, new, scan)
        for k in range(group):
            stack, row = sequence * sizes.heads + first_head + k, get_row(2 * k + sizes.tokens % 2, scan)
            _store_state(row, tensors.last_slots, tensors.last_mask, stack, sizes)


@plain
def _store_state(row, slots, mask, number, sizes):
    count = sizes.last_slots
    store_row(row, part(slots, number, count * sizes.head_dim), part(mask, number, count), sizes)


@inlined
def _load_state(stack, head, row, scan):
    """Load the first state, and with feedback read it."""
    sizes, tensors, count = scan.sizes, scan.tensors, scan.sizes.first_slots
    size = sizes.head_dim
    load_row(part(tensors.slots, stack, count * size), part(tensors.mask, stack, count), row, sizes)
    if is_given(tensors.feedback):
        query, out = part(tensors.query, head, size), part(tensors.first_read, stack, size)
        read_stack(row, query, count, sizes, scan.scratch, out)


@inlined
def _add_feedback(sequence, t, scan):
    """Write x_t + P u_t and logits_t + Q u_t to `scratch.mixed`."""
    sizes, tensors, scratch = scan.sizes, scan.tensors, scan.scratch
    token, width, actions = sequence * sizes.tokens + t, sizes.heads * sizes.head_dim, sizes.heads * sizes.num_actions
    last = part(tensors.read, token - 1, width) if t else part(tensors.first_read, sequence, width)
    if is_given(tensors.from_read):
        copy(part(tensors.given, token, sizes.inner), view(scratch.inner, 0, sizes.inner))
        add_product(last, tensors.from_read, view(scratch.inner, 0, padded(sizes.inner)))
        last = view(scratch.inner, 0, sizes.inner)
    fed, mixed = view(scratch.fed, 0, sizes.inner), view(scratch.mixed, 0, padded(width + actions))
    if sizes.activation == IDENTITY:
        copy(last, fed)
    else:
        tanh_into(last, fed)
    if sizes.activation == GATED:
        for i in range(sizes.units):
            fed[i] *= fed[sizes.units + i]
    mixed_x = view(scratch.mixed, 0, width)
    copy(part(tensors.x, token, width), mixed_x)
    copy(part(tensors.logits, token, actions), view(scratch.mixed, width, actions))
    add_product(view(fed, 0, sizes.units), tensors.feedback, mixed)
    copy(mixed_x, part(tensors.pushed, token, width))


@inlined
def _step(token, head, count, old, new, scan):
    """Update one stack to `count` slots, then read it."""
    sizes, tensors, mixed = scan.sizes, scan.tensors, scan.scratch.mixed
    size, actions, stack = sizes.head_dim, sizes.num_actions, token * sizes.heads + head
    x, logits = part(tensors.x, stack, size), part(tensors.logits, stack, actions)
    if is_given(tensors.feedback):
        x, logits = part(mixed, head, size), view(mixed, sizes.heads * size + head * actions, actions)
    copy(x, view(old.slots, 0, size))
    action = part(tensors.action, stack, 3)
    tensors.entropy[stack] = compute_action(logits, action)
    tensors.occupancy[stack] = update_stack(old, new, action, count, sizes)
    read_stack(new, part(tensors.query, head, size), count, sizes, scan.scratch, part(tensors.read, stack, size))
