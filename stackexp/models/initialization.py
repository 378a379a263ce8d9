"""How weights are drawn: one rule for the decoder and what sits in its slot."""

import math

from torch import Tensor, nn

from stackexp.config.schema import TransformerConfig


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
