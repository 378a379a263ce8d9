"""The kernels of `triton_depth`: one layer's step of every token's stack, and its gradients. Needs Triton.

A program has some tokens and heads, the rows of its tiles [ROWS, D], and goes down the slots once. At any time it holds
a few neighbouring slots, never a stack: nothing is padded but D and the heads, the number of slots is an ordinary
argument, and the shift of a push or a pop is a matter of which name a tile has. How a layer's slots come about in that
order is in `triton_depth_math`.

Sizes: `num_occupied` slots of V_0, `num_old` of St, `num_new` of St', `num_slots` S. HEADS and HEAD_DIM as they are,
D padded, GROUP heads of TOKENS tokens to a program: ROWS = TOKENS * GROUP. Probabilities, M, scores are rows [ROWS].
CAPPED: since V_0 a slot may have come past S, and must be dropped. EMPTY is the score of an empty slot, TINY the
smallest normal number of DTYPE, in which all is computed.
"""

import triton
import triton.language as tl

from stackexp.stack.triton.depth_step_math import (
    advance,
    enter,
    fill,
    load_gradients,
    load_logits,
    load_or,
    load_slot,
    log_actions,
    logits_backward,
    place_of,
    score_backward,
    score_of,
    sweep,
    update_backward,
)
from stackexp.stack.triton.time_scan_math import _divided

# not what a kernel is made for: one serves all layers that have as many stages
DYNAMIC = ["num_tokens", "repeat", "num_occupied", "num_old", "num_new", "num_slots"]


