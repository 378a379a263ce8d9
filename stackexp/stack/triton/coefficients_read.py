"""The kernels that read a stack in coefficient form: forward and backward. See `coefficients`.

A program passes over the history of a token and head in tiles [CHUNK, D], and computes the read weights from a tile of
coefficients [SLOTS, COLUMNS]. Vectors such as u_l go from one to the other through memory, because threads cannot
select an element of a tile. All sizes of tiles are powers of two.
"""

import triton
import triton.language as tl

from stackexp.stack.triton.depth_step_pipeline import load_or_default
from stackexp.stack.triton.time_scan_math import divide

# one kernel serves all layers with equal tiles: Triton does not compile again for these values
DYNAMIC = ["num_tokens", "update", "newest", "num_new", "num_slots"]


@triton.jit(do_not_specialize=DYNAMIC)
def read_forward(tensors, num_tokens, update, num_new, num_slots, settings: tl.constexpr):
    """Compute R and store x in row `update` of the history. `tensors`: a `ReadForward`. A program has one stack."""
    i_stack, o_dim = tl.program_id(0).to(tl.int64), tl.arange(0, settings.padded_dim)
    i_slot, i_column = tl.arange(0, settings.slots), tl.arange(0, settings.new_columns)
    m_dim, plane = o_dim < settings.head_dim, num_tokens.to(tl.int64) * settings.heads * settings.head_dim
    o_vector, o_column = i_stack * settings.head_dim + o_dim, i_stack * settings.new_columns + i_column
    b_x = tl.load(tensors.x + o_vector, m_dim, other=0)
    tl.store(tensors.history + update * plane + o_vector, b_x, m_dim)
    tl.debug_barrier()
    i_chunk = tl.arange(0, settings.chunk)
    b_new, b_mask = _load_state(tensors, i_stack, i_slot, i_column, update, num_new, settings)
    if settings.read == "global":
        o_query = (i_stack % settings.heads) * settings.head_dim + o_dim
        b_query = tl.load(tensors.query + o_query, m_dim, other=0).to(settings.dtype)
        for first in tl.range(0, update + 1, settings.chunk):
            b_rows = _load_rows(tensors.history + o_vector, first, update, plane, m_dim, settings)
            p_u = tensors.u + i_stack * settings.new_columns + first + i_chunk
            tl.store(p_u, tl.sum(b_rows * b_query[None, :], 1))
        tl.debug_barrier()
        b_u = tl.load(tensors.u + o_column, i_column <= update, other=0)
        b_content = tl.sum(b_new * b_u[None, :], 1)
        b_weight = _compute_weights(b_content, b_mask, i_slot, num_new, num_slots, settings)
    else:
        b_weight = (i_slot == 0).to(settings.dtype)
    tl.store(tensors.combined + o_column, tl.sum(b_weight[:, None] * b_new, 0))
    tl.debug_barrier()
    b_read = tl.full([settings.padded_dim], 0, settings.dtype)
    for first in tl.range(0, update + 1, settings.chunk):
        b_rows = _load_rows(tensors.history + o_vector, first, update, plane, m_dim, settings)
        b_combined = tl.load(tensors.combined + i_stack * settings.new_columns + first + i_chunk)
        b_read += tl.sum(b_combined[:, None] * b_rows, 0)
    tl.store(tensors.read + o_vector, b_read, m_dim)


