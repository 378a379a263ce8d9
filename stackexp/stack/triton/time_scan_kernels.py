"""The Triton kernels of the scan over tokens: forward and backward.

Prefixes of names: `p_` a pointer, `b_` a block (tile) of values, `o_` offsets, `m_` a mask of offsets that exist, `i_`
an index. The fields of `tensors` are pointers.

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

The feedback of a token adds P u_t to x_t and Q u_t to the logits, with u_t = f(R_{t-1}), or f(c_t + V R_{t-1}) with a
hidden layer; see `feedback`. The maps are multiplied `settings.block` rows at a time. With gates, u_t is a product of
two factors, for each of which c_t and V have m rows.
"""

import triton
import triton.language as tl

from stackexp.stack.triton.time_scan_math import compute_read_weights, read_backward, softmax, update, update_backward


@triton.jit
def _activate(b_inner, settings: tl.constexpr):
    if settings.activation != "identity":
        b_falling = tl.exp(-2 * tl.abs(b_inner))
        b_size = (1 - b_falling) / (1 + b_falling)
        b_inner = tl.where(b_inner < 0, -b_size, b_size)
    return b_inner


@triton.jit
def _load_map(p_weights, o_row, num_rows: tl.constexpr, num_columns: tl.constexpr, columns: tl.constexpr):
    """Load rows of P [m, H*D], Q [m, H*3] or V [m, H*D]."""
    o_column = tl.arange(0, columns)[None, :]
    m_map = (o_row < num_rows)[:, None] & (o_column < num_columns)
    return tl.load(p_weights + o_row[:, None] * num_columns + o_column, m_map, other=0)


@triton.jit
def add_feedback(tensors, p_read, i_token, settings: tl.constexpr):
    """Store x_t + P u_t and logits_t + Q u_t.

    `tensors` is a ScanForward, `p_read` points to R_{t-1} [H*D], `i_token` counts all tokens of [B, T].
    """
    width: tl.constexpr = settings.heads * settings.head_dim
    padded: tl.constexpr = settings.padded_width
    actions: tl.constexpr = settings.heads * settings.num_actions
    units: tl.constexpr = settings.units
    factors: tl.constexpr = 2 if settings.activation == "gated" else 1
    o_column, o_action = tl.arange(0, padded), tl.arange(0, settings.padded_logits)
    b_x = tl.load(tensors.x + i_token * width + o_column, o_column < width, other=0)
    b_logits = tl.load(tensors.logits + i_token * actions + o_action, o_action < actions, other=0)
    b_read = tl.load(p_read + o_column, o_column < width, other=0)[None, :]
    for start in range(0, units, settings.block):
        o_unit = start + tl.arange(0, settings.block)
        b_fed = tl.full(o_unit.shape, 1, b_x.dtype)
        for factor in tl.static_range(factors):
            if tensors.read_weight is not None:
                b_inner = tl.load(
                    tensors.token_bias + (i_token * factors + factor) * units + o_unit, o_unit < units, other=0
                )
                b_weights = _load_map(tensors.read_weight + factor * units * width, o_unit, units, width, padded)
                b_inner += tl.sum(b_read * b_weights, 1)
            else:
                b_inner = tl.load(p_read + o_unit, o_unit < units, other=0)
            b_fed *= _activate(b_inner, settings)
        b_fed = b_fed[:, None]
        b_x += tl.sum(b_fed * _load_map(tensors.feedback_x, o_unit, units, width, padded), 0)
        b_logits += tl.sum(
            b_fed * _load_map(tensors.feedback_logits, o_unit, units, actions, settings.padded_logits), 0
        )
    tl.store(tensors.x_with_feedback + i_token * width + o_column, b_x, o_column < width)
    tl.store(tensors.logits_with_feedback + i_token * actions + o_action, b_logits, o_action < actions)


