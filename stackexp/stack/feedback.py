"""Feedback from the last read to the next push: our extension, not in the paper.

With feedback, token t pushes x_t + P u_t and chooses its action from logits_t + Q u_t, where

    u_t = f(R_{t-1})                without a hidden layer, m = H D units
    u_t = f(c_t + V R_{t-1})        with a hidden layer of m units; c_t is computed from the token

f is the activation: identity, tanh, or gated. `gated` has 2 m rows in V and c, and multiplies the tanh of the first m
by the tanh of the other m.
"""

from collections.abc import Callable

import torch
from torch import Tensor

ACTIVATIONS = ("identity", "tanh", "gated")


def scan_tokens(
    step: Callable,
    read_stack: Callable,
    state: tuple,
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    *,
    feedback: tuple[Tensor, ...] | None = None,
    feedback_activation: str = "identity",
    read: str = "global",
    read_mask: str = "multiply",
    **options: str | int,
) -> tuple:
    """Apply `step` to the tokens of x [B, T, H, D] and logits [B, T, H, 3]; stack the outputs along T.

    `feedback` is (P [m, H, D], Q [m, H, 3]), or (P, Q, V [m, H*D], c [B, T, m]) with a hidden layer. R_{-1} is the read
    of the given state, so a scan may be split at any token.
    """
    assert feedback_activation in ACTIVATIONS, feedback_activation
    outputs = []
    last_read = read_stack(state, query, read, read_mask) if feedback else None
    to_x, to_logits, *hidden = feedback or (None, None)
    for t, (x_t, logits_t) in enumerate(zip(x.unbind(1), logits.unbind(1), strict=True)):
        if feedback:
            hidden_t = (hidden[0], hidden[1][:, t]) if hidden else ()
            u = multiply_gates(activate(last_read.flatten(1), feedback_activation, *hidden_t), feedback_activation)
            x_t = x_t + torch.einsum("bm,mhd->bhd", u, to_x)
            logits_t = logits_t + torch.einsum("bm,mha->bha", u, to_logits)
        output, state = step(state, x_t, logits_t, query, read=read, read_mask=read_mask, **options)
        last_read = output.read
        outputs.append(output)
    stacked = (torch.stack(values, 1) for values in zip(*outputs, strict=True))
    return type(outputs[0])(*stacked), state


def activate(read: Tensor, activation: str, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Return u [..., m], or both factors of the gated feedback, concatenated: [..., 2 m].

    read is R_{t-1} [..., H*D]; weight is V and bias c_t, both None without a hidden layer.
    """
    inner = read if weight is None else bias + read @ weight.T
    return inner if activation == "identity" else inner.tanh()


def multiply_gates(factors: Tensor, activation: str) -> Tensor:
    """Return u [..., m] from the result of `activate`."""
    if activation != "gated":
        return factors
    first, second = factors.chunk(2, -1)
    return first * second