@triton.jit(do_not_specialize=DYNAMIC)
def read_backward(tensors, num_tokens, update, newest, num_new, num_slots, settings: tl.constexpr):
    """Compute the gradients of x and w_g, and replace x in the history by the gradient of R.

    `tensors`: a `ReadBackward`. `newest` is the newest update with a gradient. Up to `update`, the history has
    pushed vectors, then gradients of R. A program has one head of a few tokens, to sum the gradient of w_g.
    """
    i_head, o_dim, i_chunk = tl.program_id(1), tl.arange(0, settings.padded_dim), tl.arange(0, settings.chunk)
    i_column, m_dim = tl.arange(0, settings.new_columns), o_dim < settings.head_dim
    num_stacks = num_tokens.to(tl.int64) * settings.heads
    plane, o_query = num_stacks * settings.head_dim, i_head * settings.head_dim + o_dim
    b_to_query = tl.full([settings.padded_dim], 0, settings.dtype)
    b_query = load_or_default(b_to_query, tensors.query, o_query, m_dim)
    if settings.read == "global":
        tl.store(tensors.queries + update * settings.heads * settings.head_dim + o_query, b_query, m_dim)
    start = tl.program_id(0) * settings.tokens
    for i_token in tl.range(start, tl.minimum(start + settings.tokens, num_tokens)):
        i_stack = tl.cast(i_token, tl.int64) * settings.heads + i_head
        o_vector = i_stack * settings.head_dim + o_dim
        o_chunk = i_stack * settings.new_columns + i_chunk
        p_vector = tensors.history + o_vector
        b_to_read = load_or_default(tl.zeros_like(b_query), tensors.to_read, o_vector, m_dim)
        for first in tl.range(0, update + 1, settings.chunk):
            b_rows = _load_rows(p_vector, first, update, plane, m_dim, settings)
            tl.store(tensors.dots + o_chunk + first, tl.sum(b_rows * b_to_read[None, :], 1))
        tl.debug_barrier()

        b_combined, b_to_u = _differentiate_weights(tensors, i_stack, update, num_new, num_slots, settings)
        o_pair = i_head * num_tokens + i_token
        o_earlier = (i_column.to(tl.int64) * (newest + 1) + update) * 2 * num_stacks + o_pair
        tl.store(tensors.pairs + o_earlier, b_combined, i_column < update)
        tl.store(tensors.pairs + o_earlier + num_stacks, b_to_u, i_column < update)
        tl.debug_barrier()

        m_own = i_column == update
        b_to_x = tl.sum(tl.where(m_own, b_combined, 0), 0) * b_to_read
        if settings.read == "global":
            b_to_x += tl.sum(tl.where(m_own, b_to_u, 0), 0) * b_query
            for first in tl.range(0, update + 1, settings.chunk):
                b_rows = _load_rows(p_vector, first, update, plane, m_dim, settings)
                b_to_query += tl.sum(tl.load(tensors.to_u + o_chunk + first)[:, None] * b_rows, 0)
        for first in tl.range(update + 1, newest + 1, settings.chunk):
            m_later = first + i_chunk <= newest
            o_later = (update * (newest + 1) + first + i_chunk).to(tl.int64) * 2 * num_stacks + o_pair
            b_later = tl.load(tensors.pairs + o_later, m_later, other=0).to(settings.dtype)
            b_to_x += tl.sum(b_later[:, None] * _load_rows(p_vector, first, newest, plane, m_dim, settings), 0)
            if settings.read == "global":
                b_later = tl.load(tensors.pairs + o_later + num_stacks, m_later, other=0).to(settings.dtype)
                p_queries, stride = tensors.queries + o_query, settings.heads * settings.head_dim
                b_queries = _load_rows(p_queries, first, newest, stride, m_dim, settings)
                b_to_x += tl.sum(b_later[:, None] * b_queries, 0)
        tl.debug_barrier()  # all threads have read row `update`
        tl.store(tensors.to_x + o_vector, b_to_x, m_dim)
        tl.store(tensors.history + update * plane + o_vector, b_to_read, m_dim)
    if settings.read == "global":
        o_partial = tl.program_id(0) * settings.heads * settings.head_dim + o_query
        tl.store(tensors.to_query + o_partial, b_to_query, m_dim)


