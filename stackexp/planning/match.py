"""Find the size at which a model equals another one in parameters, FLOPs or memory."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from stackexp.config.experiment import ExperimentConfig
from stackexp.config.validation import get_field
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
        RunError: `config` is too large even at the smallest value, or the value breaks a rule of the model.
    """
    step, largest = 1, get_field(type(config.model), vary)[1].get("max", MAX_SIZE)
    if vary == "hidden_size":  # RoPE requires an even head size
        memory = getattr(config.model, "memory", None)
        step = math.lcm(2 * getattr(config.model, "num_heads", 1), getattr(memory, "num_heads", 1))
    target = QUANTITIES[by](to)

    def build(units: int) -> ExperimentConfig:
        return dataclasses.replace(config, model=dataclasses.replace(config.model, **{vary: units * step}))

    def measure(units: int) -> float:
        return QUANTITIES[by](build(units))

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
    model = build(closest).model
    sections = [(model, ()), (getattr(model, "memory", None), (model,))]
    errors = [getattr(section, "find_errors", lambda *_: ())(*arguments) for section, arguments in sections]
    for name, message in itertools.chain(*errors):
        raise RunError(f"match: model.{vary}={closest * step}: {name}: {message}; vary another option")
    return Match(f"model.{vary}", closest * step, measure(closest), target)
