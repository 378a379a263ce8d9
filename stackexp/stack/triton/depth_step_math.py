"""The equations of the depth axis, slot by slot, on the tiles of `depth_step_kernels`.

The layers since the last stored stack are the stages of a pipeline; the current layer is the last stage. Stage i
computes the slots V_{i+1} from V_i,

    V_{i+1}[j] = a_push V_i[j-1] + a_pop V_i[j+1] + a_noop V_i[j]        V_i[-1] = x_i

so it can emit slot j once it has received slot j+1. It keeps the last two received slots, its window. The first stage
receives V_0 from memory. The last stage emits the slots St' of this layer, the top first. M passes through the same
stages, with M[-1] = 1.

Sums of products are explicit `tl.fma` calls, and the kernels are compiled without automatic contraction. Forward and
backward pass must round alike, but which operations a compiler contracts depends on the surrounding code.
"""

# Tuples grow in unrolled loops, which changes their type:
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from stackexp.stack.triton.time_scan_math import divide, softmax


@triton.jit
def locate(block, num_tokens, settings: tl.constexpr):
    """Return the offsets of a block of tokens, with masks of those that exist.

    In this order: rows [ROWS] of a tensor [tokens, H], and their mask; elements [ROWS, D] of a tensor [tokens, H, D],
    and their mask; the size of a plane (one slot of all stacks); elements of a tensor [H, D].
    """
    row = tl.arange(0, settings.tokens * settings.group)
    token = tl.full(row.shape, block, tl.int64) * settings.tokens + row // settings.group
    head = tl.program_id(1) * settings.group + row % settings.group
    d = tl.arange(0, settings.padded_dim)[None, :]
    at, here = token * settings.heads + head, (token < num_tokens) & (head < settings.heads)
    plane = num_tokens.to(tl.int64) * settings.heads
    within = here[:, None] & (d < settings.head_dim)
    return at, here, at[:, None] * settings.head_dim + d, within, plane, head[:, None] * settings.head_dim + d


@triton.jit
def _mask_below(present, j, end):
    """Return `present` if j < end, else False."""
    return present & (tl.full(present.shape, j, tl.int32) < end)


@triton.jit
def load_or_default(default, pointer, at, present):
    """Load values in the dtype of `default`, 0 where not present; return `default` if the pointer is None."""
    if pointer is None:
        return default
    else:
        return tl.load(pointer + at, present, other=0).to(default.dtype)


@triton.jit
def load_slot(source, j, filled, offsets, settings: tl.constexpr):
    """Load slot j of V_0 [ROWS, D] and its M; 0 from `filled` on, a number of slots for each."""
    at, here, at_x, within, plane, _ = offsets
    slots, mask = source
    slot = tl.load(slots + j * plane * settings.head_dim + at_x, _mask_below(within, j, filled[0]), other=0)
    m = tl.load(mask + j * plane + at, _mask_below(here, j, filled[1]), other=0)
    return slot.to(settings.dtype), m.to(settings.dtype)


@triton.jit
def load_gradients(grads, j, num_new, offsets, settings: tl.constexpr):
    """Load the gradients of slot j of St' [ROWS, D] and of its M'; 0 beyond. Either pointer may be None."""
    at, here, at_x, within, plane, _ = offsets
    nothing, none = tl.full(at_x.shape, 0, settings.dtype), tl.full(at.shape, 0, settings.dtype)
    grad = load_or_default(nothing, grads[0], j * plane * settings.head_dim + at_x, _mask_below(within, j, num_new))
    return grad, load_or_default(none, grads[1], j * plane + at, _mask_below(here, j, num_new))


@triton.jit
def load_logits(logits, offsets, settings: tl.constexpr):
    """Load the logits of push, pop and no-op; -inf for pop where there are two actions."""
    at, here = offsets[0] * settings.num_actions, offsets[1]
    push = tl.load(logits + at, here, other=0).to(settings.dtype)
    no_op = tl.load(logits + at + settings.num_actions - 1, here, other=0).to(settings.dtype)
    pop = tl.full(push.shape, float("-inf"), settings.dtype)
    if settings.num_actions == 3:
        pop = tl.load(logits + at + 1, here, other=0).to(settings.dtype)
    return push, pop, no_op


@triton.jit
def compute_log_actions(push, pop, no_op, settings: tl.constexpr):
    """Return log a for these logits, and the entropy. With two actions, log a_pop is 0."""
    highest = tl.maximum(tl.maximum(push, pop), no_op)
    log_total = tl.log(tl.exp(push - highest) + tl.exp(pop - highest) + tl.exp(no_op - highest))
    push, no_op = push - highest - log_total, no_op - highest - log_total
    pop = pop - highest - log_total if settings.num_actions == 3 else tl.zeros_like(push)
    entropy = -(tl.exp(push) * push + tl.exp(no_op) * no_op)
    if settings.num_actions == 3:
        entropy -= tl.exp(pop) * pop
    return push, pop, no_op, entropy


