"""The controls that a memory is compared with: Transformers of equal cost, and memories without a mechanism."""

from pathlib import Path
from typing import Any

import yaml

from stackexp.config.affects import AFFECT_RESULTS, remove_defaults
from stackexp.config.compose import build_dataclass, compose
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.layers import get_group_folder, list_config_names, list_options, read_overrides
from stackexp.config.memory import StackMemoryConfig
from stackexp.config.yaml_files import list_yaml_names, read_file
from stackexp.errors import ConfigError
from stackexp.files import hash_values, write_atomically
from stackexp.sweeps.question import VerdictConfig

QUESTION = "question.yaml"
PLAIN, PARAMETERS, FLOPS, STREAM = "transformer", "transformer_wide", "transformer_flops", "wider_stream"
ADAPTER, SCALE = "adapter", "residual_scale"
FACTOR = 4
"""The learning rate is tuned from that of the config divided by this to that times this."""
TRIALS = 6
CLOSE = 0.005
"""A control whose parameters or FLOPs differ by more than this share of the model's is named."""


def build_question(
    names: list[str], overrides: list[str], memory: str, effect: float = VerdictConfig.effect
) -> dict[str, Any]:
    """Return the contents of a verdict's file: a memory, its controls, and the tuning of each.

    `memory` is a choice of model.memory, or the kind of the config's own memory. The Transformers equal the model with
    the memory in parameters and in training FLOPs per token by wider feed-forward layers, and in FLOPs by a wider
    residual stream; a difference that remains is printed. The adapter is the stack itself with one slot that it always
    fills; for other memories, `adapter`.
    """
    from stackexp.planning.cost import QUANTITIES, match_models

    chosen, target = _compose_target(names, overrides, memory)
    plain = [*overrides, "model.memory=null"]
    arms: dict[str, dict[str, Any]] = {}
    for arm, by, vary in (
        (PARAMETERS, "parameters", "intermediate_size"),
        (FLOPS, "flops", "intermediate_size"),
        (STREAM, "flops", "hidden_size"),
    ):
        value, quantity = match_models(names, plain, QUANTITIES[by](target), by, vary)
        arms[arm] = {"model.memory": None, f"model.{vary}": value}
        if abs(excess := quantity / QUANTITIES[by](target) - 1) > CLOSE:
            print(f"{arm}: {excess:+.1%} {by} of the model with {memory}; no model.{vary} is closer", flush=True)
    adapter = {"model.memory": ADAPTER}
    if isinstance(stack := target.model.memory, StackMemoryConfig):
        adapter = chosen | {f"model.memory.{name}": value for name, value in stack.build_adapter().items()}
    arms |= {PLAIN: {"model.memory": None}, ADAPTER: adapter, SCALE: {"model.memory": SCALE}, memory: chosen}
    lr = target.optimizer.lr
    space: dict[str, Any] = {"optimizer.lr": {"low": lr / FACTOR, "high": lr * FACTOR, "log": True}}
    space["optimizer.memory_lr"] = {"low": lr, "high": lr * FACTOR**3, "log": True, "arms": [SCALE]}
    return {
        "config": names,
        "overrides": overrides,
        "baseline": PARAMETERS,
        "arms": [{"name": name} | values for name, values in arms.items()],
        "effect": effect,
        "tuning": {"trials": TRIALS, "space": space},
        "made_from": _hash_target(target),
    }


def _compose_target(names: list[str], overrides: list[str], memory: str) -> tuple[dict[str, Any], ExperimentConfig]:
    """Return the option that chooses the memory, and the config with it.

    There is no such option for the config's own memory, such as that of a plugin.
    """
    own = None
    if memory not in list_yaml_names(get_group_folder("model.memory")):
        own = getattr(compose(names, overrides).model, "memory", None)
    chosen = {} if own is not None and own.kind == memory else {"model.memory": memory}
    return chosen, compose(names, [*overrides, *(f"{key}={value}" for key, value in chosen.items())])


def _hash_target(target: ExperimentConfig) -> str:
    """Return a hash of the options that controls and search follow from."""
    model, lr = remove_defaults(target, AFFECT_RESULTS).get("model"), target.optimizer.lr
    return hash_values({"model": model, "lr": lr, "context_length": target.data.context_length})[:8]


def write_question(names: list[str], overrides: list[str], memory: str, effect: float | None = None) -> Path:
    """Write the verdict's file for a memory with its controls and return its path. An existing file stays as it is.

    `effect` is by default that of the file, in a new file 0.01. Raises ConfigError if an arm or the search sets an
    option of `overrides`, or if the existing file is for another config, for other overrides, another effect or
    another working folder.
    """
    root = Path(compose(names, overrides).logging.root)
    name = "-".join(["verdict", *(Path(config).stem for config in names), memory])
    path = root / name / QUESTION
    if path.is_file():
        existing = build_dataclass(VerdictConfig, read_file(path)[1])
        if existing.config != names:
            raise ConfigError(f"{path}: is for the config {existing.config}; move the folder elsewhere")
        if existing.overrides != overrides:
            raise ConfigError(f"{path}: has other overrides; change them there, or move the folder elsewhere")
        if effect not in (None, existing.effect):
            raise ConfigError(f"{path}: has effect: {existing.effect:g}; change it there, or move the folder elsewhere")
        files = [Path(name) for name in names if name not in list_config_names()]
        if existing.folder and any(Path(existing.folder, file).resolve() != file.resolve() for file in files):
            raise ConfigError(f"{path}: reads {files[0]} in the folder {existing.folder}; change `folder` there")
        if existing.made_from not in (None, _hash_target(_compose_target(names, overrides, memory)[1])):
            raise ConfigError(
                f"{path}: its controls are those of an earlier {', '.join(names)}; undo the change, or move the folder "
                "elsewhere"
            )
        return path
    tree = build_question(names, overrides, memory, effect or VerdictConfig.effect)
    chosen = {"seed", *tree["tuning"]["space"], *(option for arm in tree["arms"] for option in list_options(arm))}
    for key, _, _, origin in read_overrides(overrides):
        if key in chosen:
            raise ConfigError(f"{key} is chosen by the verdict; set it in a config of your own, for --config", origin)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, yaml.safe_dump({"name": name, "folder": str(Path.cwd())} | tree, sort_keys=False))
    print(f"wrote {path}: the memory, its controls and the search; edit it, or run as it is", flush=True)
    return path
