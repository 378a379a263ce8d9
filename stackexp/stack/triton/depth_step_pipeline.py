"""The depth axis slot by slot, for the kernels in `depth_step_forward` and `depth_step_backward`.

A program handles a few tokens and heads: the rows of its tiles [ROWS, D], ROWS = tokens * group. It visits the slots
once, from the top. It never holds a whole stack, only a few neighboring slots, so only D and the heads are padded, and
the number of slots is an ordinary argument.

The layers since the last stored stack are the stages of a pipeline; the current layer is the last stage. Stage i
computes the slots V_{i+1} from V_i,

    V_{i+1}[j] = a_push V_i[j-1] + a_pop V_i[j+1] + a_noop V_i[j]        V_i[-1] = x_i

so it can emit slot j once it has received slot j+1. It keeps the last two received slots, its window. The first stage
receives V_0 from memory. The last stage emits the slots St' of this layer, the top first. M passes through the same
stages, with M[-1] = 1.

Sums of products are explicit `tl.fma` calls, and the kernels are compiled without automatic contraction. Forward and
backward pass must round alike, but which operations a compiler contracts depends on the surrounding code.

Prefixes of names: `p_` a pointer, `b_` a block (tile) of values, `o_` offsets, `m_` a mask of offsets that exist, `i_`
an index; tuples have that of their items. `i_slot` is j, `i_stage` is i, and `i_source` is a slot of V_0. The fields of
`tensors` are pointers; `depth_step` describes them. `p_xs` and `p_logits` are tuples of pointers, one for each layer
since V_0: [tokens, H, D] and [tokens, H, 3 or 2]. Sizes: `num_occupied` slots of V_0, `num_old` of St, `num_new` of
St', `num_slots` S. Probabilities, M and scores are rows [ROWS].
"""

# Tuples grow in unrolled loops, which changes their type:
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from stackexp.stack.triton.time_scan_math import divide, softmax

# one kernel serves all layers with as many stages: Triton does not compile again for these values
DYNAMIC = ["num_tokens", "num_occupied", "num_old", "num_new", "num_slots"]


@triton.jit
def locate(i_block, num_tokens, settings: tl.constexpr):
    """Return the offsets of a block of tokens, with masks of those that exist.

    In this order: rows [ROWS] of a tensor [tokens, H], and their mask; elements [ROWS, D] of a tensor [tokens, H, D],
    and their mask; the size of a plane (one slot of all stacks); elements of a tensor [H, D].
    """
    o_row = tl.arange(0, settings.tokens * settings.group)
    o_token = tl.full(o_row.shape, i_block, tl.int64) * settings.tokens + o_row // settings.group
    o_head = tl.program_id(1) * settings.group + o_row % settings.group
    o_dim = tl.arange(0, settings.padded_dim)[None, :]
    o_stack, m_stack = o_token * settings.heads + o_head, (o_token < num_tokens) & (o_head < settings.heads)
    plane = num_tokens.to(tl.int64) * settings.heads
    m_vector = m_stack[:, None] & (o_dim < settings.head_dim)
    return (
        o_stack,
        m_stack,
        o_stack[:, None] * settings.head_dim + o_dim,
        m_vector,
        plane,
        o_head[:, None] * settings.head_dim + o_dim,
    )


@triton.jit
def mask_below(m_present, i_slot, end):
    """Return `m_present` if j < end, else False."""
    return m_present & (tl.full(m_present.shape, i_slot, tl.int32) < end)


@triton.jit
def load_or_zero(p_values, o_values, m_values, settings: tl.constexpr):
    """Load values in their stored dtype, 0 where masked; return zeros if the pointer is None."""
    if p_values is None:
        return tl.full(o_values.shape, 0, settings.dtype)
    else:
        return tl.load(p_values + o_values, m_values, other=0)


@triton.jit
def load_or_default(b_default, p_values, o_values, m_values):
    """Load values in the dtype of `b_default`, 0 where masked; return `b_default` if the pointer is None."""
    if p_values is None:
        return b_default
    else:
        return tl.load(p_values + o_values, m_values, other=0).to(b_default.dtype)


@triton.jit
def load_slot(p_source, i_slot, filled, offsets, settings: tl.constexpr):
    """Load slot j of St [ROWS, D] and M, or of gradients; 0 from `filled` on, a number of slots for each.

    The values keep their stored dtype, so that slots which are loaded ahead take few registers. A pointer may be None.
    """
    o_stack, m_stack, o_vector, m_vector, plane, _ = offsets
    o_slot = i_slot * plane * settings.head_dim + o_vector
    b_slot = load_or_zero(p_source[0], o_slot, mask_below(m_vector, i_slot, filled[0]), settings)
    o_mask = i_slot * plane + o_stack
    return b_slot, load_or_zero(p_source[1], o_mask, mask_below(m_stack, i_slot, filled[1]), settings)


@triton.jit
def load_slots(p_source, COUNT: tl.constexpr, filled, offsets, settings: tl.constexpr):
    """Load the first COUNT slots. None waits for another, so their latencies overlap."""
    b_slots = ()
    for i_slot in tl.static_range(COUNT):
        b_slots += (load_slot(p_source, i_slot, filled, offsets, settings),)
    return b_slots


@triton.jit
def load_logits(p_logits, offsets, settings: tl.constexpr):
    """Load the logits of push, pop and no-op; -inf for pop where there are two actions."""
    o_logits, m_stack = offsets[0] * settings.num_actions, offsets[1]
    b_push = tl.load(p_logits + o_logits, m_stack, other=0).to(settings.dtype)
    b_no_op = tl.load(p_logits + o_logits + settings.num_actions - 1, m_stack, other=0).to(settings.dtype)
    b_pop = tl.full(b_push.shape, float("-inf"), settings.dtype)
    if settings.num_actions == 3:
        b_pop = tl.load(p_logits + o_logits + 1, m_stack, other=0).to(settings.dtype)
    return b_push, b_pop, b_no_op


