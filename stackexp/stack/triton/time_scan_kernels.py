"""The Triton kernels of the scan over tokens: forward and backward.

One program holds the stacks of one head of one row of the batch or, with feedback, of all heads of the row. They are
tiles (see `time_scan_math`) from the first token to the last.

A scan is slow because each state depends on the previous one, not because of arithmetic: a token takes 5 S D
multiply-adds. The slot shift in this chain is a `tl.gather`. Without feedback and with S <= 32, a program is one warp:
tiles stay in registers, and a gather compiles to shuffles without a barrier. Shifts through global memory would be
slower. So would a product with a shift matrix, because float32 must not become TF32.

With feedback, every element of x_t and of the logits depends on all of R_{t-1}. These values go through global memory,
because writer and reader use different layouts, and this needs barriers. Sums have a fixed order, so results are
deterministic.

Both kernels receive `kept`, the slots N of S that the tokens can fill, and `num_empty`, the other S - N. `time_scan`
describes the tensors and settings.
"""

import triton
import triton.language as tl

from stackexp.stack.triton.feedback_kernels import add_feedback, feedback_backward
from stackexp.stack.triton.time_scan_math import compute_read_weights, read_backward, softmax, update, update_backward

# one pair of kernels serves each power of two of slots: Triton does not compile again for these values
DYNAMIC = ["num_tokens", "kept", "num_empty", "interval"]


@triton.jit(do_not_specialize=DYNAMIC)
def forward(
    tensors,  # ScanForward
    num_tokens,
    kept,
    num_empty,
    interval,  # tokens between two saved states
    settings: tl.constexpr,
):
    """Compute `reference.scan`."""
    offsets, index = _locate(kept, num_empty, settings)
    row, num_stacks, head, here, at_vector, vector, _, _ = offsets
    width: tl.constexpr = settings.heads * settings.head_dim
    stacks, first = row * settings.heads * kept, row * num_tokens
    read = tensors.read + first * width
    if settings.activation is not None:  # a row starts with R_{-1}
        read = tensors.read + (first + row + 1) * width

    state = _load_state(tensors.slots, tensors.mask, stacks, offsets, index, settings)
    w = _load_query(tensors.query, state[0], offsets, settings)
    if settings.activation is None:
        following = _load_token(tensors.x, tensors.logits, first, offsets, settings)
    for t in range(num_tokens):
        if t % interval == 0:
            saved = t // interval * num_stacks * kept + stacks
            _store_state(tensors.saved_slots, tensors.saved_mask, saved, state, offsets, index, settings)
        token = first + t
        if settings.activation is None:  # load one token ahead: a load takes longer than an update
            pushed, logits = following
            ahead = first + tl.minimum(t + 1, num_tokens - 1)
            following = _load_token(tensors.x, tensors.logits, ahead, offsets, settings)
        else:
            tl.debug_barrier()  # the previous read is written
            add_feedback(tensors, read + (t - 1) * width, token, settings)
            tl.debug_barrier()
            pushed, logits = _load_token(tensors.fed_x, tensors.fed_logits, token, offsets, settings)
        state = update(state, pushed, softmax(logits[0], logits[1], logits[2]), index, settings)
        slots, mask = state
        if settings.read == "top":
            out = tl.sum(tl.where(index[0] == 0, slots, 0), 1, keep_dims=True)
        else:
            out = tl.sum(compute_read_weights(state, w, index, settings)[0] * slots, 1, keep_dims=True)
        tl.store(read + t * width + at_vector, out, vector)
        tl.store(tensors.occupancy + token * settings.heads + head, tl.sum(mask, 1, keep_dims=True), here)
    _store_state(tensors.last_slots, tensors.last_mask, stacks, state, offsets, index, settings)


