"""The forward kernel of one depth step of every token's stack. See `depth_step_pipeline`."""

import triton
import triton.language as tl

from stackexp.stack.triton.depth_step_pipeline import (
    DYNAMIC,
    advance_pipeline,
    compute_log_actions,
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
    filled = (num_occupied, num_occupied)
    if settings.read == "top" and tensors.new_slots is None:  # slots further down do not reach the top
        filled = (tl.minimum(num_occupied, len(p_xs) + 1), num_occupied)
    b_slots = load_slots((tensors.slots, tensors.mask), len(p_xs) + settings.slots_ahead, filled, offsets, settings)
    b_query = load_or_zero(tensors.query, o_query, m_vector, settings).to(settings.dtype)
    b_stages, b_actions = start_pipeline(p_xs, p_logits, offsets, settings)
    p_slots = (tensors.slots, tensors.mask, tensors.new_slots, tensors.new_mask)
    sizes = (filled, num_new, num_slots)
    b_read, b_highest, b_total, b_occupancy = read_slots(
        b_stages, b_actions, b_slots, p_slots, b_query, sizes, offsets, settings
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


@triton.jit
def read_slots(b_stages, b_actions, b_slots, p_slots, b_query, sizes, offsets, settings: tl.constexpr):
    """Read the slots from the top; return R [ROWS, D], the highest score, the sum of exp(score - highest), sum of M'.

    `b_slots`: the first slots of V_0. `p_slots`: V_0 and its M, then the outputs for St' and M', or None.
    """
    o_stack, m_stack, o_vector, m_vector, plane, _ = offsets
    p_source, p_new_slots, p_new_mask = (p_slots[0], p_slots[1]), p_slots[2], p_slots[3]
    filled, num_new, num_slots = sizes
    b_stages = fill_pipeline(b_stages, b_actions, b_slots, num_slots, settings)
    b_ahead = b_slots[len(b_stages) :]
    b_occupancy = tl.full([b_query.shape[0]], 0, settings.dtype)
    b_read = tl.full(b_query.shape, 0, settings.dtype)
    b_total = b_occupancy + (num_slots - num_new)  # the empty slots
    b_highest = tl.where(b_total > 0, tl.full(b_total.shape, settings.empty_score, settings.dtype), float("-inf"))
    for i_slot in tl.range(num_new, loop_unroll_factor=settings.slots_ahead):
        i_source = i_slot + len(b_stages)
        b_ahead += (load_slot(p_source, i_source + len(b_ahead), filled, offsets, settings),)
        b_stages, b_new, b_new_mask = advance_pipeline(
            b_stages, b_actions, b_ahead[0], i_source, num_slots, len(b_stages), settings
        )
        b_ahead = b_ahead[1:]
        b_occupancy += b_new_mask
        if settings.read == "global":
            b_score = compute_score(b_new, b_new_mask, b_query, settings)[0]
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
