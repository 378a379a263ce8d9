"""The Triton kernels of one depth step of every token's stack: forward and backward.

Names have the prefixes of `time_scan_kernels`: `p_`, `b_`, `o_`, `m_` and `i_`. The fields of `tensors` are pointers.

A program handles a few tokens and heads: the rows of its tiles [ROWS, D], ROWS = tokens * group. It visits the slots
once, from the top. It never holds a whole stack, only a few neighboring slots, so only D and the heads are padded, and
the number of slots is an ordinary argument. `depth_step_math` explains how slots are computed in this order.

Sizes: `num_occupied` slots of V_0, `num_old` of St, `num_new` of St', `num_slots` S. Probabilities, M and scores are
rows [ROWS]. `p_xs` and `p_logits` are tuples of pointers, one for each layer since V_0: [tokens, H, D] and
[tokens, H, 3 or 2]. The other tensors are described in `depth_step`.
"""

import triton
import triton.language as tl

from stackexp.stack.triton.depth_step_math import (
    advance_pipeline,
    compute_log_actions,
    fill_pipeline,
    load_gradients,
    load_logits,
    load_or_default,
    load_slot,
    locate,
    logits_backward,
    read_slot_backward,
    read_slots,
    start_pipeline,
    update_backward,
)

# one kernel serves all layers with as many stages: Triton does not compile again for these values
DYNAMIC = ["num_tokens", "num_occupied", "num_old", "num_new", "num_slots"]


@triton.jit(do_not_specialize=DYNAMIC)
def forward(
    p_xs,
    p_logits,
    tensors,  # StepForward
    num_tokens,
    num_occupied,
    num_new,
    num_slots,
    settings: tl.constexpr,
):
    """Compute `reference.step` after the steps of the layers since V_0."""
    offsets = locate(tl.program_id(0), num_tokens, settings)
    o_stack, m_stack, o_vector, m_vector, _, o_query = offsets
    b_query = load_or_default(
        tl.full([settings.tokens * settings.group, settings.padded_dim], 0, settings.dtype),
        tensors.query,
        o_query,
        m_vector,
    )
    b_stages, b_actions = start_pipeline(p_xs, p_logits, offsets, settings)
    needed = num_occupied
    if settings.read == "top" and tensors.new_slots is None:  # slots further down do not reach the top
        needed = tl.minimum(num_occupied, len(p_xs) + 1)
    sizes = (needed, num_occupied, num_new, num_slots)
    b_read, b_highest, b_total, b_occupancy = read_slots(
        b_stages,
        b_actions,
        (tensors.slots, tensors.mask, tensors.new_slots, tensors.new_mask),
        b_query,
        sizes,
        offsets,
        settings,
    )
    b_rounded = b_read.to(tensors.read.dtype.element_ty)
    tl.store(tensors.read + o_vector, b_rounded, m_vector)
    if tensors.rest is not None:
        tl.store(tensors.rest + o_vector, b_read - b_rounded.to(settings.dtype), m_vector)
    if settings.read == "global":
        tl.store(tensors.log_total + o_stack, b_highest + tl.log(b_total), m_stack)
    tl.store(tensors.occupancy + o_stack, b_occupancy, m_stack)
    b_push, b_pop, b_no_op = b_actions[len(p_xs) - 1]
    tl.store(tensors.action + o_stack * 3, b_push, m_stack)
    tl.store(tensors.action + o_stack * 3 + 1, b_pop, m_stack)
    tl.store(tensors.action + o_stack * 3 + 2, b_no_op, m_stack)
    b_push, b_pop, b_no_op = load_logits(p_logits[len(p_xs) - 1], offsets, settings)
    tl.store(tensors.entropy + o_stack, compute_log_actions(b_push, b_pop, b_no_op, settings)[3], m_stack)


