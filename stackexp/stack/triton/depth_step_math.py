"""The equations of the depth axis on the tiles of `triton_depth_kernels`, slot by slot. Needs Triton.

The layers since the last kept state are the stages of a pipeline, and the layer at hand is the last of them. Stage i
makes the slots V_{i+1} of V_i,

    V_{i+1}[j] = a_push V_i[j-1] + a_pop V_i[j+1] + a_noop V_i[j]        V_i[-1] = x_i

so it hands slot j on as soon as it gets slot j+1, and of what it got it keeps two slots, its window. V_0 is loaded;
what the last stage hands on are this layer's slots St', the top first. M goes the same way, with M[-1] = 1.

Sums of products are spelled as `tl.fma`, and kernels are compiled without contraction of their own: what a compiler
contracts depends on what stands around, and the forward and the backward pass must round alike.
"""

import triton
import triton.language as tl

from stackexp.stack.triton.time_scan_math import _divided, softmax


@triton.jit
def place_of(
    block,
    num_tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
):
    """Of the rows of a block of tokens: places among [tokens, HEADS], and whether they exist; of the numbers the same.

    Then the size of a plane, which is one slot of all stacks; and the numbers' places among [HEADS, HEAD_DIM].
    """
    row = tl.arange(0, TOKENS * GROUP)
    token = tl.full(row.shape, block, tl.int64) * TOKENS + row // GROUP
    head = tl.program_id(1) * GROUP + row % GROUP
    d = tl.arange(0, D)[None, :]
    at, here = token * HEADS + head, (token < num_tokens) & (head < HEADS)
    plane = num_tokens.to(tl.int64) * HEADS
    within = here[:, None] & (d < HEAD_DIM)
    return at, here, at[:, None] * HEAD_DIM + d, within, plane, head[:, None] * HEAD_DIM + d


@triton.jit
def _if_below(present, j, end):
    """Those present, if j < end."""
    return present & (tl.full(present.shape, j, tl.int32) < end)


