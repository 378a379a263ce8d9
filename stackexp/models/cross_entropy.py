"""Next-token cross entropy, computed in chunks of tokens to avoid the logits of a whole batch.

Logits are V / d times as large as hidden states (51 times for 360m), and twice that in float32. The chunked loss
computes the logits of one chunk and their gradient together. So no product is computed twice, and the backward pass
needs only tensors as large as the hidden states and the weight. Logits have the precision of autocast; everything else
is at least float32.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config.trainer import TrainerConfig
from stackexp.stack import widen

NO_TARGET = -100  # the last token of a sequence has no next token; -100 as in torch's cross_entropy


class Losses(NamedTuple):
    """Means over predictions, in nats, at least float32."""

    total: Tensor  # the objective: (label-smoothed) cross entropy + z_loss * z; the only one with a gradient
    cross_entropy: Tensor
    z: Tensor | None  # squared log partition function; None without z_loss

    def scale(self, factor: Tensor) -> "Losses":
        """Return the losses times a factor."""
        return Losses(factor * self.total, factor * self.cross_entropy, None if self.z is None else factor * self.z)


class Head(NamedTuple):
    """The projection of hidden states to logits."""

    weight: Tensor  # [V, d]
    bias: Tensor | None = None  # [V]


@dataclass(frozen=True)
class NextTokenLoss:
    """The next-token loss of a model called with `return_hidden=criterion.needs_hidden`."""

    kind: str = "chunked"  # or whole: see `TrainerConfig.cross_entropy`
    chunk: int = 4096  # tokens
    z_loss: float = 0.0  # weight of the mean squared log partition function
    compiled: bool = False  # compile the computation of a chunk, or of the whole loss

    @classmethod
    def from_config(cls, trainer: TrainerConfig, compiled: bool = False) -> "NextTokenLoss":
        """Return the configured loss."""
        return cls(trainer.cross_entropy, trainer.cross_entropy_chunk, trainer.z_loss, compiled)

    @property
    def needs_hidden(self) -> bool:
        """Return True if the loss takes hidden states instead of logits."""
        return self.kind != "whole"

    def __call__(self, model: nn.Module, output: Any, tokens: Tensor) -> Losses:
        """Return the losses of tokens [B, T] from the model's `DecoderOutput`: T - 1 predictions per sequence."""
        if self.kind == "whole":
            run = _compile(compute_losses) if self.compiled else compute_losses
            return run(output.logits[:, :-1], tokens[:, 1:], self.z_loss)
        options = {"z_loss": self.z_loss, "chunk": self.chunk, "compiled": self.compiled}
        return linear_cross_entropy(output.hidden, model.output_head, tokens, **options)

    def compute_token_losses(self, model: nn.Module, output: Any, tokens: Tensor) -> Tensor:
        """Return the cross entropy of each token in nats, [B, T - 1], without gradients."""
        if self.kind == "whole":
            return compute_token_losses(output.logits, tokens)
        return compute_linear_token_losses(output.hidden, model.output_head, tokens, self.chunk, self.compiled)


def compute_losses(logits: Tensor, targets: Tensor, z_loss: float = 0.0, label_smoothing: float = 0.0) -> Losses:
    """Return the losses of logits [..., V] and targets [...].

    Label smoothing by s applies to the total only: the target distribution is (1 - s) onehot + s / V.
    """
    logits, targets = widen(logits.flatten(0, -2)), targets.flatten()
    total = cross_entropy = F.cross_entropy(logits, targets)
    if label_smoothing:
        total = F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    if not z_loss:
        return Losses(total, cross_entropy.detach(), None)
    has_target = targets != NO_TARGET
    z = (logits.logsumexp(-1).square() * has_target).sum() / has_target.sum()
    return Losses(total + z_loss * z, cross_entropy.detach(), z.detach())


