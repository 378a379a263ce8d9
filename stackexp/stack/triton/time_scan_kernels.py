"""The kernels of `triton_scan`: a scan over the tokens, and its gradients. Needs Triton.

One program holds the stacks of one head of one row of the batch or, with feedback, of all heads of the row, as tiles
(`triton_math`), from the first token to the last. What makes a scan slow is not arithmetic (5 S D multiply-adds a
token) but the chain of dependent operations from one state to the next, and in it the shift of the slots, which is a
`tl.gather` along them. Without feedback and with S <= 32 a program is one warp: tiles stay in registers and a gather
compiles to shuffles, about 25 cycles as an H100's latencies are published, without a barrier. A scratch in global
memory would need a store, a barrier and a load, 40 cycles if the line is in L1 and 250 if not; a product with a shift
matrix S times the arithmetic, outside the tensor cores, as float32 must not become TF32.

More slots, and feedback, take several warps, and what crosses them barriers: compiled for an H100 a token has 14
forward and 20 backward with feedback at S = 24, and 30 and 74 at S = 512, where 56 and 232 bytes are spilled. All this
is read from compiled code, not yet measured on a GPU; `benchmarks/scan.py --device cuda` measures it.

Feedback makes every number of x_t and of the logits depend on all of R_{t-1}: those go through global memory, where
each side has the layout that suits it. Without it programs share nothing and reads are outside the chain. Every sum has
one order: results are deterministic.

Arguments that both kernels have: `kept` slots N of S; `num_empty`, the other S - N; HEADS, HEAD_DIM and NUM_ACTIONS as
they are, H, S, D padded; for the feedback NUMBERS = H*D and LOGITS = H*3 padded, UNITS = m as it is, BLOCK rows of P
(and of V, where HIDDEN) at once.
"""

import triton
import triton.language as tl

from stackexp.stack.triton.feedback_kernels import feed_back, feed_back_backward
from stackexp.stack.triton.time_scan_math import read_backward, softmax, update, update_backward, weigh

# not what a kernel is made for: there is one pair of kernels for each power of two of slots, whatever the lengths
DYNAMIC = ["num_tokens", "kept", "num_empty", "interval", "num_checkpoints"]