@triton.jit
def load_slot(slots, mask, j, filled, place, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Slot j of V_0 [ROWS, D] and its M; 0 from `filled` on, a number of slots for each."""
    at, here, at_x, within, plane, _ = place
    slot = tl.load(slots + j * plane * HEAD_DIM + at_x, _if_below(within, j, filled[0]), other=0).to(DTYPE)
    return slot, tl.load(mask + j * plane + at, _if_below(here, j, filled[1]), other=0).to(DTYPE)


@triton.jit
def load_logits(logits, place, NUM_ACTIONS: tl.constexpr, DTYPE: tl.constexpr):
    """Of push, pop and no-op; pop's is -inf where there are two actions."""
    at, here = place[0] * NUM_ACTIONS, place[1]
    push = tl.load(logits + at, here, other=0).to(DTYPE)
    no_op = tl.load(logits + at + NUM_ACTIONS - 1, here, other=0).to(DTYPE)
    pop = tl.full(push.shape, float("-inf"), DTYPE)
    if NUM_ACTIONS == 3:
        pop = tl.load(logits + at + 1, here, other=0).to(DTYPE)
    return push, pop, no_op


@triton.jit
def log_actions(push, pop, no_op, NUM_ACTIONS: tl.constexpr):
    """log a of the logits, and the entropy; log a_pop is 0 where there are two actions, and a_pop too."""
    highest = tl.maximum(tl.maximum(push, pop), no_op)
    log_total = tl.log(tl.exp(push - highest) + tl.exp(pop - highest) + tl.exp(no_op - highest))
    push, no_op = push - highest - log_total, no_op - highest - log_total
    pop = pop - highest - log_total if NUM_ACTIONS == 3 else tl.zeros_like(push)
    entropy = -(tl.exp(push) * push + tl.exp(no_op) * no_op)
    if NUM_ACTIONS == 3:
        entropy -= tl.exp(pop) * pop
    return push, pop, no_op, entropy


@triton.jit
def enter(xs, logits, place, NUM_ACTIONS: tl.constexpr, DTYPE: tl.constexpr):
    """The stages before they get a slot, and their actions.

    A stage is its window: V_i[j-1], V_i[j], M_i[j-1], M_i[j], at first with j = -1.
    """
    stages, actions = (), ()
    for i in tl.static_range(len(xs)):
        x = tl.load(xs[i] + place[2], place[3], other=0).to(DTYPE)
        push, pop, no_op = load_logits(logits[i], place, NUM_ACTIONS, DTYPE)
        actions += (softmax(push, pop, no_op),)
        one = tl.full(push.shape, 1, DTYPE)
        stages += ((x, x, one, one),)
    return stages, actions


@triton.jit
def ratio_of(here, following, TINY: tl.constexpr):
    """`reference.ratio` of M[j] and M[j+1]; and M[j], 1 where it is nothing."""
    occupied = here >= TINY
    divisor = tl.where(occupied, here, 1)
    return tl.where(occupied, _divided(following, divisor), 0), divisor, occupied


@triton.jit
def _update(
    stage, slot, mask, action, j, num_slots, DISCIPLINE: tl.constexpr, CAPPED: tl.constexpr, TINY: tl.constexpr
):
    """V_{i+1}[j] and M_{i+1}[j] of the window and V_i[j+1], M_i[j+1]. CAPPED: slot S may come, which is to be empty."""
    before, here, before_mask, here_mask = stage
    push, pop, no_op = action
    if CAPPED:
        push = tl.where(j < num_slots, push, 0)
    stays = no_op
    if DISCIPLINE == "queue":
        stays = tl.fma(pop, ratio_of(here_mask, mask, TINY)[0], no_op)
    new = tl.fma(stays[:, None], here, push[:, None] * before)
    new_mask = tl.fma(no_op, here_mask, push * before_mask)
    if DISCIPLINE == "stack":
        new = tl.fma(pop[:, None], slot, new)
    if DISCIPLINE != "push_only":
        new_mask = tl.fma(pop, mask, new_mask)
    return new, new_mask


@triton.jit
def advance(
    stages,
    actions,
    slot,
    mask,
    t,
    num_slots,
    EMITTING: tl.constexpr,
    DISCIPLINE: tl.constexpr,
    CAPPED: tl.constexpr,
    TINY: tl.constexpr,
):
    """Give slot t of V_0 to the first stage; the stages after that, and the slot that the last of EMITTING hands on.

    Stage EMITTING, if there is one, gets its slot 0 now, and those behind it nothing yet.
    """
    after = ()
    for i in tl.static_range(len(stages)):
        stage = stages[i]
        if i > EMITTING:
            after += (stage,)
        else:
            after += ((stage[1], slot, stage[3], mask),)
            if i < EMITTING:
                slot, mask = _update(stage, slot, mask, actions[i], t - i - 1, num_slots, DISCIPLINE, CAPPED, TINY)
    return after, slot, mask


@triton.jit
def fill(
    stages,
    actions,
    slots,
    mask,
    filled,
    num_slots,
    place,
    HEAD_DIM: tl.constexpr,
    DISCIPLINE: tl.constexpr,
    CAPPED: tl.constexpr,
    TINY: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Until the last stage has its slot 0, and would hand one on next."""
    for t in tl.static_range(len(stages)):
        slot, slot_mask = load_slot(slots, mask, t, filled, place, HEAD_DIM, DTYPE)
        stages, _, _ = advance(stages, actions, slot, slot_mask, t, num_slots, t, DISCIPLINE, CAPPED, TINY)
    return stages


@triton.jit
def score_of(slot, mask, w, READ_MASK: tl.constexpr, EMPTY: tl.constexpr, TINY: tl.constexpr):
    """`reference.scores` of a slot, and w_g . St'."""
    content = tl.sum(w * slot, 1)
    if READ_MASK == "multiply":
        return content * mask, content
    elif READ_MASK == "log":
        return content + tl.log(tl.maximum(mask, TINY)), content
    else:
        return tl.fma(1 - mask, EMPTY, content), content  # the penalty is what an empty slot has


@triton.jit
def sweep(
    stages,
    actions,
    slots,
    mask,
    w,
    new_slots,  # out, None: nowhere
    new_mask,
    filled,
    num_new,
    num_slots,
    place,
    HEAD_DIM: tl.constexpr,
    DISCIPLINE: tl.constexpr,
    READ: tl.constexpr,
    READ_MASK: tl.constexpr,
    CAPPED: tl.constexpr,
    EMPTY: tl.constexpr,
    TINY: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Down the slots: R [ROWS, D]; the highest score and the sum of exp(score - highest); the sum of M'."""
    at, here, at_x, within, plane, _ = place
    stages = fill(stages, actions, slots, mask, filled, num_slots, place, HEAD_DIM, DISCIPLINE, CAPPED, TINY, DTYPE)
    occupancy = tl.zeros([w.shape[0]], DTYPE)
    read = tl.zeros(w.shape, DTYPE)
    total = occupancy + (num_slots - num_new)  # the empty slots' share
    highest = tl.where(total > 0, tl.full(total.shape, EMPTY, DTYPE), float("-inf"))
    slot, slot_mask = load_slot(slots, mask, len(stages), filled, place, HEAD_DIM, DTYPE)
    for j in tl.range(num_new, loop_unroll_factor=2):
        t = j + len(stages)
        later = load_slot(slots, mask, t + 1, filled, place, HEAD_DIM, DTYPE)  # while this one is worked on
        stages, new, m = advance(stages, actions, slot, slot_mask, t, num_slots, len(stages), DISCIPLINE, CAPPED, TINY)
        slot, slot_mask = later
        occupancy += m
        if READ == "global":
            score = score_of(new, m, w, READ_MASK, EMPTY, TINY)[0]
            raised = tl.maximum(highest, score)
            scale, weight = tl.exp(highest - raised), tl.exp(score - raised)
            total, read = tl.fma(total, scale, weight), tl.fma(read, scale[:, None], weight[:, None] * new)
            highest = raised
        else:
            read = tl.where(j == 0, new, read)
        if new_slots is not None:
            tl.store(new_slots + j * plane * HEAD_DIM + at_x, new, within)
            tl.store(new_mask + j * plane + at, m, here)
    if READ == "global":
        read = _divided(read, total[:, None])
    return read, highest, total, occupancy


@triton.jit
def score_backward(grad, content, mask, READ_MASK: tl.constexpr, EMPTY: tl.constexpr, TINY: tl.constexpr):
    """From the gradient to a score those to w_g . St' and to M'."""
    if READ_MASK == "multiply":
        return grad * mask, grad * content
    elif READ_MASK == "log":
        return grad, tl.where(mask >= TINY, _divided(grad, tl.maximum(mask, TINY)), 0)
    else:
        return grad, grad * -EMPTY


@triton.jit
def logits_backward(to_action, to_entropy, action, logits, NUM_ACTIONS: tl.constexpr):
    """From the gradients to a and to its entropy that to the logits of push, pop, no-op."""
    push, pop, no_op = action
    to_push, to_pop, to_no_op = to_action
    log_push, log_pop, log_no_op, entropy = log_actions(logits[0], logits[1], logits[2], NUM_ACTIONS)
    mean = push * to_push + pop * to_pop + no_op * to_no_op
    return (
        push * (to_push - mean - to_entropy * (log_push + entropy)),
        pop * (to_pop - mean - to_entropy * (log_pop + entropy)),
        no_op * (to_no_op - mean - to_entropy * (log_no_op + entropy)),
    )


@triton.jit
def load_or(otherwise, pointer, at, present):
    """What stands at the places, 0 where not present, in the dtype of `otherwise`; that if there is no pointer."""
    if pointer is None:
        return otherwise
    else:
        return tl.load(pointer + at, present, other=0).to(otherwise.dtype)


@triton.jit
def load_gradients(grad_slots, grad_mask, j, num_new, place, HEAD_DIM: tl.constexpr, nothing, none):
    """To slot j of St' [ROWS, D] and to its M', 0 beyond; either pointer may be None."""
    at, here, at_x, within, plane, _ = place
    grad = load_or(nothing, grad_slots, j * plane * HEAD_DIM + at_x, _if_below(within, j, num_new))
    return grad, load_or(none, grad_mask, j * plane + at, _if_below(here, j, num_new))


@triton.jit
def update_backward(
    grad,
    grad_m,
    above,
    above_mask,
    above_queue,
    window,
    next_window,
    action,
    products,
    sums,
    DISCIPLINE: tl.constexpr,
    TINY: tl.constexpr,
):
    """Of the gradients to slot j of St' and M', the whole of those to slot j - 1 of St and M, and a part of a's.

    `above`: the gradients to slots j-1 and j-2; the windows have St[j-1], St[j], St[j+1]. To a: the sums over D of
    `products`, and `sums`. A queue has of slot j-1 what it keeps, and what M gets through M[j+1] / M[j].
    """
    before, here, before_mask, here_mask = window
    _, following, _, following_mask = next_window
    push, pop, no_op = action
    to_push, to_pop, to_no_op = products
    sum_push, sum_pop, sum_no_op = sums
    to_push = tl.fma(grad, before, to_push)
    sum_push = tl.fma(grad_m, before_mask, sum_push)
    sum_no_op = tl.fma(grad_m, here_mask, sum_no_op)
    complete = push[:, None] * grad
    complete_mask = tl.fma(no_op, above_mask[0], push * grad_m)
    if DISCIPLINE != "push_only":
        sum_pop = tl.fma(grad_m, following_mask, sum_pop)
        complete_mask = tl.fma(pop, above_mask[1], complete_mask)
    if DISCIPLINE == "queue":
        ratio, divisor, occupied = ratio_of(here_mask, following_mask, TINY)
        kept, quotient, through_ratio = above_queue
        complete = tl.fma(kept[:, None], above[0], complete)
        complete_mask += through_ratio
        stays = tl.sum(grad * here, 1)
        sum_no_op += stays
        sum_pop = tl.fma(ratio, stays, sum_pop)
        through_ratio = quotient
        quotient = tl.where(occupied, _divided(pop * stays, divisor), 0)
        above_queue = (tl.fma(pop, ratio, no_op), quotient, tl.fma(-ratio, quotient, through_ratio))
    else:
        to_no_op = tl.fma(grad, here, to_no_op)
        complete = tl.fma(no_op[:, None], above[0], complete)
    if DISCIPLINE == "stack":
        to_pop = tl.fma(grad, following, to_pop)
        complete = tl.fma(pop[:, None], above[1], complete)
    return (to_push, to_pop, to_no_op), (sum_push, sum_pop, sum_no_op), complete, complete_mask, above_queue