@triton.jit
def feedback_backward(tensors, i_row, i_token, settings: tl.constexpr):
    """Store the gradients of R_{t-1} and, with a hidden layer, of c_t. tensors: ScanBackward."""
    width: tl.constexpr = settings.heads * settings.head_dim
    padded: tl.constexpr = settings.padded_width
    actions: tl.constexpr = settings.heads * settings.num_actions
    units: tl.constexpr = settings.units
    factors: tl.constexpr = 2 if settings.activation == "gated" else 1
    o_column, o_action = tl.arange(0, padded), tl.arange(0, settings.padded_logits)
    b_grad_x = tl.load(tensors.to_x + i_token * width + o_column, o_column < width, other=0)[None, :]
    b_grad_logits = tl.load(tensors.to_logits + i_token * actions + o_action, o_action < actions, other=0)[None, :]
    p_grad_read = tensors.to_read + i_row * width
    b_grad_read = tl.full([padded], 0, b_grad_x.dtype)
    for start in range(0, units, settings.block):
        o_unit = start + tl.arange(0, settings.block)
        b_grad_fed = tl.sum(b_grad_x * _load_map(tensors.feedback_x, o_unit, units, width, padded), 1)
        b_grad_fed += tl.sum(
            b_grad_logits * _load_map(tensors.feedback_logits, o_unit, units, actions, settings.padded_logits), 1
        )
        for factor in tl.static_range(factors):
            b_grad_inner = b_grad_fed
            if settings.activation != "identity":
                b_active = tl.load(tensors.fed + (i_token * factors + factor) * units + o_unit, o_unit < units, other=0)
                b_grad_inner *= 1 - b_active * b_active
            if factors == 2:
                b_grad_inner *= tl.load(
                    tensors.fed + (i_token * 2 + 1 - factor) * units + o_unit, o_unit < units, other=0
                )
            if tensors.read_weight is not None:
                tl.store(
                    tensors.grad_token_bias + (i_token * factors + factor) * units + o_unit,
                    b_grad_inner,
                    o_unit < units,
                )
                b_weights = _load_map(tensors.read_weight + factor * units * width, o_unit, units, width, padded)
                b_grad_read += tl.sum(b_grad_inner[:, None] * b_weights, 0)
            else:
                tl.store(p_grad_read + o_unit, b_grad_inner, o_unit < units)
    if tensors.read_weight is not None:
        tl.store(p_grad_read + o_column, b_grad_read, o_column < width)


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
    i_row, num_stacks, o_head, m_heads, o_vector, m_vector, _, _ = offsets
    width: tl.constexpr = settings.heads * settings.head_dim
    stacks, first = i_row * settings.heads * kept, i_row * num_tokens
    p_read = tensors.read + first * width
    if settings.activation is not None:  # a row starts with R_{-1}
        p_read = tensors.read + (first + i_row + 1) * width

    b_state = _load_state(tensors.slots, tensors.mask, stacks, offsets, index, settings)
    b_query = _load_query(tensors.query, b_state[0], offsets, settings)
    if settings.activation is None:
        b_next = _load_token(tensors.x, tensors.logits, first, offsets, settings)
    for i_t in range(num_tokens):
        if i_t % interval == 0:
            saved = i_t // interval * num_stacks * kept + stacks
            _store_state(tensors.saved_slots, tensors.saved_mask, saved, b_state, offsets, index, settings)
        i_token = first + i_t
        if settings.activation is None:  # load one token ahead: a load takes longer than an update
            b_x, b_logits = b_next
            i_next = first + tl.minimum(i_t + 1, num_tokens - 1)
            b_next = _load_token(tensors.x, tensors.logits, i_next, offsets, settings)
        else:
            tl.debug_barrier()  # the previous read is written
            add_feedback(tensors, p_read + (i_t - 1) * width, i_token, settings)
            tl.debug_barrier()
            b_x, b_logits = _load_token(
                tensors.x_with_feedback, tensors.logits_with_feedback, i_token, offsets, settings
            )
        b_state = update(b_state, b_x, softmax(b_logits[0], b_logits[1], b_logits[2]), index, settings)
        b_slots, b_mask = b_state
        if settings.read == "top":
            b_read = tl.sum(tl.where(index[0] == 0, b_slots, 0), 1, keep_dims=True)
        else:
            b_read = tl.sum(compute_read_weights(b_state, b_query, index, settings)[0] * b_slots, 1, keep_dims=True)
        tl.store(p_read + i_t * width + o_vector, b_read, m_vector)
        tl.store(tensors.occupancy + i_token * settings.heads + o_head, tl.sum(b_mask, 1, keep_dims=True), m_heads)
    _store_state(tensors.last_slots, tensors.last_mask, stacks, b_state, offsets, index, settings)


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
    i_row, num_stacks, _, _, o_vector, m_vector, _, _ = offsets
    stacks, stride = i_row * settings.heads * kept, num_stacks * kept
    b_grads = _load_state(tensors.grad_last_slots, tensors.grad_last_mask, stacks, offsets, index, settings)
    b_query = _load_query(tensors.query, b_grads[0], offsets, settings)
    b_grad_query = tl.zeros_like(b_query)
    num_segments = tl.cdiv(num_tokens, interval)
    for later_segments in range(num_segments):
        i_segment = num_segments - 1 - later_segments
        start = i_segment * interval
        length = tl.minimum(interval, num_tokens - start)
        first = i_row * num_tokens + start
        b_state = _load_state(
            tensors.saved_slots, tensors.saved_mask, i_segment * stride + stacks, offsets, index, settings
        )
        for i_t in range(length):
            saved = i_t * stride + stacks
            _store_state(tensors.segment_slots, tensors.segment_mask, saved, b_state, offsets, index, settings)
            b_x, b_logits = _load_token(tensors.x, tensors.logits, first + i_t, offsets, settings)
            b_state = update(b_state, b_x, softmax(b_logits[0], b_logits[1], b_logits[2]), index, settings)
        tl.debug_barrier()  # a thread may load what another has stored
        for later in range(length):
            i_t = length - 1 - later
            saved = i_t * stride + stacks  # the state before the token
            b_before = _load_state(tensors.segment_slots, tensors.segment_mask, saved, offsets, index, settings)
            i_token = first + i_t
            b_grads, b_grad_query = _token_backward(
                tensors, i_token, b_state, b_before, b_grads, b_query, b_grad_query, offsets, index, settings
            )
            b_state = b_before
        tl.debug_barrier()  # the next segment stores where this one has loaded
    _store_state(tensors.to_slots, tensors.to_mask, stacks, b_grads, offsets, index, settings)
    if settings.read == "global":
        tl.store(tensors.to_query + i_row * settings.heads * settings.head_dim + o_vector, b_grad_query, m_vector)