@triton.jit
def _place(kept, FEEDBACK: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, S: tl.constexpr):
    """Of this program: the row, its heads [H, 1, 1], slots j [1, S, 1]; offsets of M [H, S, 1] within a row."""
    programs_per_row: tl.constexpr = 1 if FEEDBACK else HEADS
    row = (tl.program_id(0) // programs_per_row).to(tl.int64)
    num_stacks = (tl.num_programs(0) // programs_per_row).to(tl.int64) * HEADS
    head = tl.program_id(0) % programs_per_row + tl.arange(0, H)[:, None, None]
    j = tl.arange(0, S)[None, :, None]
    return row, num_stacks, head, j, head * kept + j


@triton.jit
def _load_token(x, at_x, with_x, logits, at_logits, with_logits, NUM_ACTIONS: tl.constexpr):
    """x_t [H, 1, D] and the logits of push, pop, no-op [H, 1, 1]; of two actions, pop's is -inf."""
    pushed = tl.load(x + at_x, with_x, other=0)
    push = tl.load(logits + at_logits, with_logits, other=0)
    no_op = tl.load(logits + at_logits + NUM_ACTIONS - 1, with_logits, other=0)
    pop = tl.full(push.shape, float("-inf"), push.dtype)
    if NUM_ACTIONS == 3:
        pop = tl.load(logits + at_logits + 1, with_logits, other=0)
    return pushed, push, pop, no_op


@triton.jit(do_not_specialize=DYNAMIC)
def forward(
    x,  # [B, T, H, D]
    logits,  # [B, T, H, 3 or 2]
    query,  # [H, D]
    initial_slots,  # [B, H, N, D]
    initial_mask,  # [B, H, N]
    feedback_x,  # P [m, H, D]
    feedback_logits,  # Q [m, H, 3 or 2]
    of_read,  # where HIDDEN, V [m, H, D]
    given,  # where HIDDEN, c [B, T, m]
    read,  # out [B, T, H, D]; with feedback [B, 1 + T, H, D], and the first is given: R_{-1}
    occupancy,  # out [B, T, H]
    final_slots,  # out [B, H, N, D]
    final_mask,  # out [B, H, N]
    fed_x,  # out, with feedback [B, T, H, D]: x + P u
    fed_logits,  # out, with feedback [B, T, H, 3 or 2]
    saved_slots,  # out [C, B, H, N, D]: the states before tokens 0, interval, 2 interval ...
    saved_mask,  # out [C, B, H, N]
    num_tokens,
    kept,
    num_empty,
    interval,
    num_checkpoints,  # C; 0: save nothing
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_ACTIONS: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DISCIPLINE: tl.constexpr,
    READ: tl.constexpr,
    READ_MASK: tl.constexpr,
    FEEDBACK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EMPTY: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
    NUMBERS: tl.constexpr,
    LOGITS: tl.constexpr,
    UNITS: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """Compute `reference.scan`."""
    row, num_stacks, head, j, at_mask = _place(kept, FEEDBACK, HEADS, H, S)
    d = tl.arange(0, D)[None, None, :]
    here, vector = head < HEADS, (head < HEADS) & (d < HEAD_DIM)  # [H, 1, 1], [H, 1, D]
    at_slots = at_mask * HEAD_DIM + d  # [H, S, D]
    at_vector = head * HEAD_DIM + d  # [H, 1, D]
    stacks = row * HEADS * kept
    numbers: tl.constexpr = HEADS * HEAD_DIM
    inner: tl.constexpr = 2 * UNITS if ACTIVATION == "gated" else UNITS
    read += (row * (num_tokens + 1) + 1) * numbers if FEEDBACK else row * num_tokens * numbers

    slots = tl.load(initial_slots + stacks * HEAD_DIM + at_slots, vector & (j < kept), other=0)
    mask = tl.load(initial_mask + stacks + at_mask, here & (j < kept), other=0)
    w = tl.zeros([H, 1, D], slots.dtype)
    if READ == "global":
        w = tl.load(query + at_vector, vector, other=0)

    at_x, at_logits = row * num_tokens * numbers + at_vector, (row * num_tokens * HEADS + head) * NUM_ACTIONS
    if not FEEDBACK:
        following = _load_token(x, at_x, vector, logits, at_logits, here, NUM_ACTIONS)
    for t in range(num_tokens):
        if (num_checkpoints > 0) & (t % interval == 0):
            saved = t // interval * num_stacks * kept + stacks
            tl.store(saved_slots + saved * HEAD_DIM + at_slots, slots, vector & (j < kept))
            tl.store(saved_mask + saved + at_mask, mask, here & (j < kept))
        token = (row * num_tokens + t) * HEADS
        if FEEDBACK:
            tl.debug_barrier()  # the read before is written
            feed_back(
                read + (t - 1) * numbers,
                x + token * HEAD_DIM,
                logits + token * NUM_ACTIONS,
                feedback_x,
                feedback_logits,
                of_read,
                given + (row * num_tokens + t) * inner if HIDDEN else given,
                fed_x + token * HEAD_DIM,
                fed_logits + token * NUM_ACTIONS,
                HEADS,
                HEAD_DIM,
                NUM_ACTIONS,
                ACTIVATION,
                BLOCK,
                NUMBERS,
                LOGITS,
                UNITS,
                HIDDEN,
            )
            tl.debug_barrier()
            pushed, push, pop, no_op = _load_token(fed_x, at_x, vector, fed_logits, at_logits, here, NUM_ACTIONS)
        ahead = tl.minimum(t + 1, num_tokens - 1) - t  # 0: there is no next token
        at_x, at_logits = at_x + ahead * numbers, at_logits + ahead * (HEADS * NUM_ACTIONS)
        if not FEEDBACK:  # a token ahead, as memory answers later than the update is done
            pushed, push, pop, no_op = following
            following = _load_token(x, at_x, vector, logits, at_logits, here, NUM_ACTIONS)
        push, pop, no_op = softmax(push, pop, no_op)
        slots, mask = update(slots, mask, pushed, push, pop, no_op, j, kept, DISCIPLINE, TINY)
        if READ == "top":
            out = tl.sum(tl.where(j == 0, slots, 0), 1, keep_dims=True)
        else:
            weights, _ = weigh(slots, mask, w, j, kept, num_empty, READ_MASK, EMPTY, TINY)
            out = tl.sum(weights * slots, 1, keep_dims=True)
        tl.store(read + t * numbers + at_vector, out, vector)
        tl.store(occupancy + token + head, tl.sum(mask, 1, keep_dims=True), here)

    tl.store(final_slots + stacks * HEAD_DIM + at_slots, slots, vector & (j < kept))
    tl.store(final_mask + stacks + at_mask, mask, here & (j < kept))


@triton.jit(do_not_specialize=DYNAMIC)
def backward(
    x,  # [B, T, H, D], with the feedback
    logits,  # [B, T, H, 3 or 2], with the feedback
    query,  # [H, D]
    feedback_x,  # P [m, H, D]
    feedback_logits,  # Q [m, H, 3 or 2]
    of_read,  # where HIDDEN, V [m, H, D]
    fed,  # with feedback, u [B, T, m]; gated: its factors [B, T, 2 m]
    saved_slots,  # [C, B, H, N, D]
    saved_mask,  # [C, B, H, N]
    grad_read,  # [B, T, H, D]
    grad_fed_logits,  # with feedback [B, T, H, 3 or 2]
    grad_final_slots,  # [B, H, N, D]
    grad_final_mask,  # [B, H, N]
    segment_slots,  # scratch [interval, B, H, N, D]
    segment_mask,  # scratch [interval, B, H, N]
    grad_x,  # out [B, T, H, D]
    grad_logits,  # out [B, T, H, 3 or 2]
    grad_query,  # out [B, H, D]
    grad_initial_slots,  # out [B, H, N, D]
    grad_initial_mask,  # out [B, H, N]
    grad_last,  # with feedback, 0 and out [B, H, D]: to the read before, at the end to R_{-1}
    grad_given,  # out, where HIDDEN [B, T, m]
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
    FEEDBACK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EMPTY: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
    NUMBERS: tl.constexpr,
    LOGITS: tl.constexpr,
    UNITS: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """Compute the gradients of `forward`, segment by segment from the last; recompute the states of each segment."""
    row, num_stacks, head, j, at_mask = _place(kept, FEEDBACK, HEADS, H, S)
    d = tl.arange(0, D)[None, None, :]
    here, vector = head < HEADS, (head < HEADS) & (d < HEAD_DIM)  # [H, 1, 1], [H, 1, D]
    at_slots = at_mask * HEAD_DIM + d  # [H, S, D]
    at_vector = head * HEAD_DIM + d  # [H, 1, D]
    stacks, stride = row * HEADS * kept, num_stacks * kept
    numbers: tl.constexpr = HEADS * HEAD_DIM
    inner: tl.constexpr = 2 * UNITS if ACTIVATION == "gated" else UNITS

    grad_slots = tl.load(grad_final_slots + stacks * HEAD_DIM + at_slots, vector & (j < kept), other=0)
    grad_mask = tl.load(grad_final_mask + stacks + at_mask, here & (j < kept), other=0)
    w = tl.zeros([H, 1, D], grad_slots.dtype)
    if READ == "global":
        w = tl.load(query + at_vector, vector, other=0)
    grad_w = tl.zeros([H, 1, D], grad_slots.dtype)

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
            at_x, at_logits = token * HEAD_DIM + at_vector, (token + head) * NUM_ACTIONS
            pushed, push, pop, no_op = _load_token(x, at_x, vector, logits, at_logits, here, NUM_ACTIONS)
            push, pop, no_op = softmax(push, pop, no_op)
            slots, mask = update(slots, mask, pushed, push, pop, no_op, j, kept, DISCIPLINE, TINY)
        tl.debug_barrier()  # a thread may load what another has stored
        for later in range(length):
            i = length - 1 - later
            token = (row * num_tokens + start + i) * HEADS
            at_x, at_logits = token * HEAD_DIM + at_vector, (token + head) * NUM_ACTIONS
            grad = tl.load(grad_read + at_x, vector, other=0)
            pushed, push, pop, no_op = _load_token(x, at_x, vector, logits, at_logits, here, NUM_ACTIONS)
            saved = i * stride + stacks  # the state before the token
            old_slots = tl.load(segment_slots + saved * HEAD_DIM + at_slots, vector & (j < kept), other=0)
            old_mask = tl.load(segment_mask + saved + at_mask, here & (j < kept), other=0)
            if FEEDBACK:
                grad += tl.load(grad_last + row * numbers + at_vector, vector, other=0)
            if READ == "top":
                grad_slots += tl.where(j == 0, grad, 0)
            else:
                to_slots, to_mask, to_w = read_backward(
                    grad, slots, mask, w, j, kept, num_empty, READ_MASK, EMPTY, TINY
                )
                grad_slots += to_slots
                grad_mask += to_mask
                grad_w += to_w
            slots, mask = old_slots, old_mask
            push, pop, no_op = softmax(push, pop, no_op)
            grad_slots, grad_mask, to_x, to_push, to_pop, to_no_op = update_backward(
                grad_slots, grad_mask, slots, mask, pushed, push, pop, no_op, j, kept, DISCIPLINE, TINY
            )
            mean = push * to_push + pop * to_pop + no_op * to_no_op
            to_push, to_pop, to_no_op = push * (to_push - mean), pop * (to_pop - mean), no_op * (to_no_op - mean)
            if FEEDBACK:
                to_push += tl.load(grad_fed_logits + at_logits, here, other=0)
                to_no_op += tl.load(grad_fed_logits + at_logits + NUM_ACTIONS - 1, here, other=0)
                if NUM_ACTIONS == 3:
                    to_pop += tl.load(grad_fed_logits + at_logits + 1, here, other=0)
            tl.store(grad_x + at_x, to_x, vector)
            tl.store(grad_logits + at_logits, to_push, here)
            tl.store(grad_logits + at_logits + NUM_ACTIONS - 1, to_no_op, here)
            if NUM_ACTIONS == 3:
                tl.store(grad_logits + at_logits + 1, to_pop, here)
            if FEEDBACK:
                tl.debug_barrier()
                feed_back_backward(
                    fed + (row * num_tokens + start + i) * inner,
                    grad_x + token * HEAD_DIM,
                    grad_logits + token * NUM_ACTIONS,
                    feedback_x,
                    feedback_logits,
                    of_read,
                    grad_given + (row * num_tokens + start + i) * inner if HIDDEN else grad_given,
                    grad_last + row * numbers,
                    HEADS,
                    HEAD_DIM,
                    NUM_ACTIONS,
                    ACTIVATION,
                    BLOCK,
                    NUMBERS,
                    LOGITS,
                    UNITS,
                    HIDDEN,
                )
                tl.debug_barrier()
        tl.debug_barrier()  # the next segment stores where this one has loaded

    tl.store(grad_initial_slots + stacks * HEAD_DIM + at_slots, grad_slots, vector & (j < kept))
    tl.store(grad_initial_mask + stacks + at_mask, grad_mask, here & (j < kept))
    if READ == "global":
        tl.store(grad_query + row * numbers + at_vector, grad_w, vector)
