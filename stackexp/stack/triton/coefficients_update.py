"""The kernels that update the coefficients C and M: forward and backward. See `coefficients`.

A program handles a few stacks, in tiles [STACKS, SLOTS, COLUMNS]. All sizes of tiles are powers of two. Neighboring
slots are loaded from memory, not exchanged between threads.
"""

import triton
import triton.language as tl

from stackexp.stack.triton.coefficients_read import is_used
from stackexp.stack.triton.depth_step_backward import logits_backward
from stackexp.stack.triton.depth_step_pipeline import (
    compute_log_actions,
    compute_mask_ratio,
    load_logits,
    load_or_default,
)
from stackexp.stack.triton.time_scan_math import divide, softmax

DYNAMIC = ["num_stacks", "update", "num_old", "num_new"]


@triton.jit(do_not_specialize=DYNAMIC)
def update_forward(tensors, num_stacks, update, num_old, num_new, settings: tl.constexpr):
    """Compute the actions, C and M. `tensors`: an `UpdateForward`."""
    i_stack, i_slot, m_stack = _locate(num_stacks, settings)
    b_logits = load_logits(tensors.logits, (i_stack, m_stack), settings)
    b_push, b_pop, b_no_op = softmax(b_logits[0], b_logits[1], b_logits[2])
    tl.store(tensors.action + i_stack * 3, b_push, m_stack)
    tl.store(tensors.action + i_stack * 3 + 1, b_pop, m_stack)
    tl.store(tensors.action + i_stack * 3 + 2, b_no_op, m_stack)
    b_entropy = compute_log_actions(b_logits[0], b_logits[1], b_logits[2], settings)[3]
    tl.store(tensors.entropy + i_stack, b_entropy, m_stack)

    b_push, b_pop, b_no_op = b_push[:, None], b_pop[:, None], b_no_op[:, None]
    m_new = m_stack[:, None] & (i_slot < num_new)
    b_above_mask, b_mask, b_below_mask = _load_masks(tensors.mask, i_stack, i_slot, num_old, m_stack)
    b_new_mask = tl.fma(b_no_op, b_mask, b_push * b_above_mask)
    if settings.discipline != "push_only":
        b_new_mask = tl.fma(b_pop, b_below_mask, b_new_mask)
    tl.store(tensors.occupancy + i_stack, tl.sum(tl.where(i_slot < num_new, b_new_mask, 0), 1), m_stack)
    tl.store(tensors.new_mask + i_stack[:, None] * num_new + i_slot, b_new_mask, m_new)

    old = (tensors.coefficients, i_stack, i_slot, update, num_old, m_stack)
    b_keep = b_no_op
    if settings.discipline == "queue":
        b_keep += b_pop * compute_mask_ratio(b_mask, b_below_mask, settings)[0]
    b_new = b_push[:, :, None] * _load_above(old, settings) + b_keep[:, :, None] * _load_columns(old, 0, settings)
    if settings.discipline == "stack":
        b_new += b_pop[:, :, None] * _load_columns(old, 1, settings)
    i_column = _columns(settings)
    o_new = (i_stack[:, None] * num_new + i_slot)[:, :, None] * settings.new_columns + i_column
    m_used = m_new[:, :, None] & is_used(i_slot[:, :, None], i_column, update + 1)
    tl.store(tensors.new_coefficients + o_new, b_new, m_used)


