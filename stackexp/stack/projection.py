"""The projections around a stack step, x = W_down h and h' = g h + W_up R, in fewer passes over h than autograd takes.

`project_down` and `project_up` share one gradient. The first returns a `Link` to the second, whose tensors `to_new_h`
and `to_read` use no storage. Their gradients are dh' and R. From these, the backward pass of `project_down` computes
all gradients but dR:

    dx = dx + A^T dlogits      dh = g dh' + W_down^T dx      dW_down = dx^T h      dW_up = dh'^T R      dg = h . dh'

`triton.projection` has the products `compute_...`. Tensors are contiguous.
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class Link(NamedTuple):
    """The inputs of `project_up` that `project_down` returns."""

    products: ModuleType
    h: Tensor  # [..., d], without gradient
    up: Tensor  # W_up [d, H*D], without gradient
    gate: Tensor  # g [1], without gradient
    to_new_h: Tensor | None  # [..., d]; its gradient is dh'
    to_read: Tensor | None  # [..., H, D]; its gradient is R


def project_down(
    products: ModuleType,
    h: Tensor,
    down: Tensor,
    actions: Tensor | None,
    up: Tensor,
    gate: Tensor,
    heads: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Link]:
    """Return x [..., H, D], the logits A x [..., H, 3] or None, and the link to `project_up`.

    Args:
        products: From `dispatch.choose_products`.
        h: Hidden states [..., d].
        down: W_down [H*D, d].
        actions: A [H, 3, D]; None for no logits.
        up: W_up [d, H*D].
        gate: g [1].
        heads: H.
        dtype: The dtype of x, the logits and the operands of the products.
    """
    if not torch.is_grad_enabled():  # faster without autograd.Function, which matters for a single token
        actions = None if actions is None else actions.to(dtype)
        x, logits, _ = products.compute_down(h.contiguous(), down.to(dtype), heads, actions)
        return x, logits, Link(products, h, up, gate, None, None)
    x, logits, to_new_h, to_read = _ProjectDown.apply(products, h, down, actions, up, gate, heads, dtype)
    return x, logits, Link(products, h.detach(), up.detach(), gate.detach(), to_new_h, to_read)


def project_up(link: Link, read: Tensor) -> Tensor:
    """Return h' = g h + W_up R [..., d] for R [..., H, D] in the dtype of x."""
    if link.to_new_h is None:
        return link.products.compute_up(link.h.contiguous(), read.contiguous(), link.up.to(read.dtype).T, link.gate)[0]
    return _ProjectUp.apply(read, *link)


class _ProjectDown(torch.autograd.Function):
    """`project_down` with the gradients of h and of all weights."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        products: ModuleType,
        h: Tensor,
        down: Tensor,
        actions: Tensor | None,
        up: Tensor,
        gate: Tensor,
        heads: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor | None, ...]:
        ctx.dtypes = down.dtype, None if actions is None else actions.dtype, up.dtype
        h, down, actions = h.contiguous(), down.to(dtype), None if actions is None else actions.to(dtype).contiguous()
        x, logits, kept = products.compute_down(h, down, heads, actions, any(ctx.needs_input_grad))
        ctx.products = products
        ctx.save_for_backward(kept, down, actions, gate, x)
        return x, logits, h.new_empty(()).expand_as(h), x.new_empty(()).expand_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        h, down, actions, gate, x = ctx.saved_tensors
        to_x, to_logits, to_new_h, read = (None if grad is None else grad.contiguous() for grad in grads)
        to_h, to_x, to_actions = ctx.products.compute_up(to_new_h, to_x, down, gate, actions, to_logits, x)
        found = [None, to_actions, None, None]
        if any(ctx.needs_input_grad[2:]):
            found[0], found[2], found[3] = ctx.products.compute_weight_grads(h, to_new_h, to_x, read)
        dtypes = (*ctx.dtypes, gate.dtype)
        weights = (None if grad is None else grad.to(dtype) for grad, dtype in zip(found, dtypes, strict=True))
        return None, to_h, *weights, None, None


class _ProjectUp(torch.autograd.Function):
    """`project_up` with the gradient of R. It passes dh' and R to the backward pass of `project_down`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        read: Tensor,
        products: ModuleType,
        h: Tensor,
        up: Tensor,
        gate: Tensor,
        to_new_h: Tensor,
        to_read: Tensor,
    ) -> Tensor:
        read, up = read.contiguous(), up.to(read.dtype)
        ctx.products = products
        ctx.save_for_backward(read, up)
        return products.compute_up(h.contiguous(), read, up.T, gate)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, to_new_h: Tensor) -> tuple[Tensor | None, ...]:
        read, up = ctx.saved_tensors
        to_read = ctx.products.compute_down(to_new_h.contiguous(), up.T, read.shape[-2])[0]
        return to_read, None, None, None, None, to_new_h, read
