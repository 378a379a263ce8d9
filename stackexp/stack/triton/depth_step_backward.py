"""The backward kernel of one depth step of every token's stack. See `depth_step_pipeline`."""

import triton
import triton.language as tl

from stackexp.stack.triton.depth_step_forward import read_slots
from stackexp.stack.triton.depth_step_pipeline import (
    DYNAMIC,
    advance_pipeline,
    compute_log_actions,
    compute_mask_ratio,
    compute_score,
    fill_pipeline,
    load_logits,
    load_or_zero,
    load_slot,
    load_slots,
    locate,
    start_pipeline,
)
from stackexp.stack.triton.time_scan_math import divide


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
    offsets = locate(tl.program_id(0), num_tokens, settings)
    o_stack, m_stack, o_vector, m_vector, plane, o_query = offsets
    p_source, filled = (tensors.slots, tensors.mask), (num_occupied, num_occupied)
    p_grads, filled_grads = (tensors.grad_slots, tensors.grad_mask), (num_new, num_new)
    b_slots = load_slots(p_source, len(p_xs) + settings.slots_ahead, filled, offsets, settings)
    b_ahead_grads = load_slots(p_grads, settings.slots_ahead, filled_grads, offsets, settings)
    b_query = load_or_zero(tensors.query, o_query, m_vector, settings).to(settings.dtype)
    b_grad_read = load_or_zero(tensors.grad_read, o_vector, m_vector, settings).to(settings.dtype)
    b_stages, b_actions = start_pipeline(p_xs, p_logits, offsets, settings)
    sizes = (filled, num_new, num_slots)
    b_read, b_highest, b_scale = _load_softmax(b_stages, b_actions, b_slots, tensors, b_query, sizes, offsets, settings)
    b_softmax = (b_grad_read, tl.sum(b_grad_read * b_read, 1), b_highest, b_scale)
    b_stages = fill_pipeline(b_stages, b_actions, b_slots, num_slots, settings)
    b_ahead = b_slots[len(p_xs) :]

    b_zero_vectors = tl.full(o_vector.shape, 0, settings.dtype)
    b_zero_rows = tl.full(o_stack.shape, 0, settings.dtype)
    b_to_query = b_zero_vectors
    b_sums = (b_zero_vectors, b_zero_vectors, b_zero_vectors, b_zero_rows, b_zero_rows, b_zero_rows)
    b_above, b_above_mask = (b_zero_vectors, b_zero_vectors), (b_zero_rows, b_zero_rows)
    b_above_queue = (b_zero_rows, b_zero_rows, b_zero_rows)
    for i_slot in tl.range(num_old + 1, loop_unroll_factor=settings.slots_ahead):
        i_source = i_slot + len(p_xs)
        b_ahead += (load_slot(p_source, i_source + len(b_ahead), filled, offsets, settings),)
        b_ahead_grads += (load_slot(p_grads, i_slot + len(b_ahead_grads), filled_grads, offsets, settings),)
        b_window = b_stages[LAST]
        b_stages, b_new, b_new_mask = advance_pipeline(
            b_stages, b_actions, b_ahead[0], i_source, num_slots, len(p_xs), settings
        )
        b_grad, b_grad_mask = b_ahead_grads[0][0].to(settings.dtype), b_ahead_grads[0][1].to(settings.dtype)
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
        o_slot = (i_slot - 1) * plane
        tl.store(tensors.to_x + o_vector, b_complete, m_vector & (i_slot == 0))
        tl.store(tensors.to_slots + o_slot * settings.head_dim + o_vector, b_complete, m_vector & (i_slot > 0))
        tl.store(tensors.to_mask + o_slot + o_stack, b_complete_mask, m_stack & (i_slot > 0))
        b_above, b_above_mask = (b_grad, b_above[0]), (b_grad_mask, b_above_mask[0])
        b_ahead, b_ahead_grads = b_ahead[1:], b_ahead_grads[1:]
    _store_logits_gradient(b_sums, b_actions[LAST], p_logits[LAST], tensors, offsets, settings)
    if settings.read == "global":
        _store_query_gradient(b_to_query, tensors, settings)