@triton.jit
def compute_log_actions(b_push, b_pop, b_no_op, settings: tl.constexpr):
    """Return log a for these logits, and the entropy. With two actions, log a_pop is 0."""
    b_highest = tl.maximum(tl.maximum(b_push, b_pop), b_no_op)
    b_log_total = tl.log(tl.exp(b_push - b_highest) + tl.exp(b_pop - b_highest) + tl.exp(b_no_op - b_highest))
    b_push, b_no_op = b_push - b_highest - b_log_total, b_no_op - b_highest - b_log_total
    b_pop = b_pop - b_highest - b_log_total if settings.num_actions == 3 else tl.zeros_like(b_push)
    b_entropy = -(tl.exp(b_push) * b_push + tl.exp(b_no_op) * b_no_op)
    if settings.num_actions == 3:
        b_entropy -= tl.exp(b_pop) * b_pop
    return b_push, b_pop, b_no_op, b_entropy


@triton.jit
def start_pipeline(p_xs, p_logits, offsets, settings: tl.constexpr):
    """Return the stages before they receive a slot, and their actions.

    A stage is its window: V_i[j-1], V_i[j], M_i[j-1], M_i[j], at first with j = -1.
    """
    b_stages, b_logits, b_actions = (), (), ()
    for i_stage in tl.static_range(len(p_xs)):  # all loads before the first softmax
        b_x = tl.load(p_xs[i_stage] + offsets[2], offsets[3], other=0).to(settings.dtype)
        b_one = tl.full(offsets[0].shape, 1, settings.dtype)
        b_stages += ((b_x, b_x, b_one, b_one),)
        b_logits += (load_logits(p_logits[i_stage], offsets, settings),)
    for i_stage in tl.static_range(len(p_xs)):
        b_push, b_pop, b_no_op = b_logits[i_stage]
        b_actions += (softmax(b_push, b_pop, b_no_op),)
    return b_stages, b_actions


@triton.jit
def compute_mask_ratio(b_here, b_following, settings: tl.constexpr):
    """Return `reference.mask_ratio` of M[j] and M[j+1]; then M[j], or 1 where it is 0; then whether it is not 0."""
    b_occupied = b_here >= settings.tiny
    b_divisor = tl.where(b_occupied, b_here, 1)
    return tl.where(b_occupied, divide(b_following, b_divisor), 0), b_divisor, b_occupied


@triton.jit
def _update(b_stage, b_slot, b_mask, b_action, i_slot, num_slots, settings: tl.constexpr):
    """Return V_{i+1}[j] and M_{i+1}[j], given the window and V_i[j+1], M_i[j+1]."""
    b_before, b_here, b_before_mask, b_here_mask = b_stage
    b_push, b_pop, b_no_op = b_action
    b_push = tl.where(i_slot < num_slots, b_push, 0)  # slot S must stay empty
    b_keep = b_no_op
    if settings.discipline == "queue":
        b_keep = tl.fma(b_pop, compute_mask_ratio(b_here_mask, b_mask, settings)[0], b_no_op)
    b_new = tl.fma(b_keep[:, None], b_here, b_push[:, None] * b_before)
    b_new_mask = tl.fma(b_no_op, b_here_mask, b_push * b_before_mask)
    if settings.discipline == "stack":
        b_new = tl.fma(b_pop[:, None], b_slot, b_new)
    if settings.discipline != "push_only":
        b_new_mask = tl.fma(b_pop, b_mask, b_new_mask)
    return b_new, b_new_mask


@triton.jit
def advance_pipeline(
    b_stages, b_actions, b_received, i_source, num_slots, EMITTING: tl.constexpr, settings: tl.constexpr
):
    """Pass a slot of V_0 to the first stage; return the stages afterwards, and the slot that the last one emits.

    Only the first EMITTING stages emit a slot. The next stage, if any, receives its slot 0; later ones receive nothing.
    """
    b_slot, b_mask = b_received[0].to(settings.dtype), b_received[1].to(settings.dtype)
    b_after = ()
    for i_stage in tl.static_range(len(b_stages)):
        b_stage = b_stages[i_stage]
        if i_stage > EMITTING:
            b_after += (b_stage,)
        else:
            b_after += ((b_stage[1], b_slot, b_stage[3], b_mask),)
            if i_stage < EMITTING:
                b_slot, b_mask = _update(
                    b_stage, b_slot, b_mask, b_actions[i_stage], i_source - i_stage - 1, num_slots, settings
                )
    return b_after, b_slot, b_mask


@triton.jit
def fill_pipeline(b_stages, b_actions, b_slots, num_slots, settings: tl.constexpr):
    """Advance until the last stage has received its slot 0, so that each further slot makes it emit one."""
    for i_source in tl.static_range(len(b_stages)):
        b_stages, _, _ = advance_pipeline(
            b_stages, b_actions, b_slots[i_source], i_source, num_slots, i_source, settings
        )
    return b_stages


@triton.jit
def compute_score(b_slot, b_mask, b_query, settings: tl.constexpr):
    """Return `reference.compute_scores` of a slot, and w_g . St'."""
    b_content = tl.sum(b_query * b_slot, 1)
    if settings.read_mask == "multiply":
        return b_content * b_mask, b_content
    elif settings.read_mask == "log":
        return b_content + tl.log(tl.maximum(b_mask, settings.tiny)), b_content
    else:  # the penalty is the score of an empty slot
        return tl.fma(1 - b_mask, settings.empty_score, b_content), b_content