@triton.jit
def _token_backward(
    tensors, i_token, b_state, b_before, b_grads, b_query, b_grad_query, offsets, index, settings: tl.constexpr
):
    """Store the gradients of one token; return those of the state before it and the sum of those of w_g."""
    i_row, _, o_head, m_heads, o_vector, m_vector, _, _ = offsets
    width: tl.constexpr = settings.heads * settings.head_dim
    b_grad_read = tl.load(tensors.grad_read + i_token * width + o_vector, m_vector, other=0)
    b_x, b_logits = _load_token(tensors.x, tensors.logits, i_token, offsets, settings)
    if settings.activation is not None:
        b_grad_read += tl.load(tensors.to_read + i_row * width + o_vector, m_vector, other=0)
    b_grad_slots, b_grad_mask = b_grads
    if settings.read == "top":
        b_grad_slots += tl.where(index[0] == 0, b_grad_read, 0)
    else:
        b_to_slots, b_to_mask, b_to_query = read_backward(b_grad_read, b_state, b_query, index, settings)
        b_grad_slots += b_to_slots
        b_grad_mask += b_to_mask
        b_grad_query += b_to_query
    b_push, b_pop, b_no_op = softmax(b_logits[0], b_logits[1], b_logits[2])
    b_grads, b_grad_x, b_grad_action = update_backward(
        (b_grad_slots, b_grad_mask), b_before, b_x, (b_push, b_pop, b_no_op), index, settings
    )
    b_grad_push, b_grad_pop, b_grad_no_op = b_grad_action
    b_mean = b_push * b_grad_push + b_pop * b_grad_pop + b_no_op * b_grad_no_op
    b_grad_push, b_grad_pop, b_grad_no_op = (
        b_push * (b_grad_push - b_mean),
        b_pop * (b_grad_pop - b_mean),
        b_no_op * (b_grad_no_op - b_mean),
    )
    o_logits = (i_token * settings.heads + o_head) * settings.num_actions
    if settings.activation is not None:
        b_grad_push += tl.load(tensors.grad_logits_with_feedback + o_logits, m_heads, other=0)
        b_grad_no_op += tl.load(
            tensors.grad_logits_with_feedback + o_logits + settings.num_actions - 1, m_heads, other=0
        )
        if settings.num_actions == 3:
            b_grad_pop += tl.load(tensors.grad_logits_with_feedback + o_logits + 1, m_heads, other=0)
    tl.store(tensors.to_x + i_token * width + o_vector, b_grad_x, m_vector)
    tl.store(tensors.to_logits + o_logits, b_grad_push, m_heads)
    tl.store(tensors.to_logits + o_logits + settings.num_actions - 1, b_grad_no_op, m_heads)
    if settings.num_actions == 3:
        tl.store(tensors.to_logits + o_logits + 1, b_grad_pop, m_heads)
    if settings.activation is not None:
        tl.debug_barrier()
        feedback_backward(tensors, i_row, i_token, settings)
        tl.debug_barrier()
    return b_grads, b_grad_query