@triton.jit
def logits_backward(to_action, to_entropy, action, logits, settings: tl.constexpr):
    """Return the gradients of the logits from those of a and of its entropy."""
    push, pop, no_op = action
    to_push, to_pop, to_no_op = to_action
    log_push, log_pop, log_no_op, entropy = compute_log_actions(logits[0], logits[1], logits[2], settings)
    mean = push * to_push + pop * to_pop + no_op * to_no_op
    return (
        push * (to_push - mean - to_entropy * (log_push + entropy)),
        pop * (to_pop - mean - to_entropy * (log_pop + entropy)),
        no_op * (to_no_op - mean - to_entropy * (log_no_op + entropy)),
    )


@triton.jit
def start_pipeline(xs, logits, offsets, settings: tl.constexpr):
    """Return the stages before they receive a slot, and their actions.

    A stage is its window: V_i[j-1], V_i[j], M_i[j-1], M_i[j], at first with j = -1.
    """
    stages, actions = (), ()
    for i in tl.static_range(len(xs)):
        x = tl.load(xs[i] + offsets[2], offsets[3], other=0).to(settings.dtype)
        push, pop, no_op = load_logits(logits[i], offsets, settings)
        actions += (softmax(push, pop, no_op),)
        one = tl.full(push.shape, 1, settings.dtype)
        stages += ((x, x, one, one),)
    return stages, actions


@triton.jit
def _mask_ratio(here, following, settings: tl.constexpr):
    """Return `reference.mask_ratio` of M[j] and M[j+1]; then M[j], or 1 where it is 0; then whether it is not 0."""
    occupied = here >= settings.tiny
    divisor = tl.where(occupied, here, 1)
    return tl.where(occupied, divide(following, divisor), 0), divisor, occupied


@triton.jit
def _update(stage, slot, mask, action, j, num_slots, settings: tl.constexpr):
    """Return V_{i+1}[j] and M_{i+1}[j], given the window and V_i[j+1], M_i[j+1]."""
    before, here, before_mask, here_mask = stage
    push, pop, no_op = action
    push = tl.where(j < num_slots, push, 0)  # slot S must stay empty
    keep = no_op
    if settings.discipline == "queue":
        keep = tl.fma(pop, _mask_ratio(here_mask, mask, settings)[0], no_op)
    new = tl.fma(keep[:, None], here, push[:, None] * before)
    new_mask = tl.fma(no_op, here_mask, push * before_mask)
    if settings.discipline == "stack":
        new = tl.fma(pop[:, None], slot, new)
    if settings.discipline != "push_only":
        new_mask = tl.fma(pop, mask, new_mask)
    return new, new_mask


@triton.jit
def advance_pipeline(stages, actions, received, t, num_slots, EMITTING: tl.constexpr, settings: tl.constexpr):
    """Pass slot t of V_0 to the first stage; return the stages afterwards, and the slot that the last one emits.

    Only the first EMITTING stages emit a slot. The next stage, if any, receives its slot 0; later ones receive nothing.
    """
    slot, mask = received
    after = ()
    for i in tl.static_range(len(stages)):
        stage = stages[i]
        if i > EMITTING:
            after += (stage,)
        else:
            after += ((stage[1], slot, stage[3], mask),)
            if i < EMITTING:
                slot, mask = _update(stage, slot, mask, actions[i], t - i - 1, num_slots, settings)
    return after, slot, mask


@triton.jit
def fill_pipeline(stages, actions, source, filled, num_slots, offsets, settings: tl.constexpr):
    """Advance until the last stage has received its slot 0, so that each further slot makes it emit one."""
    for t in tl.static_range(len(stages)):
        slot = load_slot(source, t, filled, offsets, settings)
        stages, _, _ = advance_pipeline(stages, actions, slot, t, num_slots, t, settings)
    return stages


@triton.jit
def _compute_score(slot, mask, w, settings: tl.constexpr):
    """Return `reference.compute_scores` of a slot, and w_g . St'."""
    content = tl.sum(w * slot, 1)
    if settings.read_mask == "multiply":
        return content * mask, content
    elif settings.read_mask == "log":
        return content + tl.log(tl.maximum(mask, settings.tiny)), content
    else:
        return tl.fma(1 - mask, settings.empty_score, content), content  # the penalty is the score of an empty slot


