"""The kernels: scan the tokens of one sequence, and compute its gradients.

Forward, each stack has two rows of scratch memory, for the states before and after a token; they swap roles after each
token. Heads run one after the other. With feedback, which mixes the heads, all heads advance together as one group.

The forward pass saves every k-th state (`Sizes.save_every`). The backward kernel goes from the last segment of k tokens
to the first: it recomputes the states of the segment from the saved one, then propagates the gradients through them.
"""

from stackexp.stack.numba.equations import (
    TOP,
    StackRow,
    action_backward,
    compute_action,
    load_row,
    read_backward,
    read_stack,
    store_row,
    update_backward,
    update_stack,
)
from stackexp.stack.numba.vectors import (
    add,
    add_product,
    clear,
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
    return StackRow(slots, pointer(scan.scratch.mask, number * length))


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
    if is_given(tensors.read_weight):
        copy(part(tensors.token_bias, token, sizes.inner), view(scratch.inner, 0, sizes.inner))
        add_product(last, tensors.read_weight, view(scratch.inner, 0, padded(sizes.inner)))
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


@plain
def _get_grad_row(number, scan):
    """Return a row of gradients; these rows follow those of the states."""
    group = scan.sizes.heads if is_given(scan.tensors.feedback) else 1
    return get_row(group * (scan.sizes.save_every + 1) + number, scan)


@inlined
def scan_backward(sequence, scan):
    """Fill the gradients of one sequence."""
    sizes, tensors = scan.sizes, scan.tensors
    has_feedback = is_given(tensors.feedback)
    group = sizes.heads if has_feedback else 1
    for first_head in range(0, sizes.heads, group):
        clear(view(scan.scratch.mixed, 0, padded(sizes.heads * sizes.head_dim)))
        for k in range(group):
            _load_last_gradient(
                sequence * sizes.heads + first_head + k, _get_grad_row(2 * k + sizes.tokens % 2, scan), scan
            )
        for segment in range((sizes.tokens - 1) // sizes.save_every, -1, -1):
            begin, end = segment * sizes.save_every, min((segment + 1) * sizes.save_every, sizes.tokens)
            for k in range(group):
                _recompute_segment(sequence, first_head, k, segment, (begin, end), scan)
            for t in range(end - 1, begin - 1, -1):
                for k in range(group):
                    _step_backward(sequence, t, first_head + k, k, k * (sizes.save_every + 1) + t - begin, scan)
                if has_feedback:
                    _feedback_backward(sequence * sizes.tokens + t, scan)
        for k in range(group):
            _store_first_gradient(sequence, first_head + k, k, scan)


@inlined
def _load_last_gradient(stack, grad, scan):
    tensors, count, size = scan.tensors, scan.sizes.last_slots, scan.sizes.head_dim
    clear(view(grad.slots, 0, (count + 3) * size))
    clear(view(grad.mask, 0, count + 3))
    if is_given(tensors.grad_last_slots):
        copy(part(tensors.grad_last_slots, stack, count * size), view(grad.slots, size, count * size))
    if is_given(tensors.grad_last_mask):
        copy(part(tensors.grad_last_mask, stack, count), view(grad.mask, 1, count))


@inlined
def _recompute_segment(sequence, first_head, k, segment, tokens, scan):
    """Fill the rows of one head with the states before the tokens begin .. end - 1, for a global read also after."""
    sizes, tensors, size = scan.sizes, scan.tensors, scan.sizes.head_dim
    first_row, stack = k * (sizes.save_every + 1), sequence * sizes.heads + first_head + k
    begin, end = tokens
    if segment:
        count, saved = sizes.last_slots, stack * ((sizes.tokens - 1) // sizes.save_every) + segment - 1
        slots, mask = part(tensors.saved_slots, saved, count * size), part(tensors.saved_mask, saved, count)
        load_row(slots, mask, get_row(first_row, scan), sizes)
    else:
        count = sizes.first_slots
        load_row(
            part(tensors.slots, stack, count * size), part(tensors.mask, stack, count), get_row(first_row, scan), sizes
        )
    for t in range(begin, end):
        row, at = get_row(first_row + t - begin, scan), (sequence * sizes.tokens + t) * sizes.heads + first_head + k
        copy(part(tensors.pushed, at, size), view(row.slots, 0, size))
        if t + 1 < end or sizes.read != TOP:
            action, count = part(tensors.action, at, 3), min(sizes.first_slots + t + 1, sizes.num_slots)
            update_stack(row, get_row(first_row + t - begin + 1, scan), action, count, sizes)


@inlined
def _step_backward(sequence, t, head, k, number, scan):
    """Propagate gradients through read and update of one head. `number`: the row of the state before the token."""
    sizes, tensors, scratch, size = scan.sizes, scan.tensors, scan.scratch, scan.sizes.head_dim
    stack = (sequence * sizes.tokens + t) * sizes.heads + head
    counts = min(sizes.first_slots + t, sizes.num_slots), min(sizes.first_slots + t + 1, sizes.num_slots)
    grad, grad_old = _get_grad_row(2 * k + (t + 1) % 2, scan), _get_grad_row(2 * k + t % 2, scan)
    grad_read = view(scratch.grad_read, 0, size)
    copy(part(scratch.mixed, head, size), grad_read)
    if is_given(tensors.grad_read):
        add(part(tensors.grad_read, stack, size), grad_read)
    query, grad_query = part(tensors.query, head, size), part(tensors.grad_query, sequence * sizes.heads + head, size)
    new = get_row(number + 1, scan)
    read_backward(new, query, counts[1], sizes, scratch, grad_read, grad, grad_query)
    action, grad_x = part(tensors.action, stack, 3), part(tensors.grad_x, stack, size)
    g_push, g_pop, g_no_op = update_backward(get_row(number, scan), action, grad, grad_old, counts, sizes, grad_x)
    if is_given(tensors.grad_action):
        incoming = part(tensors.grad_action, stack, 3)
        g_push, g_pop, g_no_op = g_push + incoming[0], g_pop + incoming[1], g_no_op + incoming[2]
    grad_entropy = action.dtype.type(0)
    if is_given(tensors.grad_entropy):
        grad_entropy = tensors.grad_entropy[stack]
    grad_logits = part(tensors.grad_logits, stack, sizes.num_actions)
    action_backward(action, (g_push, g_pop, g_no_op), grad_entropy, tensors.entropy[stack], grad_logits)


@inlined
def _feedback_backward(token, scan):
    """Write the gradient of R_{t-1} to `scratch.mixed`, and that of c_t."""
    sizes, tensors, scratch = scan.sizes, scan.tensors, scan.scratch
    width, actions, units = sizes.heads * sizes.head_dim, sizes.heads * sizes.num_actions, sizes.units
    fed, grads = part(tensors.fed, token, sizes.inner), view(scratch.fed, 0, padded(units))
    out, grad_last = view(scratch.inner, 0, sizes.inner), view(scratch.mixed, 0, padded(width))
    clear(grads)
    add_product(part(tensors.grad_x, token, width), tensors.feedback, grads)
    feedback_logits = pointer(tensors.feedback, width * padded(units))
    add_product(part(tensors.grad_logits, token, actions), feedback_logits, grads)
    one = grads.dtype.type(1)
    for i in range(units):
        a = fed[i]
        if sizes.activation == IDENTITY:
            out[i] = grads[i]
        elif sizes.activation == TANH:
            out[i] = grads[i] * (one - a * a)
        else:
            b = fed[units + i]
            out[i], out[units + i] = grads[i] * b * (one - a * a), grads[i] * a * (one - b * b)
    if is_given(tensors.read_weight):
        copy(out, part(tensors.grad_token_bias, token, sizes.inner))
        clear(grad_last)
        add_product(out, tensors.read_weight, grad_last)
    else:
        copy(out, view(grad_last, 0, width))


@inlined
def _store_first_gradient(sequence, head, k, scan):
    """Store the gradient of the first state. With feedback, R_{-1} was read from it."""
    sizes, tensors, count, size = scan.sizes, scan.tensors, scan.sizes.first_slots, scan.sizes.head_dim
    stack, grad = sequence * sizes.heads + head, _get_grad_row(2 * k, scan)
    if is_given(tensors.feedback) and count:
        row = get_row(k * (sizes.save_every + 1), scan)
        load_row(part(tensors.slots, stack, count * size), part(tensors.mask, stack, count), row, sizes)
        query, grad_query = part(tensors.query, head, size), part(tensors.grad_query, stack, size)
        grad_read = part(scan.scratch.mixed, head, size)
        read_backward(row, query, count, sizes, scan.scratch, grad_read, grad, grad_query)
    if is_given(tensors.grad_slots):
        store_row(grad, part(tensors.grad_slots, stack, count * size), part(tensors.grad_mask, stack, count), sizes)