@triton.jit(do_not_specialize=DYNAMIC)
def backward(
    tensors,  # ScanBackward
    num_tokens,
    kept,
    num_empty,
    interval,
    settings: tl.constexpr,
):
    """Compute the gradients of `forward`, segment by segment from the last; recompute the states of each segment."""
    offsets, index = _locate(kept, num_empty, settings)
    row, num_stacks, _, _, at_vector, vector, _, _ = offsets
    stacks, stride = row * settings.heads * kept, num_stacks * kept
    grads = _load_state(tensors.grad_last_slots, tensors.grad_last_mask, stacks, offsets, index, settings)
    w = _load_query(tensors.query, grads[0], offsets, settings)
    grad_w = tl.zeros_like(w)
    num_segments = tl.cdiv(num_tokens, interval)
    for later_segments in range(num_segments):
        segment = num_segments - 1 - later_segments
        start = segment * interval
        length = tl.minimum(interval, num_tokens - start)
        first = row * num_tokens + start
        state = _load_state(
            tensors.saved_slots, tensors.saved_mask, segment * stride + stacks, offsets, index, settings
        )
        for i in range(length):
            saved = i * stride + stacks
            _store_state(tensors.segment_slots, tensors.segment_mask, saved, state, offsets, index, settings)
            pushed, logits = _load_token(tensors.x, tensors.logits, first + i, offsets, settings)
            state = update(state, pushed, softmax(logits[0], logits[1], logits[2]), index, settings)
        tl.debug_barrier()  # a thread may load what another has stored
        for later in range(length):
            i = length - 1 - later
            saved = i * stride + stacks  # the state before the token
            before = _load_state(tensors.segment_slots, tensors.segment_mask, saved, offsets, index, settings)
            token = first + i
            grads, grad_w = _token_backward(tensors, token, state, before, grads, w, grad_w, offsets, index, settings)
            state = before
        tl.debug_barrier()  # the next segment stores where this one has loaded
    _store_state(tensors.to_slots, tensors.to_mask, stacks, grads, offsets, index, settings)
    if settings.read == "global":
        tl.store(tensors.to_query + row * settings.heads * settings.head_dim + at_vector, grad_w, vector)


@triton.jit
def _token_backward(tensors, token, state, before, grads, w, grad_w, offsets, index, settings: tl.constexpr):
    """Store the gradients of one token; return those of the state before it and the sum of those of w_g."""
    row, _, head, here, at_vector, vector, _, _ = offsets
    width: tl.constexpr = settings.heads * settings.head_dim
    grad = tl.load(tensors.grad_read + token * width + at_vector, vector, other=0)
    pushed, logits = _load_token(tensors.x, tensors.logits, token, offsets, settings)
    if settings.activation is not None:
        grad += tl.load(tensors.to_read + row * width + at_vector, vector, other=0)
    grad_slots, grad_mask = grads
    if settings.read == "top":
        grad_slots += tl.where(index[0] == 0, grad, 0)
    else:
        to_slots, to_mask, to_w = read_backward(grad, state, w, index, settings)
        grad_slots += to_slots
        grad_mask += to_mask
        grad_w += to_w
    push, pop, no_op = softmax(logits[0], logits[1], logits[2])
    grads, to_x, to_action = update_backward(
        (grad_slots, grad_mask), before, pushed, (push, pop, no_op), index, settings
    )
    to_push, to_pop, to_no_op = to_action
    mean = push * to_push + pop * to_pop + no_op * to_no_op
    to_push, to_pop, to_no_op = push * (to_push - mean), pop * (to_pop - mean), no_op * (to_no_op - mean)
    at_logits = (token * settings.heads + head) * settings.num_actions
    if settings.activation is not None:
        to_push += tl.load(tensors.grad_fed_logits + at_logits, here, other=0)
        to_no_op += tl.load(tensors.grad_fed_logits + at_logits + settings.num_actions - 1, here, other=0)
        if settings.num_actions == 3:
            to_pop += tl.load(tensors.grad_fed_logits + at_logits + 1, here, other=0)
    tl.store(tensors.to_x + token * width + at_vector, to_x, vector)
    tl.store(tensors.to_logits + at_logits, to_push, here)
    tl.store(tensors.to_logits + at_logits + settings.num_actions - 1, to_no_op, here)
    if settings.num_actions == 3:
        tl.store(tensors.to_logits + at_logits + 1, to_pop, here)
    if settings.activation is not None:
        tl.debug_barrier()
        feedback_backward(tensors, row, token, settings)
        tl.debug_barrier()
    return grads, grad_w