@triton.jit
def _differentiate_weights(tensors, i_stack, update, num_new, num_slots, settings: tl.constexpr):
    """Store the gradients of M and of w_g . St, and what `update_backward` needs; return p and the gradient of u."""
    i_slot, i_column = tl.arange(0, settings.slots), tl.arange(0, settings.new_columns)
    o_slot, o_column = i_stack * num_new + i_slot, i_stack * settings.new_columns + i_column
    m_slot = i_slot < num_new
    b_new, b_mask = _load_state(tensors, i_stack, i_slot, i_column, update, num_new, settings)
    b_to_mask = load_or_default(tl.zeros_like(b_mask), tensors.grad_mask, o_slot, m_slot)
    b_to_u = tl.full([settings.new_columns], 0, settings.dtype)
    if settings.read == "global":
        b_dots = tl.load(tensors.dots + o_column, i_column <= update, other=0)
        b_u = tl.load(tensors.u + o_column, i_column <= update, other=0)
        b_content = tl.sum(b_new * b_u[None, :], 1)
        b_weight = _compute_weights(b_content, b_mask, i_slot, num_new, num_slots, settings)
        b_to_weight = tl.sum(b_new * b_dots[None, :], 1)
        b_to_score = b_weight * (b_to_weight - tl.sum(b_weight * b_to_weight, 0))
        b_to_content = b_to_score
        if settings.read_mask == "multiply":
            b_to_content = b_to_score * b_mask
            b_to_mask += b_to_score * b_content
        elif settings.read_mask == "log":
            b_quotient = divide(b_to_score, tl.maximum(b_mask, settings.tiny))
            b_to_mask += tl.where(b_mask >= settings.tiny, b_quotient, 0)
        else:
            b_to_mask -= b_to_score * settings.empty_score
        b_to_u = tl.sum(b_to_content[:, None] * b_new, 0)
        tl.store(tensors.to_content + o_slot, b_to_content, m_slot)
        tl.store(tensors.to_u + o_column, b_to_u)
    else:
        b_weight = (i_slot == 0).to(settings.dtype)
    b_combined = tl.sum(b_weight[:, None] * b_new, 0)
    tl.store(tensors.weight + o_slot, b_weight, m_slot)
    tl.store(tensors.to_mask + o_slot, b_to_mask, m_slot)
    return b_combined, b_to_u


@triton.jit
def _load_rows(p_vector, first, last, stride, m_dim, settings: tl.constexpr):
    """Return CHUNK rows [CHUNK, D] from row `first` on, and 0 after row `last`. `p_vector` points to row 0."""
    i_row = first + tl.arange(0, settings.chunk)
    p_rows = p_vector[None, :] + (i_row * stride)[:, None]
    return tl.load(p_rows, (i_row <= last)[:, None] & m_dim[None, :], other=0).to(settings.dtype)


@triton.jit
def is_used(i_slot, i_column, updates):
    """Return True where C is stored after some updates. Slot j is a combination of the first `updates` - j vectors.

    Blocks of 8 columns are stored or not, so that a thread loads them at once.
    """
    return i_column // 8 * 8 + i_slot < updates


@triton.jit
def _load_state(tensors, i_stack, i_slot, i_column, update, num_new, settings: tl.constexpr):
    """Return C [SLOTS, COLUMNS] and M [SLOTS] after the update."""
    o_slot, m_slot = i_stack * num_new + i_slot, i_slot < num_new
    o_column = o_slot[:, None] * settings.new_columns + i_column[None, :]
    m_used = m_slot[:, None] & is_used(i_slot[:, None], i_column[None, :], update + 1)
    b_new = tl.load(tensors.coefficients + o_column, m_used, other=0)
    return b_new.to(settings.dtype), tl.load(tensors.mask + o_slot, m_slot, other=0)


@triton.jit
def _compute_weights(b_content, b_mask, i_slot, num_new, num_slots, settings: tl.constexpr):
    """Return the read weights [SLOTS] for w_g . St = `b_content`; the empty slots have the rest to 1."""
    if settings.read_mask == "multiply":
        b_score = b_content * b_mask
    elif settings.read_mask == "log":
        b_score = b_content + tl.log(tl.maximum(b_mask, settings.tiny))
    else:
        b_score = tl.fma(1 - b_mask, settings.empty_score, b_content)
    b_score = tl.where(i_slot < num_new, b_score, float("-inf"))
    b_empty = tl.where(i_slot < num_slots - num_new, settings.empty_score, float("-inf")).to(settings.dtype)
    b_highest = tl.maximum(tl.max(b_score, 0), tl.max(b_empty, 0))
    b_weight = tl.exp(b_score - b_highest)
    num_empty = (num_slots - num_new).to(settings.dtype)
    return b_weight / (tl.sum(b_weight, 0) + num_empty * tl.max(tl.exp(b_empty - b_highest), 0))
