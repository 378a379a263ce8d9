"""The kernels of `triton_scan`: a scan over the tokens, and its gradients. Needs Triton.

One program holds the stacks of one head of one row of the batch or, with feedback, of all heads of the row: a tile
[H, S, D] of contents and one [H, S, 1] of occupation, each size padded to a power of two (the head alone: H = 1).

Both tiles stay in registers from the first token to the last. What makes a scan slow is not arithmetic (5 S D
multiply-adds a token) but the chain of dependent operations from one state to the next, and in it the shift of the
slots. `tl.gather` along the slots is a shuffle within a warp where S fits one, an exchange through shared memory
otherwise: about 30 cycles. A scratch in global memory needs a store, a barrier and a load, 40 cycles if the line is in
L1 and 250 if not; a product with a shift matrix S times the arithmetic, as float32 must not become TF32.

Without feedback the reads are outside that chain. Programs share nothing, so every sum has one order: results are
deterministic. Pointers name their tensors; N = the slots kept, which tiles pad to S.
"""

import triton
import triton.language as tl

DYNAMIC = ["num_tokens", "kept", "num_empty", "interval", "num_checkpoints"]  # no kernel of its own for each length


@triton.jit
def _shifted(values, offset: tl.constexpr):
    """values[h, j + offset, d]; at the ends, the last one there is."""
    size: tl.constexpr = values.shape[1]
    j = tl.arange(0, size)[None, :, None] + offset
    j = tl.minimum(tl.maximum(j, 0), size - 1)
    return tl.gather(values, tl.broadcast_to(j, values.shape), 1)


@triton.jit
def _lowered(values, first, j, kept):
    """values[j-1], with `first` at j = 0."""
    return tl.where(j == 0, first, tl.where(j < kept, _shifted(values, -1), 0))


@triton.jit
def _raised(values, j, kept):
    """values[j+1], with 0 at the last slot."""
    return tl.where(j + 1 < kept, _shifted(values, 1), 0)


@triton.jit
def _ratio(mask, j, kept, TINY: tl.constexpr):
    """`reference.ratio`: M[j+1] / M[j], 0 where M[j] is; and where it is not."""
    occupied = mask >= TINY
    return tl.where(occupied, tl.div_rn(_raised(mask, j, kept), tl.where(occupied, mask, 1)), 0), occupied


@triton.jit
def _update(slots, mask, x, push, pop, no_op, j, kept, DISCIPLINE: tl.constexpr, TINY: tl.constexpr):
    """`reference.update`. slots [H, S, D], mask [H, S, 1], x [H, 1, D], probabilities [H, 1, 1]."""
    new_slots = push * _lowered(slots, x, j, kept) + no_op * slots
    new_mask = push * _lowered(mask, 1, j, kept) + no_op * mask
    if DISCIPLINE == "queue":
        new_slots += pop * slots * _ratio(mask, j, kept, TINY)[0]
    elif DISCIPLINE == "stack":
        new_slots += pop * _raised(slots, j, kept)
    if DISCIPLINE != "push_only":
        new_mask += pop * _raised(mask, j, kept)
    return new_slots, new_mask


@triton.jit
def _weights(slots, mask, query, j, kept, num_empty, READ_MASK: tl.constexpr, EMPTY: tl.constexpr, TINY: tl.constexpr):
    """Softmax of `reference.scores` [H, S, 1], over the `num_empty` slots (of score EMPTY) not kept too; w_g . St."""
    content = tl.sum(query * slots, 2, keep_dims=True)
    if READ_MASK == "multiply":
        scores = content * mask
    elif READ_MASK == "log":
        scores = content + tl.log(tl.maximum(mask, TINY))
    else:
        scores = content + (1 - mask) * EMPTY  # the penalty is what an empty slot has
    scores = tl.where(j < kept, scores, float("-inf"))
    highest = tl.max(scores, 1, keep_dims=True)  # [H, 1, 1]
    empty = tl.full(highest.shape, EMPTY, highest.dtype)
    highest = tl.where(num_empty > 0, tl.maximum(highest, empty), highest)
    weights = tl.exp(scores - highest)
    total = tl.sum(weights, 1, keep_dims=True) + num_empty * tl.exp(tl.minimum(empty - highest, 0))
    return weights / total, content