@triton.jit(do_not_specialize=DYNAMIC)
def update_backward(tensors, num_stacks, update, num_old, num_new, settings: tl.constexpr):
    """Compute the gradients of the logits, and of C and M before. `tensors`: an `UpdateBackward`.

    Only the `push` of a stack moves its slots down, so C[j] goes to C'[j] and C'[j+1], and with a pop to C'[j-1].
    """
    i_stack, i_slot, m_stack = _locate(num_stacks, settings)
    b_logits = load_logits(tensors.logits, (i_stack, m_stack), settings)
    b_actions = softmax(b_logits[0], b_logits[1], b_logits[2])
    b_push, b_pop, b_no_op = b_actions[0][:, None], b_actions[1][:, None], b_actions[2][:, None]
    old = (tensors.coefficients, i_stack, i_slot, update, num_old, m_stack)
    new = (tensors, i_stack, i_slot, update, num_new, m_stack)
    b_above_mask, b_mask, b_below_mask = _load_masks(tensors.mask, i_stack, i_slot, num_old, m_stack)
    b_grad_mask = _load_gradient(tensors.grad_mask, new, 0)
    b_sum_push, b_sum_pop, b_sum_no_op = b_grad_mask * b_above_mask, b_grad_mask * b_below_mask, b_grad_mask * b_mask
    b_to_mask = b_push * _load_gradient(tensors.grad_mask, new, 1) + b_no_op * b_grad_mask
    if settings.discipline != "push_only":
        b_to_mask += b_pop * _load_gradient(tensors.grad_mask, new, -1)

    b_columns, b_above = _load_columns(old, 0, settings), _load_above(old, settings)
    b_grad, b_keep = _load_column_gradients(new, 0, settings), b_no_op
    b_sum_push += tl.sum(b_grad * b_above, 2)
    b_stays = tl.sum(b_grad * b_columns, 2)
    b_sum_no_op += b_stays
    if settings.discipline == "queue":
        b_ratio, b_divisor, m_occupied = compute_mask_ratio(b_mask, b_below_mask, settings)
        b_sum_pop += b_ratio * b_stays
        b_keep += b_pop * b_ratio
        b_to_mask -= tl.where(m_occupied, divide(b_pop * b_ratio * b_stays, b_divisor), 0)
        b_stays = tl.sum(_load_column_gradients(new, -1, settings) * b_above, 2)  # the same of slot j-1
        _, b_divisor, m_occupied = compute_mask_ratio(b_above_mask, b_mask, settings)
        b_to_mask += tl.where(m_occupied & (i_slot > 0), divide(b_pop * b_stays, b_divisor), 0)
    b_to_columns = b_push[:, :, None] * _load_column_gradients(new, 1, settings) + b_keep[:, :, None] * b_grad
    if settings.discipline == "stack":
        b_sum_pop += tl.sum(b_grad * _load_columns(old, 1, settings), 2)
        b_to_columns += b_pop[:, :, None] * _load_column_gradients(new, -1, settings)
    m_old = m_stack[:, None] & (i_slot < num_old)
    o_old = i_stack[:, None] * num_old + i_slot
    i_column = _columns(settings)
    tl.store(tensors.to_mask + o_old, b_to_mask, m_old)
    m_used = m_old[:, :, None] & is_used(i_slot[:, :, None], i_column, update)
    tl.store(tensors.to_coefficients + o_old[:, :, None] * settings.old_columns + i_column, b_to_columns, m_used)

    b_none = tl.zeros_like(b_logits[0])
    b_to_push = tl.sum(b_sum_push, 1) + load_or_default(b_none, tensors.grad_action, i_stack * 3, m_stack)
    b_to_pop = tl.sum(b_sum_pop, 1) + load_or_default(b_none, tensors.grad_action, i_stack * 3 + 1, m_stack)
    b_to_no_op = tl.sum(b_sum_no_op, 1) + load_or_default(b_none, tensors.grad_action, i_stack * 3 + 2, m_stack)
    b_to_entropy = load_or_default(b_none, tensors.grad_entropy, i_stack, m_stack)
    b_to_logits = logits_backward((b_to_push, b_to_pop, b_to_no_op), b_to_entropy, b_actions, b_logits, settings)
    p_to_logits = tensors.to_logits + i_stack * settings.num_actions
    tl.store(p_to_logits, b_to_logits[0], m_stack)
    if settings.num_actions == 3:
        tl.store(p_to_logits + 1, b_to_logits[1], m_stack)
    tl.store(p_to_logits + settings.num_actions - 1, b_to_logits[2], m_stack)


@triton.jit
def _locate(num_stacks, settings: tl.constexpr):
    """Return the numbers of the stacks [STACKS] and slots [1, SLOTS], and a mask of the stacks that exist."""
    i_stack = tl.program_id(0).to(tl.int64) * settings.stacks + tl.arange(0, settings.stacks)
    return i_stack, tl.arange(0, settings.slots)[None, :], i_stack < num_stacks


