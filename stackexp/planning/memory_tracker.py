"""Peak memory of a forward and backward pass, measured on fake tensors, which have shapes but no values."""

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


class MemoryTracker(TorchDispatchMode):
    """A context that tracks the bytes of all storages by kind: `live` now, `peak` at the maximum of their sum.

    Weights of the model and storages from before the context do not count. The kinds are
      logits       [..., output vocabulary], and their gradients
      stack        made in the forward pass of a memory, except its output hidden states
      casts        copies of weights in another dtype, as autocast makes them
      activations  everything else
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._output_size = getattr(model.config, "output_vocab_size", None) or model.config.vocab_size
        self._kinds = {p.untyped_storage()._cdata: "weights" for p in model.parameters()}
        self._is_in_memory = False
        self._total = 0
        for memory in model.memories:
            memory.register_forward_pre_hook(self._enter_memory)
            memory.register_forward_hook(self._leave_memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self._add(tensor, is_cast)
        return result

    def _add(self, tensor: Tensor, is_cast: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._kinds:  # a view, or modified in place
            return
        if tensor.ndim and tensor.shape[-1] == self._output_size:
            kind = "logits"
        else:
            kind = "casts" if is_cast else "stack" if self._is_in_memory else "activations"
        self._kinds[storage._cdata] = kind
        weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes()).atexit = False
        self._change(kind, storage.nbytes())

    def _remove(self, key: int, size: int) -> None:
        self._change(self._kinds.pop(key), -size)

    def _change(self, kind: str, size: int) -> None:
        self.live[kind] += size
        self._total += size
        if self._total > self.peak.total():
            self.peak = self.live.copy()

    def _enter_memory(self, *_: Any) -> None:
        self._is_in_memory = True

    def _leave_memory(self, module: nn.Module, args: Any, output: tuple) -> None:
        self._is_in_memory = False
        storage = output[0].untyped_storage()
        if self._kinds[storage._cdata] == "stack":
            self._kinds[storage._cdata] = "activations"
            self._change("stack", -storage.nbytes())
            self._change("activations", storage.nbytes())


def measure_pass(
    model: Transformer, shape: tuple[int, int], autocast: bool, criterion: NextTokenLoss, is_training: bool = True
) -> Counter[str]:
    """Return the peak bytes by kind of a pass over tokens of this shape [B, T], with or without gradients.

    The model is on the meta device. Gradients of weights are freed at once, because `MemoryUse` has its own entry for
    them.
    """
    with _use_fake_tensors(model):
        free_gradients(model)
        with torch.set_grad_enabled(is_training), MemoryTracker(model) as tracker:
            tokens = torch.zeros(shape, dtype=torch.int64)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                if is_training:
                    loss = compute_loss(model.train(), tokens, criterion)
                else:
                    output = model.eval()(tokens, return_hidden=criterion.needs_hidden)
                    criterion.compute_token_losses(model, output, tokens)
            if is_training:
                loss.backward()
    return tracker.peak


def compute_loss(model: Transformer, tokens: Tensor, criterion: NextTokenLoss) -> Tensor:
    """Return the training loss like LanguageModeling.training_step, with the same lifetimes of tensors."""
    output = model(tokens, return_hidden=criterion.needs_hidden)
    loss = criterion(model, output, tokens).total
    return loss + model.entropy_weight * output.entropy if model.entropy_weight else loss


def free_gradients(model: nn.Module) -> None:
    """Free the gradient of each parameter as soon as it is complete."""

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(free)


def fuse_norms(model: nn.Module) -> None:
    """Run RMSNorm as one kernel, as on CUDA. CPUs have no such kernel."""
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            setattr(module, "forward", functools.partial(_run_fused_norm, module))  # noqa: B010


def _run_fused_norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    return FusedRMSNorm.apply(x, module.weight.to(x.dtype))


class FusedRMSNorm(torch.autograd.Function):
    """The allocations of CUDA's fused RMSNorm, without values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Allocate the output, and save what the backward pass needs."""
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate the gradients."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextlib.contextmanager
def _use_fake_tensors(model: Transformer) -> Iterator[None]:
    """Make the model and all new tensors fake. sdpa on fake tensors is a flash kernel, as on CUDA."""
    fuse_norms(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        yield
