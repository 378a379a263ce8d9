"""The cross entropy of next tokens without the logits of a whole batch: by chunks of tokens.

Logits are V / d times as large as the hidden states they come from (51 times for 360m), in float32 twice that again
against bfloat16. `linear_cross_entropy` makes those of one chunk at a time and, in the same visit, their gradient: no
product is computed twice, and what stays for the backward pass is as large as the hidden states and the weight.
Logits come out of the product in the precision it is in (that of autocast); all that follows is float32 at least.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config.trainer import TrainerConfig
from stackexp.errors import ConfigError, first_line

NO_TARGET = -100  # the last token of a sequence has no next one; -100 as in torch's cross_entropy


class Losses(NamedTuple):
    """Means over predictions, in nats; float32 at least."""

    total: Tensor  # cross_entropy, with the labels smoothed if they are, + z_loss * z: has the gradient
    cross_entropy: Tensor
    z: Tensor | None  # squared log-partition function; None without its weight z_loss


class Head(NamedTuple):
    """The projection of hidden states onto the vocabulary."""

    weight: Tensor  # [V, d]
    bias: Tensor | None = None  # [V]


@dataclass(frozen=True)
class NextTokenLoss:
    """The loss of a batch of tokens by a model that was called on them with `return_hidden=criterion.needs_hidden`."""

    kind: str = "chunked"  # or whole, liger: see `TrainerConfig.cross_entropy`
    chunk: int = 4096  # tokens
    z_loss: float = 0.0  # weight of the mean squared log-partition function
    compiled: bool = False  # each chunk by torch.compile

    @classmethod
    def from_config(cls, trainer: TrainerConfig) -> "NextTokenLoss":
        """Raises ConfigError if what the config names is not installed."""
        if trainer.cross_entropy == "liger":
            _liger()
        return cls(trainer.cross_entropy, trainer.cross_entropy_chunk, trainer.z_loss, trainer.compile)

    @property
    def needs_hidden(self) -> bool:
        """Whether it takes the model's hidden states, not its logits."""
        return self.kind != "whole"

    def __call__(self, model: nn.Module, output: Any, tokens: Tensor) -> Losses:
        """`output` is the model's DecoderOutput of tokens [B, T]: T - 1 predictions of each sequence."""
        if self.kind == "whole":
            return compute_losses(output.logits[:, :-1], tokens[:, 1:], self.z_loss)
        if self.kind == "liger":
            return liger_cross_entropy(output.hidden, model.output_head, tokens, self.z_loss)
        options = {"z_loss": self.z_loss, "chunk": self.chunk, "compiled": self.compiled}
        return linear_cross_entropy(output.hidden, model.output_head, tokens, **options)

    def compute_token_losses(self, model: nn.Module, output: Any, tokens: Tensor) -> Tensor:
        """Cross entropy in nats [B, T - 1], without gradients. Of hidden states always by chunks of our own."""
        if self.kind == "whole":
            return compute_token_losses(output.logits, tokens)
        return compute_linear_token_losses(output.hidden, model.output_head, tokens, self.chunk, self.compiled)


def compute_losses(logits: Tensor, targets: Tensor, z_loss: float = 0.0, label_smoothing: float = 0.0) -> Losses:
    """Of all logits [..., V] at once, and the targets [...].

    `label_smoothing` is in the total alone: its target is 1 - s for the right symbol and s / V more for each of all V.
    """
    logits, targets = _wide(logits.flatten(0, -2)), targets.flatten()
    total = cross_entropy = F.cross_entropy(logits, targets)
    if label_smoothing:
        total = F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    if not z_loss:
        return Losses(total, cross_entropy.detach(), None)
    z = logits.logsumexp(-1).square().mean()
    return Losses(total + z_loss * z, cross_entropy.detach(), z.detach())