@triton.jit
def _locate(kept, num_empty, settings: tl.constexpr):
    """Return the offsets of this program in the tensors, and its slot index.

    The offsets: row; number of stacks; heads [H, 1, 1] and their mask; elements [H, 1, D] and their mask; M [H, S, 1];
    St [H, S, D]. The index: slots j [1, S, 1], N, S - N.
    """
    programs_per_row: tl.constexpr = settings.heads if settings.activation is None else 1
    row = (tl.program_id(0) // programs_per_row).to(tl.int64)
    num_stacks = (tl.num_programs(0) // programs_per_row).to(tl.int64) * settings.heads
    head = tl.program_id(0) % programs_per_row + tl.arange(0, settings.padded_heads)[:, None, None]
    j = tl.arange(0, settings.padded_slots)[None, :, None]
    d = tl.arange(0, settings.padded_dim)[None, None, :]
    here = head < settings.heads
    vector = here & (d < settings.head_dim)
    at_vector, at_mask = head * settings.head_dim + d, head * kept + j
    offsets = (row, num_stacks, head, here, at_vector, vector, at_mask, at_mask * settings.head_dim + d)
    return offsets, (j, kept, num_empty)


@triton.jit
def _load_state(slots, mask, stacks, offsets, index, settings: tl.constexpr):
    """Load St [H, S, D] and M [H, S, 1] of the stacks from number `stacks` on; 0 beyond the N slots."""
    _, _, _, here, _, vector, at_mask, at_slots = offsets
    present = index[0] < index[1]
    state_slots = tl.load(slots + stacks * settings.head_dim + at_slots, vector & present, other=0)
    return state_slots, tl.load(mask + stacks + at_mask, here & present, other=0)


@triton.jit
def _store_state(slots, mask, stacks, state, offsets, index, settings: tl.constexpr):
    """Store St and M where `_load_state` loads them."""
    _, _, _, here, _, vector, at_mask, at_slots = offsets
    present = index[0] < index[1]
    tl.store(slots + stacks * settings.head_dim + at_slots, state[0], vector & present)
    tl.store(mask + stacks + at_mask, state[1], here & present)


@triton.jit
def _load_query(query, slots, offsets, settings: tl.constexpr):
    """Load w_g [H, 1, D] in the dtype of the slots; 0 for `read: top`."""
    w = tl.full([settings.padded_heads, 1, settings.padded_dim], 0, slots.dtype)
    if settings.read == "global":
        w = tl.load(query + offsets[4], offsets[5], other=0)
    return w


@triton.jit
def _load_token(x, logits, token, offsets, settings: tl.constexpr):
    """Load x [H, 1, D] and the logits of push, pop, no-op [H, 1, 1]; with two actions, the logit of pop is -inf."""
    head, here, at_vector, vector = offsets[2], offsets[3], offsets[4], offsets[5]
    pushed = tl.load(x + token * (settings.heads * settings.head_dim) + at_vector, vector, other=0)
    at = (token * settings.heads + head) * settings.num_actions
    push = tl.load(logits + at, here, other=0)
    no_op = tl.load(logits + at + settings.num_actions - 1, here, other=0)
    pop = tl.full(push.shape, float("-inf"), push.dtype)
    if settings.num_actions == 3:
        pop = tl.load(logits + at + 1, here, other=0)
    return pushed, (push, pop, no_op)
