"""The Triton kernels of one depth step of every token's stack: forward and backward.

A program handles a few tokens and heads: the rows of its tiles [ROWS, D], ROWS = tokens * group. It visits the slots
once, from the top. It never holds a whole stack, only a few neighboring slots, so only D and the heads are padded, and
the number of slots is an ordinary argument. `depth_step_math` explains how slots are computed in this order.

Sizes: `num_occupied` slots of V_0, `num_old` of St, `num_new` of St', `num_slots` S. Probabilities, M and scores are
rows [ROWS]. `xs` and `logits` are tuples of the layers since V_0: [tokens, H, D] and [tokens, H, 3 or 2]. The other
tensors are described in `depth_step`.
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
    xs,
    logits,
    tensors,  # StepForward
    num_tokens,
    num_occupied,
    num_new,
    num_slots,
    settings: tl.constexpr,
):
    """Compute `reference.step` after the steps of the layers since V_0."""
    offsets = locate(tl.program_id(0), num_tokens, settings)
    at, here, at_x, within, _, at_w = offsets
    w = load_or_default(
        tl.full([settings.tokens * settings.group, settings.padded_dim], 0, settings.dtype), tensors.query, at_w, within
    )
    stages, actions = start_pipeline(xs, logits, offsets, settings)
    needed = num_occupied
    if settings.read == "top" and tensors.new_slots is None:  # slots further down do not reach the top
        needed = tl.minimum(num_occupied, len(xs) + 1)
    sizes = (needed, num_occupied, num_new, num_slots)
    value, highest, total, occupancy = read_slots(
        stages, actions, (tensors.slots, tensors.mask, tensors.new_slots, tensors.new_mask), w, sizes, offsets, settings
    )
    rounded = value.to(tensors.read.dtype.element_ty)
    tl.store(tensors.read + at_x, rounded, within)
    if tensors.rest is not None:
        tl.store(tensors.rest + at_x, value - rounded.to(settings.dtype), within)
    if settings.read == "global":
        tl.store(tensors.log_total + at, highest + tl.log(total), here)
    tl.store(tensors.occupancy + at, occupancy, here)
    push, pop, no_op = actions[len(xs) - 1]
    tl.store(tensors.action + at * 3, push, here)
    tl.store(tensors.action + at * 3 + 1, pop, here)
    tl.store(tensors.action + at * 3 + 2, no_op, here)
    push, pop, no_op = load_logits(logits[len(xs) - 1], offsets, settings)
    tl.store(tensors.entropy + at, compute_log_actions(push, pop, no_op, settings)[3], here)


@triton.jit(do_not_specialize=DYNAMIC)
def backward(
    xs,
    logits,
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
    LAST: tl.constexpr = len(xs) - 1
    nothing = tl.full([settings.tokens * settings.group, settings.padded_dim], 0, settings.dtype)
    none = tl.full([nothing.shape[0]], 0, settings.dtype)
    offsets = locate(tl.program_id(0), num_tokens, settings)
    at, here, at_x, within, plane, at_w = offsets
    source, filled = (tensors.slots, tensors.mask), (num_occupied, num_occupied)
    grads = (tensors.grad_slots, tensors.grad_mask)
    w = load_or_default(nothing, tensors.query, at_w, within)
    stages, actions = start_pipeline(xs, logits, offsets, settings)
    grad_read = load_or_default(nothing, tensors.grad_read, at_x, within)
    sizes = (num_occupied, num_occupied, num_new, num_slots)
    value, highest, total = _load_softmax(stages, actions, tensors, w, sizes, offsets, settings)
    softmax = (grad_read, tl.sum(grad_read * value, 1), highest, total)
    stages = fill_pipeline(stages, actions, source, filled, num_slots, offsets, settings)

    to_w, sums = nothing, (nothing, nothing, nothing, none, none, none)
    above, above_mask, above_queue = (nothing, nothing), (none, none), (none, none, none)
    slot, slot_mask = load_slot(source, len(xs), filled, offsets, settings)
    grad, grad_m = load_gradients(grads, 0, num_new, offsets, settings)
    for j in tl.range(num_old + 1, loop_unroll_factor=2):
        t = j + len(xs)
        later = load_slot(source, t + 1, filled, offsets, settings)  # during the work on this slot
        later_grad = load_gradients(grads, j + 1, num_new, offsets, settings)
        window = stages[LAST]
        stages, new, m = advance_pipeline(stages, actions, (slot, slot_mask), t, num_slots, len(xs), settings)
        if settings.read == "global":
            grad, grad_m, to_w = read_slot_backward((grad, grad_m, to_w), new, m, w, softmax, j < num_new, settings)
        else:
            grad += tl.where(j == 0, grad_read, 0)
        sums, complete, complete_mask, above_queue = update_backward(
            (grad, grad_m), (above, above_mask, above_queue), window, stages[LAST], actions[LAST], sums, settings
        )
        if j == 0:
            tl.store(tensors.to_x + at_x, complete, within)
        else:
            tl.store(tensors.to_slots + (j - 1) * plane * settings.head_dim + at_x, complete, within)
            tl.store(tensors.to_mask + (j - 1) * plane + at, complete_mask, here)
        above, above_mask = (grad, above[0]), (grad_m, above_mask[0])
        slot, slot_mask = later
        grad, grad_m = later_grad
    _store_logits_gradient(sums, actions[LAST], logits[LAST], tensors, offsets, settings)
    if settings.read == "global":
        _store_query_gradient(to_w, tensors, settings)


@triton.jit
def _store_query_gradient(to_w, tensors, settings: tl.constexpr):
    """Store the sum over the tokens of this program."""
    to_w = tl.sum(tl.reshape(to_w, [settings.tokens, settings.group, settings.padded_dim]), 0)
    head = tl.program_id(1) * settings.group + tl.arange(0, settings.group)[:, None]
    d = tl.arange(0, settings.padded_dim)[None, :]
    at_w = (tl.program_id(0) * settings.heads + head) * settings.head_dim + d
    tl.store(tensors.to_query + at_w, to_w, (head < settings.heads) & (d < settings.head_dim))


@triton.jit
def _load_softmax(stages, actions, tensors, w, sizes, offsets, settings: tl.constexpr):
    """Return R, the highest score and the sum of exp(score - highest); if stored, R, log_total and 1 instead."""
    at, here, at_x, within, _, _ = offsets
    value, highest = tl.zeros_like(w), tl.full([w.shape[0]], 0, settings.dtype)
    total = tl.full([w.shape[0]], 1, settings.dtype)
    if tensors.log_total is not None:
        value = load_or_default(value, tensors.read, at_x, within) + load_or_default(value, tensors.rest, at_x, within)
        highest = load_or_default(highest, tensors.log_total, at, here)
    elif settings.read == "global":
        slots = (tensors.slots, tensors.mask, None, None)
        value, highest, total, _ = read_slots(stages, actions, slots, w, sizes, offsets, settings)
    return value, highest, total


@triton.jit
def _store_logits_gradient(sums, action, logits, tensors, offsets, settings: tl.constexpr):
    """Propagate gradients through the softmax of the actions. `sums`: see `update_backward`."""
    at, here = offsets[:2]
    none = tl.zeros_like(sums[3])
    to_push = tl.sum(sums[0], 1) + sums[3] + load_or_default(none, tensors.grad_action, at * 3, here)
    to_pop = tl.sum(sums[1], 1) + sums[4] + load_or_default(none, tensors.grad_action, at * 3 + 1, here)
    to_no_op = tl.sum(sums[2], 1) + sums[5] + load_or_default(none, tensors.grad_action, at * 3 + 2, here)
    to_entropy = load_or_default(none, tensors.grad_entropy, at, here)
    push, pop, no_op = logits_backward(
        (to_push, to_pop, to_no_op), to_entropy, action, load_logits(logits, offsets, settings), settings
    )
    to_logits = tensors.to_logits + at * settings.num_actions
    tl.store(to_logits, push, here)
    if settings.num_actions == 3:
        tl.store(to_logits + 1, pop, here)
    tl.store(to_logits + settings.num_actions - 1, no_op, here)