@triton.jit
def read_slots(stages, actions, slots, w, sizes, offsets, settings: tl.constexpr):
    """Read the slots from the top; return R [ROWS, D], the highest score, the sum of exp(score - highest), sum of M'.

    `slots`: V_0 and its M, then the outputs for St' and M', or None.
    """
    at, here, at_x, within, plane, _ = offsets
    source, new_slots, new_mask = (slots[0], slots[1]), slots[2], slots[3]
    needed, num_occupied, num_new, num_slots = sizes
    filled = (needed, num_occupied)
    stages = fill_pipeline(stages, actions, source, filled, num_slots, offsets, settings)
    occupancy = tl.full([w.shape[0]], 0, settings.dtype)
    read = tl.full(w.shape, 0, settings.dtype)
    total = occupancy + (num_slots - num_new)  # the empty slots
    highest = tl.where(total > 0, tl.full(total.shape, settings.empty_score, settings.dtype), float("-inf"))
    received = load_slot(source, len(stages), filled, offsets, settings)
    for j in tl.range(num_new, loop_unroll_factor=2):
        t = j + len(stages)
        later = load_slot(source, t + 1, filled, offsets, settings)  # during the work on this slot
        stages, new, m = advance_pipeline(stages, actions, received, t, num_slots, len(stages), settings)
        received = later
        occupancy += m
        if settings.read == "global":
            score = _compute_score(new, m, w, settings)[0]
            raised = tl.maximum(highest, score)
            scale, weight = tl.exp(highest - raised), tl.exp(score - raised)
            total, read = tl.fma(total, scale, weight), tl.fma(read, scale[:, None], weight[:, None] * new)
            highest = raised
        else:
            read = tl.where(j == 0, new, read)
        if new_slots is not None:
            tl.store(new_slots + j * plane * settings.head_dim + at_x, new, within)
            tl.store(new_mask + j * plane + at, m, here)
    if settings.read == "global":
        read = divide(read, total[:, None])
    return read, highest, total, occupancy


@triton.jit
def read_slot_backward(grads, slot, mask, w, softmax, is_occupied, settings: tl.constexpr):
    """Add a slot's share of the gradients of a global read to those of St'[j], M'[j] and w_g.

    `softmax`: dR, dR . R, the highest score, and the softmax denominator; with log_total as the score, it is 1.
    """
    grad, grad_mask, to_w = grads
    grad_read, mean, highest, total = softmax
    score, content = _compute_score(slot, mask, w, settings)
    weight = divide(tl.where(is_occupied, tl.exp(tl.minimum(score - highest, 0)), 0), total)
    to_score = weight * (tl.sum(grad_read * slot, 1) - mean)
    to_content = to_score
    if settings.read_mask == "multiply":
        to_content, to_mask = to_score * mask, to_score * content
    elif settings.read_mask == "log":
        to_mask = tl.where(mask >= settings.tiny, divide(to_score, tl.maximum(mask, settings.tiny)), 0)
    else:
        to_mask = to_score * -settings.empty_score
    grad = tl.fma(weight[:, None], grad_read, tl.fma(to_content[:, None], w, grad))
    return grad, grad_mask + to_mask, tl.fma(to_content[:, None], slot, to_w)


@triton.jit
def update_backward(grads, above, window, next_window, action, sums, settings: tl.constexpr):
    """Complete the gradients of slot j - 1 of St and M from those of slot j of St' and M', and add to those of a.

    `above`: the gradients of the slots j-1 and j-2 of St', of M', and for a queue what slot j-1 keeps and what its M
    receives through M[j+1] / M[j]. The windows have St[j-1], St[j], St[j+1]. `sums`: the gradients of a, three
    [ROWS, D] to be summed over D and three [ROWS].
    """
    grad, grad_m = grads
    above, above_mask, above_queue = above
    before, here, before_mask, here_mask = window
    _, following, _, following_mask = next_window
    push, pop, no_op = action
    to_push, to_pop, to_no_op, sum_push, sum_pop, sum_no_op = sums
    to_push = tl.fma(grad, before, to_push)
    sum_push = tl.fma(grad_m, before_mask, sum_push)
    sum_no_op = tl.fma(grad_m, here_mask, sum_no_op)
    complete = push[:, None] * grad
    complete_mask = tl.fma(no_op, above_mask[0], push * grad_m)
    if settings.discipline != "push_only":
        sum_pop = tl.fma(grad_m, following_mask, sum_pop)
        complete_mask = tl.fma(pop, above_mask[1], complete_mask)
    if settings.discipline == "queue":
        ratio, divisor, occupied = _mask_ratio(here_mask, following_mask, settings)
        kept, quotient, through_ratio = above_queue
        complete = tl.fma(kept[:, None], above[0], complete)
        complete_mask += through_ratio
        stays = tl.sum(grad * here, 1)
        sum_no_op += stays
        sum_pop = tl.fma(ratio, stays, sum_pop)
        through_ratio = quotient
        quotient = tl.where(occupied, divide(pop * stays, divisor), 0)
        above_queue = (tl.fma(pop, ratio, no_op), quotient, tl.fma(-ratio, quotient, through_ratio))
    else:
        to_no_op = tl.fma(grad, here, to_no_op)
        complete = tl.fma(no_op[:, None], above[0], complete)
    if settings.discipline == "stack":
        to_pop = tl.fma(grad, following, to_pop)
        complete = tl.fma(pop[:, None], above[1], complete)
    return (to_push, to_pop, to_no_op, sum_push, sum_pop, sum_no_op), complete, complete_mask, above_queue
