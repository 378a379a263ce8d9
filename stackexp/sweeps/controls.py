"""The controls that a memory is compared with: Transformers of equal cost, and memories without a mechanism."""

from typing import Any

from stackexp.config.compose import compose

PLAIN, PARAMETERS, FLOPS, STREAM = "transformer", "transformer_wide", "transformer_flops", "wider_stream"
ADAPTER, SCALE = "adapter", "residual_scale"
FACTOR = 4
"""The learning rate is tuned from that of the config divided by this to that times this."""
TRIALS = 6


def build_question(names: list[str], overrides: list[str], memory: str) -> dict[str, Any]:
    """Return the contents of a verdict's file: a memory, its controls, and the tuning of each.

    The Transformers equal the model with the memory in parameters and in training FLOPs per token by wider feed-forward
    layers, and in FLOPs by a wider residual stream.
    """
    from stackexp.planning.cost import QUANTITIES, match_models

    target = compose(names, [*overrides, f"model.memory={memory}"])
    plain = [*overrides, "model.memory=null"]
    arms: dict[str, dict[str, Any]] = {}
    for arm, by, vary in (
        (PARAMETERS, "parameters", "intermediate_size"),
        (FLOPS, "flops", "intermediate_size"),
        (STREAM, "flops", "hidden_size"),
    ):
        value, _ = match_models(names, plain, QUANTITIES[by](target), by, vary)
        arms[arm] = {"model.memory": None, f"model.{vary}": value}
    arms |= {PLAIN: {"model.memory": None}, ADAPTER: {"model.memory": ADAPTER}, SCALE: {"model.memory": SCALE}}
    arms |= {memory: {"model.memory": memory}}
    lr = target.optimizer.lr
    space: dict[str, Any] = {"optimizer.lr": {"low": lr / FACTOR, "high": lr * FACTOR, "log": True}}
    space["optimizer.memory_lr"] = {"low": lr, "high": lr * FACTOR**3, "log": True, "arms": [SCALE]}
    return {
        "config": names,
        "overrides": overrides,
        "baseline": PARAMETERS,
        "arms": [{"name": name} | values for name, values in arms.items()],
        "tuning": {"trials": TRIALS, "space": space},
    }