@triton.jit
def _load_softmax(b_stages, b_actions, b_slots, tensors, b_query, sizes, offsets, settings: tl.constexpr):
    """Return R, the highest score, and 1 / sum of exp(score - highest); if stored, R, log_total and 1 instead."""
    o_stack, m_stack, o_vector, m_vector, _, _ = offsets
    b_scale = tl.full(o_stack.shape, 1, settings.dtype)
    if settings.read == "global" and tensors.log_total is None:
        p_slots = (tensors.slots, tensors.mask, None, None)
        b_read, b_highest, b_total, _ = read_slots(
            b_stages, b_actions, b_slots, p_slots, b_query, sizes, offsets, settings
        )
        b_scale = divide(b_scale, b_total)
    else:
        b_read = load_or_zero(tensors.read, o_vector, m_vector, settings).to(settings.dtype)
        b_read += load_or_zero(tensors.rest, o_vector, m_vector, settings)
        b_highest = load_or_zero(tensors.log_total, o_stack, m_stack, settings)
    return b_read, b_highest, b_scale


@triton.jit
def read_slot_backward(b_grads, b_slot, b_mask, b_query, b_softmax, is_occupied, settings: tl.constexpr):
    """Add a slot's share of the gradients of a global read to those of St'[j], M'[j] and w_g.

    `b_softmax`: dR, dR . R, the highest score, and 1 / softmax denominator; with log_total as the score, it is 1.
    """
    b_grad, b_grad_mask, b_to_query = b_grads
    b_grad_read, b_mean, b_highest, b_scale = b_softmax
    b_score, b_content = compute_score(b_slot, b_mask, b_query, settings)
    b_weight = tl.where(is_occupied, tl.exp(tl.minimum(b_score - b_highest, 0)) * b_scale, 0)
    b_to_score = b_weight * (tl.sum(b_grad_read * b_slot, 1) - b_mean)
    b_to_content = b_to_score
    if settings.read_mask == "multiply":
        b_to_content, b_to_mask = b_to_score * b_mask, b_to_score * b_content
    elif settings.read_mask == "log":
        b_to_mask = tl.where(b_mask >= settings.tiny, divide(b_to_score, tl.maximum(b_mask, settings.tiny)), 0)
    else:
        b_to_mask = b_to_score * -settings.empty_score
    b_grad = tl.fma(b_weight[:, None], b_grad_read, tl.fma(b_to_content[:, None], b_query, b_grad))
    return b_grad, b_grad_mask + b_to_mask, tl.fma(b_to_content[:, None], b_slot, b_to_query)


@triton.jit
def update_backward(b_grads, b_above, b_window, b_next_window, b_action, b_sums, settings: tl.constexpr):
    """Complete the gradients of slot j - 1 of St and M from those of slot j of St' and M', and add to those of a.

    `b_above`: the gradients of the slots j-1 and j-2 of St', of M', and for a queue what slot j-1 keeps and what its M
    receives through M[j+1] / M[j]. The windows have St[j-1], St[j], St[j+1]. `b_sums`: the gradients of a, three
    [ROWS, D] to be summed over D and three [ROWS].
    """
    b_grad, b_grad_mask = b_grads
    b_above, b_above_mask, b_above_queue = b_above
    b_before, b_here, b_before_mask, b_here_mask = b_window
    _, b_following, _, b_following_mask = b_next_window
    b_push, b_pop, b_no_op = b_action
    b_to_push, b_to_pop, b_to_no_op, b_sum_push, b_sum_pop, b_sum_no_op = b_sums
    b_to_push = tl.fma(b_grad, b_before, b_to_push)
    b_sum_push = tl.fma(b_grad_mask, b_before_mask, b_sum_push)
    b_sum_no_op = tl.fma(b_grad_mask, b_here_mask, b_sum_no_op)
    b_complete = b_push[:, None] * b_grad
    b_complete_mask = tl.fma(b_no_op, b_above_mask[0], b_push * b_grad_mask)
    if settings.discipline != "push_only":
        b_sum_pop = tl.fma(b_grad_mask, b_following_mask, b_sum_pop)
        b_complete_mask = tl.fma(b_pop, b_above_mask[1], b_complete_mask)
    if settings.discipline == "queue":
        b_ratio, b_divisor, b_occupied = compute_mask_ratio(b_here_mask, b_following_mask, settings)
        b_kept, b_quotient, b_through_ratio = b_above_queue
        b_complete = tl.fma(b_kept[:, None], b_above[0], b_complete)
        b_complete_mask += b_through_ratio
        b_stays = tl.sum(b_grad * b_here, 1)
        b_sum_no_op += b_stays
        b_sum_pop = tl.fma(b_ratio, b_stays, b_sum_pop)
        b_through_ratio = b_quotient
        b_quotient = tl.where(b_occupied, divide(b_pop * b_stays, b_divisor), 0)
        b_above_queue = (tl.fma(b_pop, b_ratio, b_no_op), b_quotient, tl.fma(-b_ratio, b_quotient, b_through_ratio))
    else:
        b_to_no_op = tl.fma(b_grad, b_here, b_to_no_op)
        b_complete = tl.fma(b_no_op[:, None], b_above[0], b_complete)
    if settings.discipline == "stack":
        b_to_pop = tl.fma(b_grad, b_following, b_to_pop)
        b_complete = tl.fma(b_pop[:, None], b_above[1], b_complete)
    return (
        (b_to_push, b_to_pop, b_to_no_op, b_sum_push, b_sum_pop, b_sum_no_op),
        b_complete,
        b_complete_mask,
        b_above_queue,
    )


