"""The equations of the depth axis, slot by slot, on the tiles of `depth_step_kernels`.

The layers since the last stored stack are the stages of a pipeline; the current layer is the last stage. Stage i
computes the slots V_{i+1} from V_i,

    V_{i+1}[j] = a_push V_i[j-1] + a_pop V_i[j+1] + a_noop V_i[j]        V_i[-1] = x_i

so it can emit slot j once it has received slot j+1. It keeps the last two received slots, its window. The first stage
receives V_0 from memory. The last stage emits the slots St' of this layer, the top first. M passes through the same
stages, with M[-1] = 1.

Names have the prefixes of `time_scan_kernels`; tuples have that of their items. `i_slot` is j, `i_stage` is i,
and `i_source` is a slot of V_0.

Sums of products are explicit `tl.fma` calls, and the kernels are compiled without automatic contraction. Forward and
backward pass must round alike, but which operations a compiler contracts depends on the surrounding code.
"""

# Tuples grow in unrolled loops, which changes their type:
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from stackexp.stack.triton.time_scan_math import divide, softmax


@triton.jit
def locate(i_block, num_tokens, settings: tl.constexpr):
    """Return the offsets of a block of tokens, with masks of those that exist.

    In this order: rows [ROWS] of a tensor [tokens, H], and their mask; elements [ROWS, D] of a tensor [tokens, H, D],
    and their mask; the size of a plane (one slot of all stacks); elements of a tensor [H, D].
    """
    o_row = tl.arange(0, settings.tokens * settings.group)
    o_token = tl.full(o_row.shape, i_block, tl.int64) * settings.tokens + o_row // settings.group
    o_head = tl.program_id(1) * settings.group + o_row % settings.group
    o_dim = tl.arange(0, settings.padded_dim)[None, :]
    o_stack, m_stack = o_token * settings.heads + o_head, (o_token < num_tokens) & (o_head < settings.heads)
    plane = num_tokens.to(tl.int64) * settings.heads
    m_vector = m_stack[:, None] & (o_dim < settings.head_dim)
    return (
        o_stack,
        m_stack,
        o_stack[:, None] * settings.head_dim + o_dim,
        m_vector,
        plane,
        o_head[:, None] * settings.head_dim + o_dim,
    )


@triton.jit
def _mask_below(m_present, i_slot, end):
    """Return `m_present` if j < end, else False."""
    return m_present & (tl.full(m_present.shape, i_slot, tl.int32) < end)


@triton.jit
def load_or_default(b_default, p_values, o_values, m_values):
    """Load values in the dtype of `b_default`, 0 where masked; return `b_default` if the pointer is None."""
    if p_values is None:
        return b_default
    else:
        return tl.load(p_values + o_values, m_values, other=0).to(b_default.dtype)


@triton.jit
def load_slot(p_source, i_slot, filled, offsets, settings: tl.constexpr):
    """Load slot j of V_0 [ROWS, D] and its M; 0 from `filled` on, a number of slots for each."""
    o_stack, m_stack, o_vector, m_vector, plane, _ = offsets
    p_slots, p_mask = p_source
    b_slot = tl.load(
        p_slots + i_slot * plane * settings.head_dim + o_vector, _mask_below(m_vector, i_slot, filled[0]), other=0
    )
    b_mask = tl.load(p_mask + i_slot * plane + o_stack, _mask_below(m_stack, i_slot, filled[1]), other=0)
    return b_slot.to(settings.dtype), b_mask.to(settings.dtype)


@triton.jit
def load_gradients(p_grads, i_slot, num_new, offsets, settings: tl.constexpr):
    """Load the gradients of slot j of St' [ROWS, D] and of its M'; 0 beyond. Either pointer may be None."""
    o_stack, m_stack, o_vector, m_vector, plane, _ = offsets
    b_zero_vectors, b_zero_rows = tl.full(o_vector.shape, 0, settings.dtype), tl.full(o_stack.shape, 0, settings.dtype)
    b_grad = load_or_default(
        b_zero_vectors,
        p_grads[0],
        i_slot * plane * settings.head_dim + o_vector,
        _mask_below(m_vector, i_slot, num_new),
    )
    return b_grad, load_or_default(
        b_zero_rows, p_grads[1], i_slot * plane + o_stack, _mask_below(m_stack, i_slot, num_new)
    )


