"""The backward kernel: the gradients of one sequence.

The forward pass saved every k-th state (`Sizes.save_every`). The kernel goes from the last segment of k tokens to the
first: it recomputes the states of the segment from the saved one, then propagates the gradients back through them.
"""

from stackexp.stack.numba.equations import (
    TOP,
    action_backward,
    load_row,
    read_backward,
    store_row,
    update_backward,
    update_stack,
)
from stackexp.stack.numba.forward_kernel import IDENTITY, TANH, get_row
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
    view,
)


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
    if is_given(tensors.from_read):
        copy(out, part(tensors.grad_given, token, sizes.inner))
        clear(grad_last)
        add_product(out, tensors.from_read, grad_last)
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