@triton.jit
def _columns(settings: tl.constexpr):
    """Return the numbers of the columns [1, 1, COLUMNS]."""
    return tl.arange(0, settings.new_columns)[None, None, :]


@triton.jit
def _load_masks(p_mask, i_stack, i_slot, num_old, m_stack):
    """Return M[j-1], M[j] and M[j+1] [STACKS, SLOTS] before the update; M[-1] is 1."""
    p_slot, m_stack = p_mask + i_stack[:, None] * num_old + i_slot, m_stack[:, None]
    b_above = tl.load(p_slot - 1, m_stack & (i_slot > 0) & (i_slot <= num_old), other=0)
    b_below = tl.load(p_slot + 1, m_stack & (i_slot + 1 < num_old), other=0)
    return tl.where(i_slot == 0, 1, b_above), tl.load(p_slot, m_stack & (i_slot < num_old), other=0), b_below


@triton.jit
def _load_columns(old, OFFSET: tl.constexpr, settings: tl.constexpr):
    """Return C[j + OFFSET] [STACKS, SLOTS, COLUMNS] before the update, and 0 where there is no such slot."""
    p_coefficients, i_stack, i_slot, update, num_old, m_stack = old
    i_slot += OFFSET
    m_slot = m_stack[:, None] & (i_slot >= 0) & (i_slot < num_old)
    i_column = _columns(settings)
    o_column = (i_stack[:, None] * num_old + i_slot)[:, :, None] * settings.old_columns + i_column
    m_used = m_slot[:, :, None] & is_used(i_slot[:, :, None], i_column, update)
    return tl.load(p_coefficients + o_column, m_used, other=0).to(settings.dtype)


@triton.jit
def _load_above(old, settings: tl.constexpr):
    """Return C[j-1]. C[-1] is the unit vector of the pushed x."""
    m_unit = (old[2] == 0)[:, :, None] & (_columns(settings) == old[3])
    return tl.where(m_unit, 1, _load_columns(old, -1, settings))


@triton.jit
def _load_gradient(p_gradient, new, OFFSET: tl.constexpr):
    """Return an element of slot j + OFFSET [STACKS, SLOTS] after the update, and 0 where there is no such slot."""
    _, i_stack, i_slot, _, num_new, m_stack = new
    i_slot += OFFSET
    m_slot = m_stack[:, None] & (i_slot >= 0) & (i_slot < num_new)
    return tl.load(p_gradient + i_stack[:, None] * num_new + i_slot, m_slot, other=0)


@triton.jit
def _load_column_gradients(new, OFFSET: tl.constexpr, settings: tl.constexpr):
    """Return the gradient of C'[j + OFFSET] [STACKS, SLOTS, COLUMNS]: through later updates, and through this read."""
    tensors, i_stack, i_slot, update, num_new, m_stack = new
    i_column = _columns(settings)
    m_column = m_stack[:, None, None] & (i_column <= update)
    o_column = i_stack[:, None, None] * settings.new_columns + i_column
    b_dots = tl.load(tensors.dots + o_column, m_column, other=0)
    b_grad = _load_gradient(tensors.weight, new, OFFSET)[:, :, None] * b_dots
    if settings.read == "global":
        b_u = tl.load(tensors.u + o_column, m_column, other=0)
        b_grad += _load_gradient(tensors.to_content, new, OFFSET)[:, :, None] * b_u
    if tensors.grad_coefficients is not None:
        i_slot += OFFSET
        m_slot = m_stack[:, None] & (i_slot >= 0) & (i_slot < num_new)
        o_slot = (i_stack[:, None] * num_new + i_slot)[:, :, None] * settings.new_columns + i_column
        m_used = m_slot[:, :, None] & is_used(i_slot[:, :, None], i_column, update + 1)
        b_grad += tl.load(tensors.grad_coefficients + o_slot, m_used, other=0).to(settings.dtype)
    return b_grad