@triton.jit
def load_logits(p_logits, offsets, settings: tl.constexpr):
    """Load the logits of push, pop and no-op; -inf for pop where there are two actions."""
    o_logits, m_stack = offsets[0] * settings.num_actions, offsets[1]
    b_push = tl.load(p_logits + o_logits, m_stack, other=0).to(settings.dtype)
    b_no_op = tl.load(p_logits + o_logits + settings.num_actions - 1, m_stack, other=0).to(settings.dtype)
    b_pop = tl.full(b_push.shape, float("-inf"), settings.dtype)
    if settings.num_actions == 3:
        b_pop = tl.load(p_logits + o_logits + 1, m_stack, other=0).to(settings.dtype)
    return b_push, b_pop, b_no_op


@triton.jit
def compute_log_actions(b_push, b_pop, b_no_op, settings: tl.constexpr):
    """Return log a for these logits, and the entropy. With two actions, log a_pop is 0."""
    b_highest = tl.maximum(tl.maximum(b_push, b_pop), b_no_op)
    b_log_total = tl.log(tl.exp(b_push - b_highest) + tl.exp(b_pop - b_highest) + tl.exp(b_no_op - b_highest))
    b_push, b_no_op = b_push - b_highest - b_log_total, b_no_op - b_highest - b_log_total
    b_pop = b_pop - b_highest - b_log_total if settings.num_actions == 3 else tl.zeros_like(b_push)
    b_entropy = -(tl.exp(b_push) * b_push + tl.exp(b_no_op) * b_no_op)
    if settings.num_actions == 3:
        b_entropy -= tl.exp(b_pop) * b_pop
    return b_push, b_pop, b_no_op, b_entropy


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


@triton.jit
def start_pipeline(p_xs, p_logits, offsets, settings: tl.constexpr):
    """Return the stages before they receive a slot, and their actions.

    A stage is its window: V_i[j-1], V_i[j], M_i[j-1], M_i[j], at first with j = -1.
    """
    b_stages, b_actions = (), ()
    for i_stage in tl.static_range(len(p_xs)):
        b_x = tl.load(p_xs[i_stage] + offsets[2], offsets[3], other=0).to(settings.dtype)
        b_push, b_pop, b_no_op = load_logits(p_logits[i_stage], offsets, settings)
        b_actions += (softmax(b_push, b_pop, b_no_op),)
        b_one = tl.full(b_push.shape, 1, settings.dtype)
        b_stages += ((b_x, b_x, b_one, b_one),)
    return b_stages, b_actions


@triton.jit
def _mask_ratio(b_here, b_following, settings: tl.constexpr):
    """Return `reference.mask_ratio` of M[j] and M[j+1]; then M[j], or 1 where it is 0; then whether it is not 0."""
    b_occupied = b_here >= settings.tiny
    b_divisor = tl.where(b_occupied, b_here, 1)
    return tl.where(b_occupied, divide(b_following, b_divisor), 0), b_divisor, b_occupied


@triton.jit
def _update(b_stage, b_slot, b_mask, b_action, i_slot, num_slots, settings: tl.constexpr):
    """Return V_{i+1}[j] and M_{i+1}[j], given the window and V_i[j+1], M_i[j+1]."""
    b_before, b_here, b_before_mask, b_here_mask = b_stage
    b_push, b_pop, b_no_op = b_action
    b_push = tl.where(i_slot < num_slots, b_push, 0)  # slot S must stay empty
    b_keep = b_no_op
    if settings.discipline == "queue":
        b_keep = tl.fma(b_pop, _mask_ratio(b_here_mask, b_mask, settings)[0], b_no_op)
    b_new = tl.fma(b_keep[:, None], b_here, b_push[:, None] * b_before)
    b_new_mask = tl.fma(b_no_op, b_here_mask, b_push * b_before_mask)
    if settings.discipline == "stack":
        b_new = tl.fma(b_pop[:, None], b_slot, b_new)
    if settings.discipline != "push_only":
        b_new_mask = tl.fma(b_pop, b_mask, b_new_mask)
    return b_new, b_new_mask


@triton.jit
def advance_pipeline(
    b_stages, b_actions, b_received, i_source, num_slots, EMITTING: tl.constexpr, settings: tl.constexpr
):
    """Pass a slot of V_0 to the first stage; return the stages afterwards, and the slot that the last one emits.

    Only the first EMITTING stages emit a slot. The next stage, if any, receives its slot 0; later ones receive nothing.
    """
    b_slot, b_mask = b_received
    b_after = ()
    for i_stage in tl.static_range(len(b_stages)):
        b_stage = b_stages[i_stage]
        if i_stage > EMITTING:
            b_after += (b_stage,)
        else:
            b_after += ((b_stage[1], b_slot, b_stage[3], b_mask),)
            if i_stage < EMITTING:
                b_slot, b_mask = _update(
                    b_stage, b_slot, b_mask, b_actions[i_stage], i_source - i_stage - 1, num_slots, settings
                )
    return b_after, b_slot, b_mask


