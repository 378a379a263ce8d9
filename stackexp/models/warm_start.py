"""Start a run from given weights: find and verify their source, compare it with the model, load them."""

import logging
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stackexp.config import registry
from stackexp.config.affects import flatten_config, get_effect
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.yaml_files import flatten
from stackexp.data.path_checks import check_weights
from stackexp.errors import RunError
from stackexp.files import compute_sha256
from stackexp.models import checkpoints
from stackexp.models.memories.base import Memory
from stackexp.models.sharding import full_parameters
from stackexp.runs import MANIFEST, RunFolder, split_path

log = logging.getLogger(__name__)
INERT_OPTIONS = (
    *("embedding_std", "init", "init_std", "memory.init_std"),  # of other initial weights
    *("memory.action_noise", "memory.action_noise_warmup_steps", "memory.entropy_weight"),
    *("memory.checkpoint_every_layers", "memory.state_dtype", "residual_dtype"),  # rounding
    *("eval_num_slots", "memory.eval_num_slots"),  # chosen for each evaluation
)
"""Model options that leave the outputs of given weights the same, apart from rounding. Others are warned about."""


@dataclass(frozen=True)
class WarmStart:
    """The requested start of a new run (section `warm_start`): tensors to load from a file, and how memories start."""

    memory: str
    path: Path | None = None  # a checkpoint or a safetensors file
    step: int | None = None
    sha256: str | None = None  # of the file, or of a checkpoint's manifest, which holds the hash of each file
    names: tuple[str, ...] = ()

    def apply(self, model: nn.Module) -> None:
        """Set the weights of a model, sharded or not, after its usual initialization. Every rank must call this."""
        if self.memory == "identity":
            init_identity(model)
        if self.path is not None:
            checkpoints.load_named_weights(model, self.path, self.names)

    def to_dict(self) -> dict[str, Any]:
        """Return the origin of the weights for environment.json."""
        return {"path": str(self.path), "step": self.step, "sha256": self.sha256}


def init_identity(model: nn.Module) -> None:
    """Set every memory of a model to the identity. Raises RunError for memories that have no such start."""
    for memory in getattr(model, "memories", ()):
        with full_parameters(memory, keep_values=True):
            memory.init_identity()


def prepare_warm_start(config: ExperimentConfig) -> WarmStart | None:
    """Check what `warm_start` requests before anything is trained or written; None if it requests nothing.

    Raises RunError if there are no weights, they are damaged, or they do not fit the model; see `match_tensors`.
    """
    section = config.warm_start
    if section.weights is None and section.memory == "default":
        return None
    with torch.device("meta"):
        model = registry.build("model", config.model)
    if section.memory == "identity":
        init_identity(model)
    if section.weights is None:
        return WarmStart(section.memory)
    path = find_weights(Path(section.weights))
    is_file = path.suffix == checkpoints.WEIGHTS
    stored = checkpoints.read_shapes(path)
    state = {} if is_file else checkpoints.load_state(path)
    warn_about_options(path, config)
    names = match_tensors(path, stored, model, section.skip)
    if section.memory == "identity" and (found := [name for name in names if name in _list_memory_tensors(model)]):
        raise RunError(
            f"{path}: warm_start.memory is identity, but the weights include {found[0]}; use default, or add memory to "
            "warm_start.skip"
        )
    hashed = path if is_file else split_path(path)[0] / MANIFEST
    return WarmStart(section.memory, path, state.get("global_step"), compute_sha256(hashed), tuple(names))


def find_weights(path: Path) -> Path:
    """Return the file or checkpoint at `path`, or the last checkpoint of the run at `path`. Raises RunError."""
    check_weights(path)
    if RunFolder(path).config.is_file():
        return checkpoints.find_checkpoint(RunFolder(path), "last")
    if path.is_file() and path.suffix != checkpoints.WEIGHTS:
        raise RunError(f"warm_start.weights: {path}: must end in .safetensors, or be a folder; see `checkpoint import`")
    if (path / "config.json").is_file():
        command = f"checkpoint import --from {shlex.quote(str(path))} --to init.safetensors"
        raise RunError(f"warm_start.weights: {path}: a Hugging Face folder; convert it with `{command}`")
    return path


def match_tensors(path: Path, stored: Mapping[str, torch.Size], model: nn.Module, skip: Collection[str]) -> list[str]:
    """Return the names of the stored tensors to load into the model, and log the others.

    Tensors that match `skip` and tensors of a memory that are not stored keep their initialization; stored tensors that
    the model lacks are dropped. Raises RunError if any other tensor is not stored, or a shape differs.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for part in skip:
        if not any(_matches(name, [part]) for name in shapes.keys() | stored.keys()):
            raise RunError(f"warm_start.skip: {part!r} matches no tensor; the model has {', '.join(_group(shapes))}")
    wanted = {name: shape for name, shape in shapes.items() if not _matches(name, skip)}
    missing = sorted(wanted.keys() - stored.keys() - _list_memory_tensors(model))
    if missing:
        raise RunError(
            f"{path}: has no {', '.join(_group(missing))}; use the model options of these weights, or add the names to "
            "warm_start.skip"
        )
    names = [name for name in wanted if name in stored]
    advice = "use the model options of these weights, or add the name to warm_start.skip"
    found, expected = ({name: shapes[name] for name in names} for shapes in (stored, wanted))
    checkpoints.check_shapes(path, found, expected, advice)
    new, dropped = _group(shapes.keys() - set(names)), _group(stored.keys() - shapes.keys())
    lists = [("initialized as usual", new), ("dropped", dropped)]
    rest = "".join(f"; {title}: {', '.join(group)}" for title, group in lists if group)
    log.info("warm_start.weights: %d tensors from %s%s", len(names), path, rest)
    return names


def _matches(name: str, parts: Collection[str]) -> bool:
    """Return True if one of `parts` is a tensor's name or whole parts of it: memory, layers.0, layers.*.memory.up.

    "memory" includes the memory after the attention (`site: each_sublayer`).
    """
    names = {name, name.replace(".attention_memory.", ".memory.")}
    return any(fnmatchcase(f".{name}.", f"*.{part}.*") for name in names for part in parts)


def _group(names: Iterable[str]) -> list[str]:
    """Return the names sorted, those that differ in the layer only as one: layers.*.memory.up."""
    return sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})


def _list_memory_tensors(model: nn.Module) -> set[str]:
    memories = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Memory))
    return {name for name in model.state_dict() if name.startswith(memories)}


def warn_about_options(path: Path, config: ExperimentConfig) -> None:
    """Warn about each model option that changes the outputs of the weights and differs from their own config."""
    before, now = flatten(checkpoints.read_config(path)), flatten_config(config)
    inert = {f"model.{name}" for name in INERT_OPTIONS}
    for key, value in now.items():
        is_architecture = key.startswith("model.") and key not in inert and get_effect(now, key) == "training"
        if is_architecture and before.get(key, value) != value:
            log.warning("%s: trained with %s=%s, but the config has %s", path, key, before[key], value)