@triton.jit
def _store_query_gradient(b_to_query, tensors, settings: tl.constexpr):
    """Store the sum over the tokens of this program."""
    b_to_query = tl.sum(tl.reshape(b_to_query, [settings.tokens, settings.group, settings.padded_dim]), 0)
    o_head = tl.program_id(1) * settings.group + tl.arange(0, settings.group)[:, None]
    o_dim = tl.arange(0, settings.padded_dim)[None, :]
    o_query = (tl.program_id(0).to(tl.int64) * settings.heads + o_head) * settings.head_dim + o_dim
    tl.store(tensors.to_query + o_query, b_to_query, (o_head < settings.heads) & (o_dim < settings.head_dim))


@triton.jit
def _store_logits_gradient(b_sums, b_action, p_logits, tensors, offsets, settings: tl.constexpr):
    """Propagate gradients through the softmax of the actions. `b_sums`: see `update_backward`."""
    o_stack, m_stack = offsets[:2]
    b_to_action = ()
    for i_action in tl.static_range(3):
        b_grad = load_or_zero(tensors.grad_action, o_stack * 3 + i_action, m_stack, settings)
        b_to_action += (tl.sum(b_sums[i_action], 1) + b_sums[3 + i_action] + b_grad,)
    b_to_entropy = load_or_zero(tensors.grad_entropy, o_stack, m_stack, settings)
    b_push, b_pop, b_no_op = logits_backward(
        b_to_action, b_to_entropy, b_action, load_logits(p_logits, offsets, settings), settings
    )
    p_to_logits = tensors.to_logits + o_stack * settings.num_actions
    tl.store(p_to_logits, b_push, m_stack)
    if settings.num_actions == 3:
        tl.store(p_to_logits + 1, b_pop, m_stack)
    tl.store(p_to_logits + settings.num_actions - 1, b_no_op, m_stack)


@triton.jit
def logits_backward(b_to_action, b_to_entropy, b_action, b_logits, settings: tl.constexpr):
    """Return the gradients of the logits from those of a and of its entropy."""
    b_push, b_pop, b_no_op = b_action
    b_to_push, b_to_pop, b_to_no_op = b_to_action
    b_log_push, b_log_pop, b_log_no_op, b_entropy = compute_log_actions(b_logits[0], b_logits[1], b_logits[2], settings)
    b_mean = b_push * b_to_push + b_pop * b_to_pop + b_no_op * b_to_no_op
    return (
        b_push * (b_to_push - b_mean - b_to_entropy * (b_log_push + b_entropy)),
        b_pop * (b_to_pop - b_mean - b_to_entropy * (b_log_pop + b_entropy)),
        b_no_op * (b_to_no_op - b_mean - b_to_entropy * (b_log_no_op + b_entropy)),
    )