@triton.jit
def fill_pipeline(b_stages, b_actions, p_source, filled, num_slots, offsets, settings: tl.constexpr):
    """Advance until the last stage has received its slot 0, so that each further slot makes it emit one."""
    for i_source in tl.static_range(len(b_stages)):
        b_slot = load_slot(p_source, i_source, filled, offsets, settings)
        b_stages, _, _ = advance_pipeline(b_stages, b_actions, b_slot, i_source, num_slots, i_source, settings)
    return b_stages


@triton.jit
def _compute_score(b_slot, b_mask, b_query, settings: tl.constexpr):
    """Return `reference.compute_scores` of a slot, and w_g . St'."""
    b_content = tl.sum(b_query * b_slot, 1)
    if settings.read_mask == "multiply":
        return b_content * b_mask, b_content
    elif settings.read_mask == "log":
        return b_content + tl.log(tl.maximum(b_mask, settings.tiny)), b_content
    else:  # the penalty is the score of an empty slot
        return tl.fma(1 - b_mask, settings.empty_score, b_content), b_content


@triton.jit
def read_slots(b_stages, b_actions, p_slots, b_query, sizes, offsets, settings: tl.constexpr):
    """Read the slots from the top; return R [ROWS, D], the highest score, the sum of exp(score - highest), sum of M'.

    `p_slots`: V_0 and its M, then the outputs for St' and M', or None.
    """
    o_stack, m_stack, o_vector, m_vector, plane, _ = offsets
    p_source, p_new_slots, p_new_mask = (p_slots[0], p_slots[1]), p_slots[2], p_slots[3]
    needed, num_occupied, num_new, num_slots = sizes
    filled = (needed, num_occupied)
    b_stages = fill_pipeline(b_stages, b_actions, p_source, filled, num_slots, offsets, settings)
    b_occupancy = tl.full([b_query.shape[0]], 0, settings.dtype)
    b_read = tl.full(b_query.shape, 0, settings.dtype)
    b_total = b_occupancy + (num_slots - num_new)  # the empty slots
    b_highest = tl.where(b_total > 0, tl.full(b_total.shape, settings.empty_score, settings.dtype), float("-inf"))
    b_received = load_slot(p_source, len(b_stages), filled, offsets, settings)
    for i_slot in tl.range(num_new, loop_unroll_factor=2):
        i_source = i_slot + len(b_stages)
        b_later = load_slot(p_source, i_source + 1, filled, offsets, settings)  # during the work on this slot
        b_stages, b_new, b_new_mask = advance_pipeline(
            b_stages, b_actions, b_received, i_source, num_slots, len(b_stages), settings
        )
        b_received = b_later
        b_occupancy += b_new_mask
        if settings.read == "global":
            b_score = _compute_score(b_new, b_new_mask, b_query, settings)[0]
            b_raised = tl.maximum(b_highest, b_score)
            b_scale, b_weight = tl.exp(b_highest - b_raised), tl.exp(b_score - b_raised)
            b_total = tl.fma(b_total, b_scale, b_weight)
            b_read = tl.fma(b_read, b_scale[:, None], b_weight[:, None] * b_new)
            b_highest = b_raised
        else:
            b_read = tl.where(i_slot == 0, b_new, b_read)
        if p_new_slots is not None:
            tl.store(p_new_slots + i_slot * plane * settings.head_dim + o_vector, b_new, m_vector)
            tl.store(p_new_mask + i_slot * plane + o_stack, b_new_mask, m_stack)
    if settings.read == "global":
        b_read = divide(b_read, b_total[:, None])
    return b_read, b_highest, b_total, b_occupancy


@triton.jit
def read_slot_backward(b_grads, b_slot, b_mask, b_query, b_softmax, is_occupied, settings: tl.constexpr):
    """Add a slot's share of the gradients of a global read to those of St'[j], M'[j] and w_g.

    `b_softmax`: dR, dR . R, the highest score, and the softmax denominator; with log_total as the score, it is 1.
    """
    b_grad, b_grad_mask, b_to_query = b_grads
    b_grad_read, b_mean, b_highest, b_total = b_softmax
    b_score, b_content = _compute_score(b_slot, b_mask, b_query, settings)
    b_weight = divide(tl.where(is_occupied, tl.exp(tl.minimum(b_score - b_highest, 0)), 0), b_total)
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
        b_ratio, b_divisor, b_occupied = _mask_ratio(b_here_mask, b_following_mask, settings)
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