@triton.jit(do_not_specialize=DYNAMIC)
def forward(
    xs,  # of each stage [tokens, H, D]
    logits,  # of each stage [tokens, H, 3 or 2]
    query,  # [H, D]
    slots,  # V_0 [num_occupied, tokens, H, D]
    mask,  # [num_occupied, tokens, H]
    read,  # out [tokens, H, D]
    action,  # out [tokens, H, 3]
    entropy,  # out [tokens, H]
    occupancy,  # out [tokens, H]
    rest,  # out [tokens, H, D], what rounding took from it; or None
    log_total,  # out [tokens, H], log of the sum of exp(score); or None
    new_slots,  # out [num_new, tokens, H, D], or None
    new_mask,  # out [num_new, tokens, H], or None
    num_tokens,
    num_occupied,
    num_new,
    num_slots,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_ACTIONS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DISCIPLINE: tl.constexpr,
    READ: tl.constexpr,
    READ_MASK: tl.constexpr,
    CAPPED: tl.constexpr,
    EMPTY: tl.constexpr,
    TINY: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """`reference.step`, after that of the layers since V_0."""
    place = place_of(tl.program_id(0), num_tokens, HEADS, HEAD_DIM, TOKENS, GROUP, D)
    at, here, at_x, within, _, at_w = place
    w = load_or(tl.zeros([TOKENS * GROUP, D], DTYPE), query, at_w, within)
    stages, actions = enter(xs, logits, place, NUM_ACTIONS, DTYPE)
    needed = num_occupied
    if READ == "top" and new_slots is None:  # slots further down do not get there
        needed = tl.minimum(num_occupied, len(xs) + 1)
    value, highest, total, sum_of_mask = sweep(
        stages, actions, slots, mask, w, new_slots, new_mask, (needed, num_occupied), num_new, num_slots, place,
        HEAD_DIM, DISCIPLINE, READ, READ_MASK, CAPPED, EMPTY, TINY, DTYPE,
    )  # fmt: skip
    rounded = value.to(read.dtype.element_ty)
    tl.store(read + at_x, rounded, within)
    if rest is not None:
        tl.store(rest + at_x, value - rounded.to(DTYPE), within)
    if READ == "global":
        tl.store(log_total + at, highest + tl.log(total), here)
    tl.store(occupancy + at, sum_of_mask, here)
    push, pop, no_op = actions[len(xs) - 1]
    tl.store(action + at * 3, push, here)
    tl.store(action + at * 3 + 1, pop, here)
    tl.store(action + at * 3 + 2, no_op, here)
    push, pop, no_op = load_logits(logits[len(xs) - 1], place, NUM_ACTIONS, DTYPE)
    tl.store(entropy + at, log_actions(push, pop, no_op, NUM_ACTIONS)[3], here)


@triton.jit(do_not_specialize=DYNAMIC)
def backward(
    xs,
    logits,
    query,
    slots,
    mask,
    read,  # [tokens, H, D], and `rest`: None if the softmax is to be made again
    rest,
    log_total,
    grad_read,  # [tokens, H, D]; each gradient may be None
    grad_action,  # [tokens, H, 3]
    grad_entropy,  # [tokens, H]
    grad_slots,  # of St' [num_new, tokens, H, D]
    grad_mask,  # [num_new, tokens, H]
    to_x,  # out [tokens, H, D]
    to_logits,  # out [tokens, H, 3 or 2]
    to_query,  # out [programs, H, D], to be summed; None for `read: top`
    to_slots,  # out, of St [num_old, tokens, H, D]
    to_mask,  # out [num_old, tokens, H]
    num_tokens,
    repeat,  # blocks of tokens that a program takes
    num_occupied,
    num_old,
    num_new,
    num_slots,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_ACTIONS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DISCIPLINE: tl.constexpr,
    READ: tl.constexpr,
    READ_MASK: tl.constexpr,
    CAPPED: tl.constexpr,
    EMPTY: tl.constexpr,
    TINY: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The gradients of this layer's step. At slot j those to St[j - 1] are complete; x is St[-1]."""
    LAST: tl.constexpr = len(xs) - 1
    nothing = tl.zeros([TOKENS * GROUP, D], DTYPE)
    none = tl.zeros([TOKENS * GROUP], DTYPE)
    filled = (num_occupied, num_occupied)
    to_w = nothing
    for block in range(tl.program_id(0) * repeat, (tl.program_id(0) + 1) * repeat):
        place = place_of(block, num_tokens, HEADS, HEAD_DIM, TOKENS, GROUP, D)
        at, here, at_x, within, plane, at_w = place
        w = load_or(nothing, query, at_w, within)
        stages, actions = enter(xs, logits, place, NUM_ACTIONS, DTYPE)
        from_read = load_or(nothing, grad_read, at_x, within)
        value, highest, total = nothing, none, none + 1
        if log_total is not None:
            value = load_or(nothing, read, at_x, within) + load_or(nothing, rest, at_x, within)
            highest = load_or(none, log_total, at, here)
        elif READ == "global":
            value, highest, total = sweep(
                stages, actions, slots, mask, w, None, None, filled, num_new, num_slots, place,
                HEAD_DIM, DISCIPLINE, READ, READ_MASK, CAPPED, EMPTY, TINY, DTYPE,
            )[:3]  # fmt: skip
        mean = tl.sum(from_read * value, 1)  # of what the weights get
        stages = fill(stages, actions, slots, mask, filled, num_slots, place, HEAD_DIM, DISCIPLINE, CAPPED, TINY, DTYPE)

        products, sums = (nothing, nothing, nothing), (none, none, none)
        above, above_mask, above_queue = (nothing, nothing), (none, none), (none, none, none)
        slot, slot_mask = load_slot(slots, mask, len(xs), filled, place, HEAD_DIM, DTYPE)
        grad, grad_m = load_gradients(grad_slots, grad_mask, 0, num_new, place, HEAD_DIM, nothing, none)
        for j in tl.range(num_old + 1, loop_unroll_factor=2):
            t = j + len(xs)
            later = load_slot(slots, mask, t + 1, filled, place, HEAD_DIM, DTYPE)  # while this one is worked on
            later_grad = load_gradients(grad_slots, grad_mask, j + 1, num_new, place, HEAD_DIM, nothing, none)
            window = stages[LAST]
            stages, new, m = advance(stages, actions, slot, slot_mask, t, num_slots, len(xs), DISCIPLINE, CAPPED, TINY)
            if READ == "global":
                score, content = score_of(new, m, w, READ_MASK, EMPTY, TINY)
                weight = tl.where(j < num_new, tl.exp(tl.minimum(score - highest, 0)), 0)
                if log_total is None:
                    weight = _divided(weight, total)
                to_score = weight * (tl.sum(from_read * new, 1) - mean)
                to_content, more = score_backward(to_score, content, m, READ_MASK, EMPTY, TINY)
                grad = tl.fma(weight[:, None], from_read, tl.fma(to_content[:, None], w, grad))
                grad_m += more
                to_w = tl.fma(to_content[:, None], new, to_w)
            else:
                grad += tl.where(j == 0, from_read, 0)
            products, sums, complete, complete_mask, above_queue = update_backward(
                grad, grad_m, above, above_mask, above_queue, window, stages[LAST], actions[LAST], products, sums,
                DISCIPLINE, TINY,
            )  # fmt: skip
            if j == 0:
                tl.store(to_x + at_x, complete, within)
            else:
                tl.store(to_slots + (j - 1) * plane * HEAD_DIM + at_x, complete, within)
                tl.store(to_mask + (j - 1) * plane + at, complete_mask, here)
            above, above_mask = (grad, above[0]), (grad_m, above_mask[0])
            slot, slot_mask = later
            grad, grad_m = later_grad
        _store_logits_gradient(
            products, sums, actions[LAST], logits[LAST], grad_action, grad_entropy, to_logits, place,
            NUM_ACTIONS, DTYPE,
        )  # fmt: skip
    if READ == "global":
        to_w = tl.sum(tl.reshape(to_w, [TOKENS, GROUP, D]), 0)
        head, d = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None], tl.arange(0, D)[None, :]
        at_w = (tl.program_id(0) * HEADS + head) * HEAD_DIM + d
        tl.store(to_query + at_w, to_w, (head < HEADS) & (d < HEAD_DIM))


@triton.jit
def _store_logits_gradient(
    products,
    sums,
    action,
    logits,
    grad_action,
    grad_entropy,
    to_logits,
    place,
    NUM_ACTIONS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Through the softmax of the actions, whose gradients `products` and `sums` add up to."""
    at, here = place[:2]
    none = tl.zeros_like(sums[0])
    to_push = tl.sum(products[0], 1) + sums[0] + load_or(none, grad_action, at * 3, here)
    to_pop = tl.sum(products[1], 1) + sums[1] + load_or(none, grad_action, at * 3 + 1, here)
    to_no_op = tl.sum(products[2], 1) + sums[2] + load_or(none, grad_action, at * 3 + 2, here)
    to_entropy = load_or(none, grad_entropy, at, here)
    push, pop, no_op = logits_backward(
        (to_push, to_pop, to_no_op), to_entropy, action, load_logits(logits, place, NUM_ACTIONS, DTYPE), NUM_ACTIONS
    )
    tl.store(to_logits + at * NUM_ACTIONS, push, here)
    if NUM_ACTIONS == 3:
        tl.store(to_logits + at * 3 + 1, pop, here)
    tl.store(to_logits + at * NUM_ACTIONS + NUM_ACTIONS - 1, no_op, here)
