"""Find the size at which a model equals another one in parameters, FLOPs or memory."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import RunError
from stackexp.planning.cost import make_plan

MAX_SIZE = 1 << 20
QUANTITIES: dict[str, Callable[[ExperimentConfig], float]] = {
    "parameters": lambda config: make_plan(config).parameters,
    "flops": lambda config: make_plan(config).flops_per_token,
    "memory": lambda config: make_plan(config).peak,
}
TITLES = {"parameters": "parameters", "flops": "training FLOPs per token", "memory": "peak bytes per rank"}


@dataclass(frozen=True)
class Match:
    """The value of an option at which `quantity` is closest to `target`."""

    option: str
    value: int
    quantity: float
    target: float

    @property
    def mismatch(self) -> float:
        """The relative difference from the target."""
        return self.quantity / self.target - 1


def match_models(config: ExperimentConfig, to: ExperimentConfig, by: str, vary: str) -> Match:
    """Return the value of model.`vary` at which `config` is closest to `to`.

    Raises:
        RunError: `config` is too large even at the smallest value.
    """
    step = 2 * getattr(config.model, "num_heads", 1) if vary == "hidden_size" else 1  # RoPE requires an even head size
    target = QUANTITIES[by](to)

    def measure(units: int) -> float:
        return QUANTITIES[by](
            dataclasses.replace(config, model=dataclasses.replace(config.model, **{vary: units * step}))
        )

    if measure(1) > target:
        raise RunError(f"match: no model.{vary} makes the model as small as the other one in {by}; vary another option")
    low, high = 1, 2
    while measure(high) < target:
        low, high = high, 2 * high
        if high * step > MAX_SIZE:
            raise RunError(f"match: model.{vary} would have to exceed {MAX_SIZE}; vary another option")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if measure(middle) < target else (low, middle)
    closest = min((low, high), key=lambda units: abs(measure(units) - target))
    return Match(f"model.{vary}", closest * step, measure(closest), target)
