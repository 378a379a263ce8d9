"""What a pass of a model holds in memory at its worst moment, counted on tensors that have shapes but no numbers."""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from stackexp.models.cross_entropy import NextTokenLoss
from stackexp.models.transformer import Transformer


class Allocations(TorchDispatchMode):
    """Within the context, the bytes of all storages alive by kind: `live` now, `peak` when their sum was largest.

    The model's own weights and what was there before are not counted. Kinds:
      logits       [..., vocabulary of the output], and their gradients
      stack        made in a memory's forward pass, except the hidden state it hands on
      casts        copies of weights in another precision, as autocast makes them
      activations  everything else
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._outputs = getattr(model.config, "output_vocab_size", None) or model.config.vocab_size
        self._kinds = {p.untyped_storage()._cdata: "weights" for p in model.parameters()}
        self._in_memory = False
        self._total = 0
        for memory in model.memories:
            memory.register_forward_pre_hook(self._enter_memory)
            memory.register_forward_hook(self._leave_memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        cast = func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self._add(tensor, cast)
        return result

    def _add(self, tensor: Tensor, cast: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._kinds:  # a view, or changed in place
            return
        if tensor.ndim and tensor.shape[-1] == self._outputs:
            kind = "logits"
        else:
            kind = "casts" if cast else "stack" if self._in_memory else "activations"
        self._kinds[storage._cdata] = kind
        weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes()).atexit = False
        self._change(kind, storage.nbytes())

    def _drop(self, key: int, size: int) -> None:
        self._change(self._kinds.pop(key), -size)

    def _change(self, kind: str, size: int) -> None:
        self.live[kind] += size
        self._total += size
        if self._total > self.peak.total():
            self.peak = self.live.copy()

    def _enter_memory(self, *_: Any) -> None:
        self._in_memory = True

    def _leave_memory(self, module: nn.Module, args: Any, output: tuple) -> None:
        self._in_memory = False
        storage = output[0].untyped_storage()
        if self._kinds[storage._cdata] == "stack":
            self._kinds[storage._cdata] = "activations"
            self._change("stack", -storage.nbytes())
            self._change("activations", storage.nbytes())


class RMSNormKernel(torch.autograd.Function):
    """What CUDA's fused RMSNorm makes and keeps: shapes only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _fuse_norms(model: Transformer) -> None:
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = functools.partial(_rms_norm, module)


def _rms_norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    """As on CUDA, one kernel. (The CPU has none.)"""
    return RMSNormKernel.apply(x, module.weight.to(x.dtype))


def training_peak(
    model: Transformer, batch: int, length: int, autocast: bool, criterion: NextTokenLoss
) -> Counter[str]:
    """Bytes by kind at the worst moment of a forward and backward pass over `batch` sequences of `length` tokens.

    `model` is on the meta device. Gradients of weights are dropped as they come: `cost.plan` counts all of them.
    """
    with _fake(model):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        with Allocations(model) as allocations:
            tokens = torch.zeros(batch, length, dtype=torch.int64)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = _loss(model.train(), tokens, criterion)
            loss.backward()
    return allocations.peak


def validation_peak(
    model: Transformer, batch: int, length: int, autocast: bool, criterion: NextTokenLoss
) -> Counter[str]:
    """As `training_peak`, for a forward pass without gradients."""
    with _fake(model), torch.no_grad(), Allocations(model) as allocations:
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            criterion.compute_token_losses(model, model.eval()(tokens, return_hidden=criterion.needs_hidden), tokens)
    return allocations.peak


def _loss(model: Transformer, tokens: Tensor, criterion: NextTokenLoss) -> Tensor:
    """As LanguageModeling.training_step: what lives as long there lives as long here."""
    output = model(tokens, return_hidden=criterion.needs_hidden)
    loss = criterion(model, output, tokens).total
    return loss + model.entropy_weight * output.entropy if model.entropy_weight else loss


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


@contextlib.contextmanager
def _fake(model: Transformer) -> Iterator[None]:
    """The model, and all that is made within the context, as fake tensors; attention is a flash kernel, as on CUDA."""
    _fuse_norms(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        yield