def compute_token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy in nats, [B, T - 1], of the next token; logits [B, T, V], tokens [B, T]; computed in float32."""
    targets = tokens[:, 1:]
    return F.cross_entropy(_wide(logits[:, :-1].flatten(0, 1)), targets.flatten(), reduction="none").view_as(targets)


def linear_cross_entropy(
    hidden: Tensor, head: Head, tokens: Tensor, z_loss: float = 0.0, chunk: int = 4096, compiled: bool = False
) -> Losses:
    """`compute_losses` the next tokens: hidden [B, T, d], tokens [B, T]. `compiled`: each chunk by torch.compile."""
    learns = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
    total, cross_entropy, z = LinearCrossEntropy.apply(
        hidden.flatten(0, 1), head.weight, head.bias, next_tokens(tokens), z_loss, chunk, compiled, learns
    )
    return Losses(total, cross_entropy, z if z_loss else None)


@torch.no_grad()
def compute_linear_token_losses(
    hidden: Tensor, head: Head, tokens: Tensor, chunk: int = 4096, compiled: bool = False
) -> Tensor:
    """Return `compute_token_losses`, [B, T - 1], for hidden [B, T, d] and tokens [B, T], without gradient."""
    hidden, weight, bias = _cast(hidden.flatten(0, 1), head.weight, head.bias)
    of_chunk = _compiled(_token_losses) if compiled else _token_losses
    pieces = zip(hidden.split(chunk), next_tokens(tokens).split(chunk), strict=True)
    with torch.autocast(hidden.device.type, enabled=False):
        losses = [of_chunk(rows, weight, bias, targets) for rows, targets in pieces]
    return torch.cat(losses).view_as(tokens)[:, :-1]


def liger_cross_entropy(hidden: Tensor, head: Head, tokens: Tensor, z_loss: float = 0.0) -> Losses:
    """As `linear_cross_entropy`, by the Triton kernels of liger-kernel. Their z is of the precision of `hidden`."""
    hidden, weight, bias = _cast(hidden.flatten(0, 1), head.weight, head.bias)
    options = {"lse_square_scale": z_loss, "return_z_loss": True, "accum_dtype": torch.float32}
    found = _liger()(hidden, weight, next_tokens(tokens), bias, ignore_index=NO_TARGET, **options)
    if not z_loss:
        return Losses(found.loss, found.loss.detach(), None)
    weighted = found.z_loss.detach().float()
    return Losses(found.loss, found.loss.detach() - weighted, weighted / z_loss)


@functools.cache
def _liger() -> Callable:
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise ConfigError(
            f"trainer.cross_entropy=liger needs the package liger-kernel ({first_line(error)}); "
            "pip install 'stackexp[liger]', or set trainer.cross_entropy=chunked"
        ) from None
    return liger_fused_linear_cross_entropy


def next_tokens(tokens: Tensor) -> Tensor:
    """The targets [B * T] of tokens [B, T]: one for each, so that chunks are views of the hidden states."""
    return F.pad(tokens[:, 1:], (0, 1), value=NO_TARGET).flatten()


class LinearCrossEntropy(torch.autograd.Function):
    """(mean cross entropy + z_loss * mean squared log Z, and the two without gradients) over targets >= 0.

    As there is one scalar to differentiate, its gradients are computed where the logits are: in the forward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, d]
        weight: Tensor,  # [V, d]
        bias: Tensor | None,
        targets: Tensor,  # [N]
        z_loss: float,
        chunk: int,
        compiled: bool,
        learns: bool,  # whether gradients are wanted
    ) -> tuple[Tensor, Tensor, Tensor]:
        scale = 1 / (targets >= 0).sum()
        of_chunk = _compiled(_chunk) if compiled else _chunk
        x, w, b = _cast(hidden, weight, bias)
        sums, to_weight, to_bias = 0, _Sum(weight), _Sum(bias)
        to_hidden = torch.empty_like(hidden) if learns else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(x), chunk):
                rows = slice(start, start + chunk)
                found, *gradients = of_chunk(x[rows], w, b, targets[rows], scale, z_loss, learns)
                sums = sums + found
                if learns:
                    to_hidden[rows] = gradients[0]
                    to_weight.add(gradients[1])
                    to_bias.add(gradients[2])
        cross_entropy, z = sums * scale
        total = cross_entropy + z_loss * z if z_loss else cross_entropy.clone()
        ctx.save_for_backward(to_hidden, to_weight.total(), to_bias.total())
        ctx.mark_non_differentiable(cross_entropy, z)
        return total, cross_entropy, z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """In place, so that at the worst moment of a pass there are no two of them: a second time raises."""
        scaled = [saved if saved is None else saved.mul_(gradient) for saved in ctx.saved_tensors]
        return (*scaled, None, None, None, None, None)


class _Sum:
    """A sum of tensors over the chunks, in float32 at least once there are several; then in the parameter's dtype."""

    def __init__(self, parameter: Tensor | None) -> None:
        self._parameter, self._sum = parameter, None

    def add(self, term: Tensor | None) -> None:
        if self._sum is None or term is None:
            self._sum = term
        elif self._sum.dtype == _wide(term[:0]).dtype:
            self._sum += term
        else:
            self._sum = _wide(self._sum).add_(term)

    def total(self) -> Tensor | None:
        return self._sum if self._sum is None else self._sum.to(self._parameter.dtype)


def _chunk(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor, z_loss: float, learns: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Of rows x [C, d]: the sums of cross entropy and squared log Z [2], and if it `learns` the gradients of
    scale * (cross entropy + z_loss * squared log Z) with respect to x, weight and bias.

    d/dlogits = p - onehot + 2 z_loss log Z p, rounded once, to the precision of the products it enters.
    """
    log_p, losses, log_z = _log_probabilities(x, weight, bias, targets)
    counted = targets >= 0
    sums = torch.stack([losses.sum(), torch.where(counted, log_z.square(), 0).sum()])
    if not learns:
        return sums, None, None, None
    share = (scale * counted)[:, None]  # [C, 1]
    p = log_p.exp() if torch.compiler.is_compiling() else log_p.exp_()
    slope = _minus_one_hot(p, share * (1 + 2 * z_loss * log_z[:, None]), share, targets)
    to_bias = None if bias is None else slope.sum(0)
    slope = slope.to(x.dtype)
    return sums, slope @ weight, slope.T @ x, to_bias


def _log_probabilities(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """log p [C, V], cross entropy [C] (0 without a target) and log Z = log sum exp logits [C], float32 at least."""
    logits = F.linear(x, weight, bias)
    log_p = logits.log_softmax(-1, dtype=_wide(logits[:0]).dtype)
    index = targets.clamp_min(0)[:, None]
    right = log_p.gather(-1, index)
    log_z = logits.gather(-1, index) - right
    return log_p, torch.where(targets >= 0, -right[:, 0], 0), log_z[:, 0]


def _token_losses(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    return _log_probabilities(x, weight, bias, targets)[1]


def _minus_one_hot(p: Tensor, factor: Tensor, share: Tensor, targets: Tensor) -> Tensor:
    """factor p - share onehot(targets) [C, V]: without a pass of its own, whether compiled or not."""
    index = targets.clamp_min(0)[:, None]
    if torch.compiler.is_compiling():
        return factor * p - torch.where(torch.arange(p.shape[1], device=p.device) == index, share, 0)
    p.mul_(factor)
    return p.scatter_(-1, index, p.gather(-1, index) - share)


@functools.cache
def _compiled(of_chunk: Callable) -> Callable:
    return torch.compile(of_chunk, fullgraph=True)


def _cast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """In the precision of autocast, where that is on: once, not for every chunk."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
