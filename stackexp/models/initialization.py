"""How weights are drawn: one rule for the decoder and what sits in its slot, whether or not it is sharded."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from stackexp.config.model import TransformerConfig


def init_weight_(weight: Tensor, config: TransformerConfig, output_of_layer: int | None = None) -> None:
    """Draw a weight whose last dimension is its fan-in, in place.

    fan_in: truncated normal at 3 sigma, sigma = 1/sqrt(fan_in); a projection back into the residual stream
    (`output_of_layer` given) has 1/sqrt(2 fan_in (layer+1)). normal: sigma = init_std throughout.
    """
    if config.init == "normal":
        nn.init.normal_(weight, std=config.init_std)
        return
    scale = 1 if output_of_layer is None else 2 * (output_of_layer + 1)
    sigma = 1 / math.sqrt(weight.shape[-1] * scale)
    nn.init.trunc_normal_(weight, std=sigma, a=-3 * sigma, b=3 * sigma)


@contextlib.contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Within the context the sharded parameters of a module are whole, on the CPU; then each process keeps its part.

    Every process must write the same into them. So the weights of a seed do not depend on the number of processes,
    and no more of the model than this module is ever whole.
    """
    sharded = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    for owner, name, parameter in sharded:
        owner._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
    try:
        yield
    finally:
        for owner, name, parameter in sharded:
            drawn, owner._parameters[name] = owner._parameters[name], parameter
            ours = parameter.to_local()
            values = distribute_tensor(drawn.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
            ours.detach().copy_(values.to_local())