@triton.jit
def _softmax(push, pop, no_op):
    highest = tl.maximum(tl.maximum(push, pop), no_op)
    push, pop, no_op = tl.exp(push - highest), tl.exp(pop - highest), tl.exp(no_op - highest)
    total = push + pop + no_op
    return tl.div_rn(push, total), tl.div_rn(pop, total), tl.div_rn(no_op, total)


@triton.jit
def _load_logits(logits, at, present, NUM_ACTIONS: tl.constexpr):
    """Logits of push, pop, no-op; of two actions, pop's is -inf."""
    push = tl.load(logits + at, present, other=0)
    no_op = tl.load(logits + at + NUM_ACTIONS - 1, present, other=0)
    if NUM_ACTIONS == 3:
        return push, tl.load(logits + at + 1, present, other=0), no_op
    return push, tl.full(push.shape, float("-inf"), push.dtype), no_op


@triton.jit
def _store_logits(logits, at, present, push, pop, no_op, NUM_ACTIONS: tl.constexpr):
    tl.store(logits + at, push, present)
    tl.store(logits + at + NUM_ACTIONS - 1, no_op, present)
    if NUM_ACTIONS == 3:
        tl.store(logits + at + 1, pop, present)


@triton.jit
def _activated(read, ACTIVATION: tl.constexpr):
    """f(R) of the feedback."""
    if ACTIVATION == "tanh":
        falling = tl.exp(-2 * tl.abs(read))
        size = (1 - falling) / (1 + falling)
        read = tl.where(read < 0, -size, size)
    return read