def compute_token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross entropy of next tokens in nats, [B, T - 1], for logits [B, T, V] and tokens [B, T]."""
    targets = tokens[:, 1:]
    return F.cross_entropy(widen(logits[:, :-1].flatten(0, 1)), targets.flatten(), reduction="none").view_as(targets)


def linear_cross_entropy(
    hidden: Tensor, head: Head, tokens: Tensor, *, z_loss: float = 0.0, chunk: int = 4096, compiled: bool = False
) -> Losses:
    """Return the losses of next tokens for hidden [B, T, d] and tokens [B, T], computed in chunks of tokens."""
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
    options = z_loss, chunk, compiled, needs_gradient
    rows, targets = hidden.flatten(0, 1), shift_tokens(tokens)
    total, cross_entropy, z = LinearCrossEntropy.apply(rows, head.weight, head.bias, targets, options)
    return Losses(total, cross_entropy, z if z_loss else None)


@torch.no_grad()
def compute_linear_token_losses(
    hidden: Tensor, head: Head, tokens: Tensor, chunk: int = 4096, compiled: bool = False
) -> Tensor:
    """Return `compute_token_losses` [B, T - 1] for hidden [B, T, d] and tokens [B, T], without gradients."""
    hidden, weight, bias = _cast(hidden.flatten(0, 1), head.weight, head.bias)
    run_chunk = _compile(_compute_chunk_token_losses) if compiled else _compute_chunk_token_losses
    chunks = zip(hidden.split(chunk), shift_tokens(tokens).split(chunk), strict=True)
    with torch.autocast(hidden.device.type, enabled=False):
        losses = [run_chunk(rows, weight, bias, targets) for rows, targets in chunks]
    return torch.cat(losses).view_as(tokens)[:, :-1]


def shift_tokens(tokens: Tensor) -> Tensor:
    """Return one target per token of tokens [B, T], `NO_TARGET` for the last one: [B * T].

    With as many targets as hidden states, chunks of hidden states are views.
    """
    return F.pad(tokens[:, 1:], (0, 1), value=NO_TARGET).flatten()


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross entropy + z_loss * mean squared log Z over targets >= 0, and both terms without gradient.

    The loss is a scalar, so the forward pass can already compute the gradients while it holds the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: tuple[float, int, bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute losses and gradients for hidden [N, d], weight [V, d], bias [V] and targets [N]."""
        z_loss, chunk, compiled, needs_gradient = options
        scale = 1 / (targets >= 0).sum().to(widen(hidden[:0]).dtype)
        run_chunk = _compile(_compute_chunk) if compiled else _compute_chunk
        x, w, b = _cast(hidden, weight, bias)
        sums, grad_weight, grad_bias = 0, None, None
        grad_hidden = torch.empty_like(hidden) if needs_gradient else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(x), chunk):
                rows = slice(start, start + chunk)
                chunk_sums, *gradients = run_chunk(x[rows], w, b, targets[rows], scale, z_loss, needs_gradient)
                sums = sums + chunk_sums
                if needs_gradient:
                    grad_hidden[rows] = gradients[0]
                    grad_weight, grad_bias = _add(grad_weight, gradients[1]), _add(grad_bias, gradients[2])
        cross_entropy, z = sums * scale
        total = cross_entropy + z_loss * z if z_loss else cross_entropy.clone()
        totals = ((grad_weight, weight), (grad_bias, bias))
        ctx.save_for_backward(grad_hidden, *(grad if grad is None else grad.to(like.dtype) for grad, like in totals))
        ctx.mark_non_differentiable(cross_entropy, z)
        return total, cross_entropy, z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Scale the saved gradients in place, which halves the peak memory. A second backward pass is an error."""
        scaled = [saved if saved is None else saved.mul_(grad_total) for saved in ctx.saved_tensors]
        return (*scaled, None, None)


def _add(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    """Return the sum over chunks, at least float32 once there are several."""
    return term if total is None else widen(total).add_(term)


def _compute_chunk(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor, z_loss: float, needs_gradient: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the sums [2] of cross entropy and squared log Z over rows x [C, d], and optionally three gradients.

    The gradients are those of scale * (cross entropy + z_loss * squared log Z) with respect to x, weight and bias.
    d/dlogits = p - onehot + 2 z_loss log Z p is rounded once, to the precision of the matrix products that use it.
    """
    log_p, losses, log_z = _compute_log_probabilities(x, weight, bias, targets)
    has_target = targets >= 0
    sums = torch.stack([losses.sum(), torch.where(has_target, log_z.square(), 0).sum()])
    if not needs_gradient:
        return sums, None, None, None
    row_scale = (scale * has_target)[:, None]  # [C, 1]
    p = log_p.exp() if torch.compiler.is_compiling() else log_p.exp_()
    grad_logits = _subtract_one_hot(p, row_scale * (1 + 2 * z_loss * log_z[:, None]), row_scale, targets)
    grad_bias = None if bias is None else grad_logits.sum(0)
    grad_logits = grad_logits.to(x.dtype)
    return sums, grad_logits @ weight, grad_logits.T @ x, grad_bias


def _compute_log_probabilities(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p [C, V], cross entropy [C] (0 without a target) and log Z [C] = logsumexp(logits)."""
    logits = F.linear(x, weight, bias)
    log_p = logits.log_softmax(-1, dtype=widen(logits[:0]).dtype)
    index = targets.clamp_min(0)[:, None]
    target_log_p = log_p.gather(-1, index)
    log_z = logits.gather(-1, index) - target_log_p
    return log_p, torch.where(targets >= 0, -target_log_p[:, 0], 0), log_z[:, 0]


def _compute_chunk_token_losses(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    return _compute_log_probabilities(x, weight, bias, targets)[1]


def _subtract_one_hot(p: Tensor, factor: Tensor, row_scale: Tensor, targets: Tensor) -> Tensor:
    """Return factor * p - row_scale * onehot(targets), [C, V], in one pass over p."""
    index = targets.clamp_min(0)[:, None]
    if torch.compiler.is_compiling():
        return factor * p - torch.where(torch.arange(p.shape[1], device=p.device) == index, row_scale, 0)
    p.mul_(factor)
    return p.scatter_(-1, index, p.gather(-1, index) - row_scale)


@functools.cache
def _compile(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True)


def _cast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast to the dtype of autocast, if enabled: once, not for every chunk."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)
