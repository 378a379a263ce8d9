"""Find the size at which a model equals another one in parameters, FLOPs or memory."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from stackexp.config.compose import compose
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.fields import get_field
from stackexp.errors import ConfigError, RunError
from stackexp.planning.cost import make_plan

MAX_SIZE = 1 << 20
QUANTITIES: dict[str, Callable[[ExperimentConfig], float]] = {
    "parameters": lambda config: make_plan(config).parameters,
    "flops": lambda config: make_plan(config).flops_per_token,
    "memory": lambda config: make_plan(config).peak,
}
TITLES = {"parameters": "parameters", "flops": "training FLOPs per token", "memory": "peak bytes per rank"}


@dataclass(frozen=True)
class ClosestSize:
    """The value of an option at which `quantity` is closest to `target`."""

    option: str
    value: int
    quantity: float
    target: float

    @property
    def mismatch(self) -> float:
        """The relative difference from the target."""
        return self.quantity / self.target - 1


def match_models(names: list[str], overrides: list[str], to: ExperimentConfig, by: str, vary: str) -> ClosestSize:
    """Return the value of model.`vary` at which the config of these names and overrides is closest to `to`.

    The config is composed for each value, because other options may follow from it: `num_slots: ${model.num_layers}`.

    Raises:
        RunError: The model is too large even at the smallest value, or a value breaks a rule of the config.
    """
    config = compose(names, overrides)
    step, largest = 1, get_field(type(config.model), vary)[1].get("max", MAX_SIZE)
    if vary == "hidden_size":  # RoPE requires an even head size
        memory = getattr(config.model, "memory", None)
        step = math.lcm(2 * getattr(config.model, "num_heads", 1), getattr(memory, "num_heads", 1))
    target = QUANTITIES[by](to)

    @functools.cache
    def measure(units: int) -> float:
        try:
            return QUANTITIES[by](compose(names, [*overrides, f"model.{vary}={units * step}"]))
        except ConfigError as error:
            raise RunError(f"match: {error}; vary another option") from error

    if measure(1) > target:
        raise RunError(f"match: no model.{vary} makes the model as small as the other one in {by}; vary another option")
    low, high = 1, 2
    while measure(high) < target:
        low, high = high, 2 * high
        if high * step > largest:
            raise RunError(f"match: model.{vary} would have to exceed {largest}; vary another option")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if measure(middle) < target else (low, middle)
    closest = min((low, high), key=lambda units: abs(measure(units) - target))
    return ClosestSize(f"model.{vary}", closest * step, measure(closest), target)