@triton.jit
def _load_map(weights, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, H: tl.constexpr, D: tl.constexpr):
    """P [H*D, H*D], zero where a size is padded."""
    k = tl.arange(0, H * D)
    present = (k // D < HEADS) & (k % D < HEAD_DIM)
    k = k // D * HEAD_DIM + k % D
    at = k[:, None] * (HEADS * HEAD_DIM) + k[None, :]
    return tl.load(weights + at, present[:, None] & present[None, :], other=0)


@triton.jit
def _load_action_map(
    weights,
    action: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_ACTIONS: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
):
    """Q [H*D, H] of one action."""
    k, head = tl.arange(0, H * D), tl.arange(0, H)
    present = (k // D < HEADS) & (k % D < HEAD_DIM)
    k = k // D * HEAD_DIM + k % D
    at = (k[:, None] * HEADS + head[None, :]) * NUM_ACTIONS + action
    return tl.load(weights + at, present[:, None] & (head < HEADS)[None, :], other=0)


@triton.jit
def _applied(fed, weights, to: tl.constexpr):
    """fed [H, 1, D] @ weights [H*D, to], as [H, 1, to / H]."""
    heads: tl.constexpr = fed.shape[0]
    fed = tl.reshape(fed, [weights.shape[0], 1])
    return tl.reshape(tl.sum(fed * weights, 0), [heads, 1, to // heads])


@triton.jit
def _transposed(grad, weights):
    """The gradient of `_applied` to what was fed: [H*D]."""
    return tl.sum(weights * tl.reshape(grad, [1, weights.shape[1]]), 1)


@triton.jit
def _place(kept, FEEDBACK: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, S: tl.constexpr):
    """Of this program: the row, its heads [H, 1, 1], slots j [1, S, 1]; offsets of a mask [H, S, 1] within a row."""
    programs_per_row: tl.constexpr = 1 if FEEDBACK else HEADS
    row = (tl.program_id(0) // programs_per_row).to(tl.int64)
    num_stacks = (tl.num_programs(0) // programs_per_row).to(tl.int64) * HEADS
    head = tl.program_id(0) % programs_per_row + tl.arange(0, H)[:, None, None]
    j = tl.arange(0, S)[None, :, None]
    return row, num_stacks, head, j, head * kept + j


@triton.jit(do_not_specialize=DYNAMIC)
def forward(
    x,  # [B, T, H, D]
    logits,  # [B, T, H, 3 or 2]
    query,  # [H, D]
    initial_slots,  # [B, H, N, D]
    initial_mask,  # [B, H, N]
    feedback_x,  # P [H*D, H, D]
    feedback_logits,  # Q [H*D, H, 3 or 2]
    initial_read,  # R_{-1} [B, H, D], with feedback
    read,  # out [B, T, H, D]
    occupancy,  # out [B, T, H]
    final_slots,  # out [B, H, N, D]
    final_mask,  # out [B, H, N]
    fed_x,  # out [B, T, H, D], x with the feedback
    fed_logits,  # out [B, T, H, 3 or 2]
    saved_slots,  # out [C, B, H, N, D], the states before tokens 0, interval, 2 interval ...
    saved_mask,  # out [C, B, H, N]
    num_tokens,
    kept,
    num_empty,
    interval,
    num_checkpoints,  # 0: save nothing
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_ACTIONS: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DISCIPLINE: tl.constexpr,
    READ: tl.constexpr,
    READ_MASK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FEEDBACK: tl.constexpr,
    EMPTY: tl.constexpr,
    TINY: tl.constexpr,
):
    """`reference.scan`."""
    row, num_stacks, head, j, at_mask = _place(kept, FEEDBACK, HEADS, H, S)
    d = tl.arange(0, D)[None, None, :]
    here, vector = head < HEADS, (head < HEADS) & (d < HEAD_DIM)  # [H, 1, 1], [H, 1, D]
    at_slots = at_mask * HEAD_DIM + d  # [H, S, D]
    at_vector = head * HEAD_DIM + d  # [H, 1, D]
    stacks = row * HEADS * kept

    slots = tl.load(initial_slots + stacks * HEAD_DIM + at_slots, vector & (j < kept), other=0)
    mask = tl.load(initial_mask + stacks + at_mask, here & (j < kept), other=0)
    w = tl.zeros([H, 1, D], slots.dtype)
    if READ == "global":
        w = tl.load(query + at_vector, vector, other=0)
    last = tl.zeros([H, 1, D], slots.dtype)
    if FEEDBACK:
        last = tl.load(initial_read + row * HEADS * HEAD_DIM + at_vector, vector, other=0)

    for t in range(num_tokens):
        if num_checkpoints > 0:
            if t % interval == 0:
                saved = t // interval * num_stacks * kept + stacks
                tl.store(saved_slots + saved * HEAD_DIM + at_slots, slots, vector & (j < kept))
                tl.store(saved_mask + saved + at_mask, mask, here & (j < kept))
        token = (row * num_tokens + t) * HEADS  # its first stack
        pushed = tl.load(x + token * HEAD_DIM + at_vector, vector, other=0)
        push, pop, no_op = _load_logits(logits + token * NUM_ACTIONS, head * NUM_ACTIONS, here, NUM_ACTIONS)
        if FEEDBACK:
            last = _activated(last, ACTIVATION)
            pushed += _applied(last, _load_map(feedback_x, HEADS, HEAD_DIM, H, D), H * D)
            push += _applied(last, _load_action_map(feedback_logits, 0, HEADS, HEAD_DIM, NUM_ACTIONS, H, D), H)
            if NUM_ACTIONS == 3:
                pop += _applied(last, _load_action_map(feedback_logits, 1, HEADS, HEAD_DIM, NUM_ACTIONS, H, D), H)
            weights = _load_action_map(feedback_logits, NUM_ACTIONS - 1, HEADS, HEAD_DIM, NUM_ACTIONS, H, D)
            no_op += _applied(last, weights, H)
            tl.store(fed_x + token * HEAD_DIM + at_vector, pushed, vector)
            _store_logits(fed_logits + token * NUM_ACTIONS, head * NUM_ACTIONS, here, push, pop, no_op, NUM_ACTIONS)
        push, pop, no_op = _softmax(push, pop, no_op)
        slots, mask = _update(slots, mask, pushed, push, pop, no_op, j, kept, DISCIPLINE, TINY)
        if READ == "top":
            last = tl.sum(tl.where(j == 0, slots, 0), 1, keep_dims=True)
        else:
            weights, _ = _weights(slots, mask, w, j, kept, num_empty, READ_MASK, EMPTY, TINY)
            last = tl.sum(weights * slots, 1, keep_dims=True)
        tl.store(read + token * HEAD_DIM + at_vector, last, vector)
        tl.store(occupancy + token + head, tl.sum(mask, 1, keep_dims=True), here)

    tl.store(final_slots + stacks * HEAD_DIM + at_slots, slots, vector & (j < kept))
    tl.store(final_mask + stacks + at_mask, mask, here & (j < kept))


@triton.jit
def _read_backward(
    grad, slots, mask, w, j, kept, num_empty, READ_MASK: tl.constexpr, EMPTY: tl.constexpr, TINY: tl.constexpr
):
    """From that of a global read [H, 1, D], the gradients to St, M and w_g."""
    weights, content = _weights(slots, mask, w, j, kept, num_empty, READ_MASK, EMPTY, TINY)
    towards = tl.sum(grad * slots, 2, keep_dims=True)  # to each weight [H, S, 1]
    grad_score = weights * (towards - tl.sum(weights * towards, 1, keep_dims=True))
    if READ_MASK == "multiply":
        grad_content, grad_mask = grad_score * mask, grad_score * content
    elif READ_MASK == "log":
        grad_content = grad_score
        grad_mask = tl.where(mask >= TINY, tl.div_rn(grad_score, tl.maximum(mask, TINY)), 0)
    else:
        grad_content, grad_mask = grad_score, grad_score * -EMPTY
    return weights * grad + grad_content * w, grad_mask, tl.sum(grad_content * slots, 1, keep_dims=True)


@triton.jit
def _total(values):
    """Over slots and dimensions [H, 1, 1]."""
    return tl.sum(tl.sum(values, 2, keep_dims=True), 1, keep_dims=True)


@triton.jit
def _update_backward(
    grad_slots, grad_mask, slots, mask, x, push, pop, no_op, j, kept, DISCIPLINE: tl.constexpr, TINY: tl.constexpr
):
    """From those to St', M' the gradients to St, M, x, and to the probabilities of push, pop and no-op [H, 1, 1]."""
    above, above_mask = _raised(grad_slots, j, kept), _raised(grad_mask, j, kept)  # of where a push moves slot j
    below_mask = _lowered(grad_mask, 0, j, kept)  # of where a pop does
    first = tl.sum(tl.where(j == 0, grad_slots, 0), 1, keep_dims=True)  # [H, 1, D]
    grad_push = _total(slots * above) + _total(mask * above_mask)
    grad_push += tl.sum(first * x, 2, keep_dims=True) + tl.sum(tl.where(j == 0, grad_mask, 0), 1, keep_dims=True)
    stays = tl.sum(slots * grad_slots, 2, keep_dims=True)  # [H, S, 1]
    grad_no_op = tl.sum(stays + mask * grad_mask, 1, keep_dims=True)
    new_slots = push * above + no_op * grad_slots
    new_mask = push * above_mask + no_op * grad_mask
    grad_pop = tl.zeros_like(grad_push)
    if DISCIPLINE != "push_only":
        grad_pop = tl.sum(mask * below_mask, 1, keep_dims=True)
        new_mask += pop * below_mask
    if DISCIPLINE == "stack":
        below = _lowered(grad_slots, 0, j, kept)
        grad_pop += _total(slots * below)
        new_slots += pop * below
    if DISCIPLINE == "queue":
        ratio, occupied = _ratio(mask, j, kept, TINY)
        grad_pop += tl.sum(ratio * stays, 1, keep_dims=True)
        new_slots += pop * ratio * grad_slots
        grad_following = tl.where(occupied, tl.div_rn(pop * stays, tl.where(occupied, mask, 1)), 0)
        new_mask += _lowered(grad_following, 0, j, kept) - ratio * grad_following
    return new_slots, new_mask, push * first, grad_push, grad_pop, grad_no_op


@triton.jit(do_not_specialize=DYNAMIC)
def backward(
    x,  # [B, T, H, D], with the feedback, as pushed
    logits,  # [B, T, H, 3 or 2], with the feedback
    query,  # [H, D]
    feedback_x,  # P [H*D, H, D]
    feedback_logits,  # Q [H*D, H, 3 or 2]
    last_read,  # R_{t-1} [B, T, H, D], with feedback
    saved_slots,  # [C, B, H, N, D]
    saved_mask,  # [C, B, H, N]
    grad_read,  # [B, T, H, D]
    grad_fed_logits,  # [B, T, H, 3 or 2], with feedback
    grad_final_slots,  # [B, H, N, D]
    grad_final_mask,  # [B, H, N]
    segment_slots,  # scratch [interval, B, H, N, D]
    segment_mask,  # scratch [interval, B, H, N]
    grad_x,  # out [B, T, H, D]
    grad_logits,  # out [B, T, H, 3 or 2]
    grad_query,  # out [B, H, D]
    grad_initial_slots,  # out [B, H, N, D]
    grad_initial_mask,  # out [B, H, N]
    grad_initial_read,  # out [B, H, D], with feedback
    num_tokens,
    kept,
    num_empty,
    interval,
    num_checkpoints,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_ACTIONS: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DISCIPLINE: tl.constexpr,
    READ: tl.constexpr,
    READ_MASK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FEEDBACK: tl.constexpr,
    EMPTY: tl.constexpr,
    TINY: tl.constexpr,
):
    """The gradients of `forward`, segment by segment from the last: its states are built again from its checkpoint."""
    row, num_stacks, head, j, at_mask = _place(kept, FEEDBACK, HEADS, H, S)
    d = tl.arange(0, D)[None, None, :]
    here, vector = head < HEADS, (head < HEADS) & (d < HEAD_DIM)  # [H, 1, 1], [H, 1, D]
    at_slots = at_mask * HEAD_DIM + d  # [H, S, D]
    at_vector = head * HEAD_DIM + d  # [H, 1, D]
    stacks, stride = row * HEADS * kept, num_stacks * kept

    grad_slots = tl.load(grad_final_slots + stacks * HEAD_DIM + at_slots, vector & (j < kept), other=0)
    grad_mask = tl.load(grad_final_mask + stacks + at_mask, here & (j < kept), other=0)
    w = tl.zeros([H, 1, D], grad_slots.dtype)
    if READ == "global":
        w = tl.load(query + at_vector, vector, other=0)
    grad_w = tl.zeros([H, 1, D], grad_slots.dtype)
    grad_last = tl.zeros([H, 1, D], grad_slots.dtype)  # to the read before, through the feedback

    for later_segments in range(num_checkpoints):
        segment = num_checkpoints - 1 - later_segments
        start = segment * interval
        length = tl.minimum(interval, num_tokens - start)
        saved = segment * stride + stacks
        slots = tl.load(saved_slots + saved * HEAD_DIM + at_slots, vector & (j < kept), other=0)
        mask = tl.load(saved_mask + saved + at_mask, here & (j < kept), other=0)
        for i in range(length):
            saved = i * stride + stacks
            tl.store(segment_slots + saved * HEAD_DIM + at_slots, slots, vector & (j < kept))
            tl.store(segment_mask + saved + at_mask, mask, here & (j < kept))
            token = (row * num_tokens + start + i) * HEADS
            pushed = tl.load(x + token * HEAD_DIM + at_vector, vector, other=0)
            push, pop, no_op = _load_logits(logits + token * NUM_ACTIONS, head * NUM_ACTIONS, here, NUM_ACTIONS)
            push, pop, no_op = _softmax(push, pop, no_op)
            slots, mask = _update(slots, mask, pushed, push, pop, no_op, j, kept, DISCIPLINE, TINY)
        tl.debug_barrier()  # a thread may load what another has stored
        for later in range(length):
            i = length - 1 - later
            token = (row * num_tokens + start + i) * HEADS
            grad = tl.load(grad_read + token * HEAD_DIM + at_vector, vector, other=0) + grad_last
            if READ == "top":
                grad_slots += tl.where(j == 0, grad, 0)
            else:
                to_slots, to_mask, to_w = _read_backward(
                    grad, slots, mask, w, j, kept, num_empty, READ_MASK, EMPTY, TINY
                )
                grad_slots += to_slots
                grad_mask += to_mask
                grad_w += to_w
            saved = i * stride + stacks  # the state before the token
            slots = tl.load(segment_slots + saved * HEAD_DIM + at_slots, vector & (j < kept), other=0)
            mask = tl.load(segment_mask + saved + at_mask, here & (j < kept), other=0)
            pushed = tl.load(x + token * HEAD_DIM + at_vector, vector, other=0)
            push, pop, no_op = _load_logits(logits + token * NUM_ACTIONS, head * NUM_ACTIONS, here, NUM_ACTIONS)
            push, pop, no_op = _softmax(push, pop, no_op)
            grad_slots, grad_mask, to_x, to_push, to_pop, to_no_op = _update_backward(
                grad_slots, grad_mask, slots, mask, pushed, push, pop, no_op, j, kept, DISCIPLINE, TINY
            )
            mean = push * to_push + pop * to_pop + no_op * to_no_op
            to_push, to_pop, to_no_op = push * (to_push - mean), pop * (to_pop - mean), no_op * (to_no_op - mean)
            if FEEDBACK:
                at = token * NUM_ACTIONS
                others = _load_logits(grad_fed_logits + at, head * NUM_ACTIONS, here, NUM_ACTIONS)
                to_push += others[0]
                to_no_op += others[2]
                to_fed = _transposed(to_x, _load_map(feedback_x, HEADS, HEAD_DIM, H, D))
                weights = _load_action_map(feedback_logits, 0, HEADS, HEAD_DIM, NUM_ACTIONS, H, D)
                to_fed += _transposed(to_push, weights)
                if NUM_ACTIONS == 3:
                    to_pop += others[1]
                    weights = _load_action_map(feedback_logits, 1, HEADS, HEAD_DIM, NUM_ACTIONS, H, D)
                    to_fed += _transposed(to_pop, weights)
                weights = _load_action_map(feedback_logits, NUM_ACTIONS - 1, HEADS, HEAD_DIM, NUM_ACTIONS, H, D)
                to_fed += _transposed(to_no_op, weights)
                grad_last = tl.reshape(to_fed, [H, 1, D])
                if ACTIVATION == "tanh":
                    fed = _activated(tl.load(last_read + token * HEAD_DIM + at_vector, vector, other=0), ACTIVATION)
                    grad_last *= 1 - fed * fed
            tl.store(grad_x + token * HEAD_DIM + at_vector, to_x, vector)
            _store_logits(
                grad_logits + token * NUM_ACTIONS, head * NUM_ACTIONS, here, to_push, to_pop, to_no_op, NUM_ACTIONS
            )
        tl.debug_barrier()  # the next segment stores where this one has loaded

    tl.store(grad_initial_slots + stacks * HEAD_DIM + at_slots, grad_slots, vector & (j < kept))
    tl.store(grad_initial_mask + stacks + at_mask, grad_mask, here & (j < kept))
    if READ == "global":
        tl.store(grad_query + row * HEADS * HEAD_DIM + at_vector, grad_w, vector)
    if FEEDBACK:
        tl.store(grad_initial_read + row * HEADS * HEAD_DIM + at_vector, grad_last, vector)