@triton.jit
def _locate(kept, num_empty, settings: tl.constexpr):
    """Return the offsets of this program in the tensors, and its slot index.

    The offsets: row; number of stacks; heads [H, 1, 1] and their mask; elements [H, 1, D] and their mask; M [H, S, 1];
    St [H, S, D]. The index: slots j [1, S, 1], N, S - N.
    """
    programs_per_row: tl.constexpr = settings.heads if settings.activation is None else 1
    i_row = (tl.program_id(0) // programs_per_row).to(tl.int64)
    num_stacks = (tl.num_programs(0) // programs_per_row).to(tl.int64) * settings.heads
    o_head = tl.program_id(0) % programs_per_row + tl.arange(0, settings.padded_heads)[:, None, None]
    o_slot = tl.arange(0, settings.padded_slots)[None, :, None]
    o_dim = tl.arange(0, settings.padded_dim)[None, None, :]
    m_heads = o_head < settings.heads
    m_vector = m_heads & (o_dim < settings.head_dim)
    o_vector, o_mask = o_head * settings.head_dim + o_dim, o_head * kept + o_slot
    offsets = (i_row, num_stacks, o_head, m_heads, o_vector, m_vector, o_mask, o_mask * settings.head_dim + o_dim)
    return offsets, (o_slot, kept, num_empty)


@triton.jit
def _load_state(p_slots, p_mask, stacks, offsets, index, settings: tl.constexpr):
    """Load St [H, S, D] and M [H, S, 1] of the stacks from number `stacks` on; 0 beyond the N slots."""
    _, _, _, m_heads, _, m_vector, o_mask, o_slots = offsets
    m_slots = index[0] < index[1]
    b_slots = tl.load(p_slots + stacks * settings.head_dim + o_slots, m_vector & m_slots, other=0)
    return b_slots, tl.load(p_mask + stacks + o_mask, m_heads & m_slots, other=0)


@triton.jit
def _store_state(p_slots, p_mask, stacks, b_state, offsets, index, settings: tl.constexpr):
    """Store St and M where `_load_state` loads them."""
    _, _, _, m_heads, _, m_vector, o_mask, o_slots = offsets
    m_slots = index[0] < index[1]
    tl.store(p_slots + stacks * settings.head_dim + o_slots, b_state[0], m_vector & m_slots)
    tl.store(p_mask + stacks + o_mask, b_state[1], m_heads & m_slots)


@triton.jit
def _load_query(p_query, like, offsets, settings: tl.constexpr):
    """Load w_g [H, 1, D] in the dtype of the slots; 0 for `read: top`."""
    b_query = tl.full([settings.padded_heads, 1, settings.padded_dim], 0, like.dtype)
    if settings.read == "global":
        b_query = tl.load(p_query + offsets[4], offsets[5], other=0)
    return b_query


@triton.jit
def _load_token(p_x, p_logits, i_token, offsets, settings: tl.constexpr):
    """Load x [H, 1, D] and the logits of push, pop, no-op [H, 1, 1]; with two actions, the logit of pop is -inf."""
    o_head, m_heads, o_vector, m_vector = offsets[2], offsets[3], offsets[4], offsets[5]
    b_x = tl.load(p_x + i_token * (settings.heads * settings.head_dim) + o_vector, m_vector, other=0)
    o_logits = (i_token * settings.heads + o_head) * settings.num_actions
    b_push = tl.load(p_logits + o_logits, m_heads, other=0)
    b_no_op = tl.load(p_logits + o_logits + settings.num_actions - 1, m_heads, other=0)
    b_pop = tl.full(b_push.shape, float("-inf"), b_push.dtype)
    if settings.num_actions == 3:
        b_pop = tl.load(p_logits + o_logits + 1, m_heads, other=0)
    return b_x, (b_push, b_pop, b_no_op)