@triton.jit(do_not_specialize=DYNAMIC)
def backward(
    p_xs,
    p_logits,
    tensors,  # StepBackward
    num_tokens,
    num_occupied,
    num_old,
    num_new,
    num_slots,
    settings: tl.constexpr,
):
    """Compute the gradients of this layer's step.

    At slot j the gradient of St[j - 1] is complete. St[-1] is x.
    """
    LAST: tl.constexpr = len(p_xs) - 1
    b_zero_vectors = tl.full([settings.tokens * settings.group, settings.padded_dim], 0, settings.dtype)
    b_zero_rows = tl.full([b_zero_vectors.shape[0]], 0, settings.dtype)
    offsets = locate(tl.program_id(0), num_tokens, settings)
    o_stack, m_stack, o_vector, m_vector, plane, o_query = offsets
    p_source, filled = (tensors.slots, tensors.mask), (num_occupied, num_occupied)
    p_grads = (tensors.grad_slots, tensors.grad_mask)
    b_query = load_or_default(b_zero_vectors, tensors.query, o_query, m_vector)
    b_stages, b_actions = start_pipeline(p_xs, p_logits, offsets, settings)
    b_grad_read = load_or_default(b_zero_vectors, tensors.grad_read, o_vector, m_vector)
    sizes = (num_occupied, num_occupied, num_new, num_slots)
    b_read, b_highest, b_total = _load_softmax(b_stages, b_actions, tensors, b_query, sizes, offsets, settings)
    b_softmax = (b_grad_read, tl.sum(b_grad_read * b_read, 1), b_highest, b_total)
    b_stages = fill_pipeline(b_stages, b_actions, p_source, filled, num_slots, offsets, settings)

    b_to_query = b_zero_vectors
    b_sums = (b_zero_vectors, b_zero_vectors, b_zero_vectors, b_zero_rows, b_zero_rows, b_zero_rows)
    b_above, b_above_mask = (b_zero_vectors, b_zero_vectors), (b_zero_rows, b_zero_rows)
    b_above_queue = (b_zero_rows, b_zero_rows, b_zero_rows)
    b_slot, b_slot_mask = load_slot(p_source, len(p_xs), filled, offsets, settings)
    b_grad, b_grad_mask = load_gradients(p_grads, 0, num_new, offsets, settings)
    for i_slot in tl.range(num_old + 1, loop_unroll_factor=2):
        i_source = i_slot + len(p_xs)
        b_later = load_slot(p_source, i_source + 1, filled, offsets, settings)  # during the work on this slot
        b_later_grad = load_gradients(p_grads, i_slot + 1, num_new, offsets, settings)
        b_window = b_stages[LAST]
        b_stages, b_new, b_new_mask = advance_pipeline(
            b_stages, b_actions, (b_slot, b_slot_mask), i_source, num_slots, len(p_xs), settings
        )
        if settings.read == "global":
            b_grad, b_grad_mask, b_to_query = read_slot_backward(
                (b_grad, b_grad_mask, b_to_query), b_new, b_new_mask, b_query, b_softmax, i_slot < num_new, settings
            )
        else:
            b_grad += tl.where(i_slot == 0, b_grad_read, 0)
        b_sums, b_complete, b_complete_mask, b_above_queue = update_backward(
            (b_grad, b_grad_mask),
            (b_above, b_above_mask, b_above_queue),
            b_window,
            b_stages[LAST],
            b_actions[LAST],
            b_sums,
            settings,
        )
        if i_slot == 0:
            tl.store(tensors.to_x + o_vector, b_complete, m_vector)
        else:
            tl.store(tensors.to_slots + (i_slot - 1) * plane * settings.head_dim + o_vector, b_complete, m_vector)
            tl.store(tensors.to_mask + (i_slot - 1) * plane + o_stack, b_complete_mask, m_stack)
        b_above, b_above_mask = (b_grad, b_above[0]), (b_grad_mask, b_above_mask[0])
        b_slot, b_slot_mask = b_later
        b_grad, b_grad_mask = b_later_grad
    _store_logits_gradient(b_sums, b_actions[LAST], p_logits[LAST], tensors, offsets, settings)
    if settings.read == "global":
        _store_query_gradient(b_to_query, tensors, settings)


@triton.jit
def _store_query_gradient(b_to_query, tensors, settings: tl.constexpr):
    """Store the sum over the tokens of this program."""
    b_to_query = tl.sum(tl.reshape(b_to_query, [settings.tokens, settings.group, settings.padded_dim]), 0)
    o_head = tl.program_id(1) * settings.group + tl.arange(0, settings.group)[:, None]
    o_dim = tl.arange(0, settings.padded_dim)[None, :]
    o_query = (tl.program_id(0) * settings.heads + o_head) * settings.head_dim + o_dim
    tl.store(tensors.to_query + o_query, b_to_query, (o_head < settings.heads) & (o_dim < settings.head_dim))


@triton.jit
def _load_softmax(b_stages, b_actions, tensors, b_query, sizes, offsets, settings: tl.constexpr):
    """Return R, the highest score and the sum of exp(score - highest); if stored, R, log_total and 1 instead."""
    o_stack, m_stack, o_vector, m_vector, _, _ = offsets
    b_read, b_highest = tl.zeros_like(b_query), tl.full([b_query.shape[0]], 0, settings.dtype)
    b_total = tl.full([b_query.shape[0]], 1, settings.dtype)
    if tensors.log_total is not None:
        b_read = load_or_default(b_read, tensors.read, o_vector, m_vector) + load_or_default(
            b_read, tensors.rest, o_vector, m_vector
        )
        b_highest = load_or_default(b_highest, tensors.log_total, o_stack, m_stack)
    elif settings.read == "global":
        p_slots = (tensors.slots, tensors.mask, None, None)
        b_read, b_highest, b_total, _ = read_slots(b_stages, b_actions, p_slots, b_query, sizes, offsets, settings)
    return b_read, b_highest, b_total


@triton.jit
def _store_logits_gradient(b_sums, b_action, p_logits, tensors, offsets, settings: tl.constexpr):
    """Propagate gradients through the softmax of the actions. `b_sums`: see `update_backward`."""
    o_stack, m_stack = offsets[:2]
    b_zero_rows = tl.zeros_like(b_sums[3])
    b_to_push = (
        tl.sum(b_sums[0], 1) + b_sums[3] + load_or_default(b_zero_rows, tensors.grad_action, o_stack * 3, m_stack)
    )
    b_to_pop = (
        tl.sum(b_sums[1], 1) + b_sums[4] + load_or_default(b_zero_rows, tensors.grad_action, o_stack * 3 + 1, m_stack)
    )
    b_to_no_op = (
        tl.sum(b_sums[2], 1) + b_sums[5] + load_or_default(b_zero_rows, tensors.grad_action, o_stack * 3 + 2, m_stack)
    )
    b_to_entropy = load_or_default(b_zero_rows, tensors.grad_entropy, o_stack, m_stack)
    b_push, b_pop, b_no_op = logits_backward(
        (b_to_push, b_to_pop, b_to_no_op), b_to_entropy, b_action, load_logits(p_logits, offsets, settings), settings
    )
    p_to_logits = tensors.to_logits + o_stack * settings.num_actions
    tl.store(p_to_logits, b_push, m_stack)
    if settings.num_actions == 3:
        tl.store(p_to_logits + 1, b_pop, m_stack)
    tl.store(p_to_logits + settings.num_actions - 1, b_no_op, m_stack)
