"""The feedback of one token for `time_scan_kernels`: x_t + P u_t, logits_t + Q u_t, and the gradients.

u_t = f(R_{t-1}), or f(c_t + V R_{t-1}) with a hidden layer; see `feedback`. The maps are multiplied `settings.block`
rows at a time. With gates, u_t is a product of two factors, for each of which c_t and V have m rows.
"""

import triton
import triton.language as tl


@triton.jit
def _activate(inner, settings: tl.constexpr):
    """Apply identity or tanh."""
    if settings.activation != "identity":
        falling = tl.exp(-2 * tl.abs(inner))
        size = (1 - falling) / (1 + falling)
        inner = tl.where(inner < 0, -size, size)
    return inner


@triton.jit
def _load_map(weights, row, num_rows: tl.constexpr, num_columns: tl.constexpr, columns: tl.constexpr):
    """Load rows of P [m, H*D], Q [m, H*3] or V [m, H*D]."""
    column = tl.arange(0, columns)[None, :]
    present = (row < num_rows)[:, None] & (column < num_columns)
    return tl.load(weights + row[:, None] * num_columns + column, present, other=0)


@triton.jit
def add_feedback(tensors, read, token, settings: tl.constexpr):
    """Store x_t + P u_t and logits_t + Q u_t. tensors: ScanForward; read: R_{t-1} [H*D]; token: among all of [B, T]."""
    width: tl.constexpr = settings.heads * settings.head_dim
    padded: tl.constexpr = settings.padded_width
    actions: tl.constexpr = settings.heads * settings.num_actions
    units: tl.constexpr = settings.units
    factors: tl.constexpr = 2 if settings.activation == "gated" else 1
    column, action = tl.arange(0, padded), tl.arange(0, settings.padded_logits)
    new_x = tl.load(tensors.x + token * width + column, column < width, other=0)
    new_logits = tl.load(tensors.logits + token * actions + action, action < actions, other=0)
    last = tl.load(read + column, column < width, other=0)[None, :]
    for start in range(0, units, settings.block):
        row = start + tl.arange(0, settings.block)
        fed = tl.full(row.shape, 1, new_x.dtype)
        for factor in tl.static_range(factors):
            if tensors.from_read is not None:
                inner = tl.load(tensors.given + (token * factors + factor) * units + row, row < units, other=0)
                weights = _load_map(tensors.from_read + factor * units * width, row, units, width, padded)
                inner += tl.sum(last * weights, 1)
            else:
                inner = tl.load(read + row, row < units, other=0)
            fed *= _activate(inner, settings)
        fed = fed[:, None]
        new_x += tl.sum(fed * _load_map(tensors.feedback_x, row, units, width, padded), 0)
        new_logits += tl.sum(fed * _load_map(tensors.feedback_logits, row, units, actions, settings.padded_logits), 0)
    tl.store(tensors.fed_x + token * width + column, new_x, column < width)
    tl.store(tensors.fed_logits + token * actions + action, new_logits, action < actions)


@triton.jit
def feedback_backward(tensors, batch_row, token, settings: tl.constexpr):
    """Store the gradients of R_{t-1} and, with a hidden layer, of c_t. tensors: ScanBackward."""
    width: tl.constexpr = settings.heads * settings.head_dim
    padded: tl.constexpr = settings.padded_width
    actions: tl.constexpr = settings.heads * settings.num_actions
    units: tl.constexpr = settings.units
    factors: tl.constexpr = 2 if settings.activation == "gated" else 1
    column, action = tl.arange(0, padded), tl.arange(0, settings.padded_logits)
    to_x = tl.load(tensors.to_x + token * width + column, column < width, other=0)[None, :]
    to_logits = tl.load(tensors.to_logits + token * actions + action, action < actions, other=0)[None, :]
    out = tensors.to_read + batch_row * width
    to_read = tl.full([padded], 0, to_x.dtype)
    for start in range(0, units, settings.block):
        row = start + tl.arange(0, settings.block)
        to_fed = tl.sum(to_x * _load_map(tensors.feedback_x, row, units, width, padded), 1)
        to_fed += tl.sum(to_logits * _load_map(tensors.feedback_logits, row, units, actions, settings.padded_logits), 1)
        for factor in tl.static_range(factors):
            to_inner = to_fed
            if settings.activation != "identity":
                active = tl.load(tensors.fed + (token * factors + factor) * units + row, row < units, other=0)
                to_inner *= 1 - active * active
            if factors == 2:
                to_inner *= tl.load(tensors.fed + (token * 2 + 1 - factor) * units + row, row < units, other=0)
            if tensors.from_read is not None:
                tl.store(tensors.to_given + (token * factors + factor) * units + row, to_inner, row < units)
                weights = _load_map(tensors.from_read + factor * units * width, row, units, width, padded)
                to_read += tl.sum(to_inner[:, None] * weights, 0)
            else:
                tl.store(out + row, to_inner, row < units)
    if tensors.from_read is not None:
        tl.store(out + column, to_read, column < width)
