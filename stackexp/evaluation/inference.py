"""The state of a model that is only evaluated."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

AUTOCAST = {"bf16-mixed": torch.bfloat16}


@contextlib.contextmanager
def inference_mode(model: nn.Module, precision: str) -> Iterator[None]:
    """Run a model in eval mode, without gradients and compilation, in the precision of `trainer.precision`.

    Compilation is off because inputs of many lengths would each compile again.
    """
    was_training, dtype = model.training, AUTOCAST.get(precision)
    device = next(model.parameters()).device
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            torch.autocast(device.type, dtype, enabled=dtype is not None),
        ):
            yield
    finally:
        model.train(was_training)
