"""An exponential moving average of the weights, for `trainer.ema_decay`."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class WeightAverage:
    """The exponential moving average (EMA) of a model's weights, in float32 or wider.

    After step n the average becomes d x average + (1 - d) x weights, with d = min(decay, (1 + n) / (10 + n)), the
    schedule of TensorFlow's ExponentialMovingAverage: early averages do not keep the initial weights for long. Each
    rank averages its own shards.

    Attributes:
        tensors: The averages by weight name, sharded like the weights. Checkpoints save and load them in place.
    """

    def __init__(self, model: nn.Module, decay: float):
        self._model, self._decay = model, decay
        self.tensors = {name: _widen(weight).clone() for name, weight in model.state_dict().items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights after optimizer step `step`, counted from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        weights = self._model.state_dict()
        averages = [_get_local(average) for average in self.tensors.values()]
        torch._foreach_lerp_(averages, [_widen(_get_local(weights[name])) for name in self.tensors], 1 - decay)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _get_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
