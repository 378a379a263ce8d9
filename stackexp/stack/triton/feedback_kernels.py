"""The feedback of one token for `time_scan_kernels`: x_t + P u_t, logits_t + Q u_t, and the gradients.

u_t = f(R_{t-1}), or f(c_t + V R_{t-1}) if HIDDEN; see `feedback`. The maps are multiplied BLOCK rows at a time.
"""

import triton
import triton.language as tl


@triton.jit
def _activated(read, ACTIVATION: tl.constexpr):
    """Apply identity or tanh; for gated, to one of the factors."""
    if ACTIVATION != "identity":
        falling = tl.exp(-2 * tl.abs(read))
        size = (1 - falling) / (1 + falling)
        read = tl.where(read < 0, -size, size)
    return read


@triton.jit
def _load_map(weights, row, num_rows: tl.constexpr, num_columns: tl.constexpr, columns: tl.constexpr):
    """Load rows of P [m, H*D], Q [m, H*3] or V [m, H*D]."""
    column = tl.arange(0, columns)[None, :]
    present = (row < num_rows)[:, None] & (column < num_columns)
    return tl.load(weights + row[:, None] * num_columns + column, present, other=0)


@triton.jit
def feed_back(
    read,  # R_{t-1} [H*D]
    x,  # [H*D]
    logits,  # [H*3]
    feedback_x,
    feedback_logits,
    of_read,  # V
    given,  # c_t [m]
    fed_x,  # out [H*D]: x + P u
    fed_logits,  # out [H*3]: logits + Q u
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_ACTIONS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    NUMBERS: tl.constexpr,
    LOGITS: tl.constexpr,
    UNITS: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """Store x_t + P u_t and logits_t + Q u_t."""
    numbers: tl.constexpr = HEADS * HEAD_DIM
    actions: tl.constexpr = HEADS * NUM_ACTIONS
    column, action = tl.arange(0, NUMBERS), tl.arange(0, LOGITS)
    new_x = tl.load(x + column, column < numbers, other=0)
    new_logits = tl.load(logits + action, action < actions, other=0)
    last = tl.load(read + column, column < numbers, other=0)[None, :]
    for start in range(0, UNITS, BLOCK):
        row = start + tl.arange(0, BLOCK)
        if HIDDEN:
            before = tl.load(given + row, row < UNITS, other=0)
            before += tl.sum(last * _load_map(of_read, row, UNITS, numbers, NUMBERS), 1)
        else:
            before = tl.load(read + row, row < UNITS, other=0)
        fed = _activated(before, ACTIVATION)
        if ACTIVATION == "gated":
            before = tl.load(given + UNITS + row, row < UNITS, other=0)
            before += tl.sum(last * _load_map(of_read + UNITS * numbers, row, UNITS, numbers, NUMBERS), 1)
            fed *= _activated(before, ACTIVATION)
        fed = fed[:, None]
        new_x += tl.sum(fed * _load_map(feedback_x, row, UNITS, numbers, NUMBERS), 0)
        new_logits += tl.sum(fed * _load_map(feedback_logits, row, UNITS, actions, LOGITS), 0)
    tl.store(fed_x + column, new_x, column < numbers)
    tl.store(fed_logits + action, new_logits, action < actions)


@triton.jit
def feed_back_backward(
    fed,  # u_t [m]; gated: its factors [2 m]
    grad_x,  # [H*D]
    grad_logits,  # [H*3]
    feedback_x,
    feedback_logits,
    of_read,
    grad_given,  # out, where HIDDEN [m]
    grad_read,  # out [H*D]
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_ACTIONS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    NUMBERS: tl.constexpr,
    LOGITS: tl.constexpr,
    UNITS: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """Store the gradients of R_{t-1} and, if HIDDEN, of c_t."""
    numbers: tl.constexpr = HEADS * HEAD_DIM
    actions: tl.constexpr = HEADS * NUM_ACTIONS
    column, action = tl.arange(0, NUMBERS), tl.arange(0, LOGITS)
    to_x = tl.load(grad_x + column, column < numbers, other=0)[None, :]
    to_logits = tl.load(grad_logits + action, action < actions, other=0)[None, :]
    to_read = tl.zeros([NUMBERS], to_x.dtype)
    for start in range(0, UNITS, BLOCK):
        row = start + tl.arange(0, BLOCK)
        grad = tl.sum(to_x * _load_map(feedback_x, row, UNITS, numbers, NUMBERS), 1)
        grad += tl.sum(to_logits * _load_map(feedback_logits, row, UNITS, actions, LOGITS), 1)
        if ACTIVATION != "identity":
            active = tl.load(fed + row, row < UNITS, other=0)
            if ACTIVATION == "gated":
                other = tl.load(fed + UNITS + row, row < UNITS, other=0)
                grad_other = grad * active * (1 - other * other)
                tl.store(grad_given + UNITS + row, grad_other, row < UNITS)
                of_other = _load_map(of_read + UNITS * numbers, row, UNITS, numbers, NUMBERS)
                to_read += tl.sum(grad_other[:, None] * of_other, 0)
                grad *= other
            grad *= 1 - active * active
        if HIDDEN:
            tl.store(grad_given + row, grad, row < UNITS)
            to_read += tl.sum(grad[:, None] * _load_map(of_read, row, UNITS, numbers, NUMBERS), 0)
        else:
            tl.store(grad_read + row, grad, row < UNITS)
    if HIDDEN:
        tl.store(grad_read + column, to_read, column < numbers)
