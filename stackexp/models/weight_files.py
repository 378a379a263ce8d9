"""Safetensors files with the weights of one checkpoint, or the mean of several, and the config as metadata."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stackexp.config.compose import to_yaml
from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import RunError
from stackexp.files import make_temporary_path, sync_file
from stackexp.models.checkpoints import CONFIG_KEY, is_folder, load_state, read_weights


def average_checkpoints(paths: Sequence[Path], target: Path, config: ExperimentConfig) -> int:
    """Write the mean of the weights of checkpoints to one safetensors file; return the tensor count.

    Sums are in float64; a mean has the dtype of its weights.
    """
    sums: dict[str, Tensor] = {}
    for path in paths:
        weights = read_weights(path)
        sums = {name: sums.get(name, 0) + tensor.double() for name, tensor in weights.items()}
    means = {name: (total / len(paths)).to(weights[name].dtype) for name, total in sums.items()}
    return write_weights(means, target, to_yaml(config))


def write_weights(tensors: dict[str, Tensor], target: Path, config: str) -> int:
    """Write tensors and the YAML of a config to one safetensors file, atomically; return the tensor count.

    Raises RunError if the file cannot be written.
    """
    partial = make_temporary_path(target)
    try:
        save_file(tensors, partial, metadata={"format": "pt", CONFIG_KEY: config})
        with open(partial, "r+b") as file:
            _sort_metadata(file)
            sync_file(file)
        os.replace(partial, target)
    except SafetensorError as error:
        raise RunError(f"{target}: cannot be written ({error}); check the free space and the permissions") from error
    finally:
        partial.unlink(missing_ok=True)
    return len(tensors)


def _sort_metadata(file: IO[bytes]) -> None:
    """Sort the metadata in the header, so that equal weights give equal files; safetensors writes them in any order."""
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    assert len(text) <= length, "only the order changes"
    file.seek(8)
    file.write(text.ljust(length))


def read_config(path: Path) -> dict[str, Any]:
    """Return the config that a checkpoint or a safetensors file stores; empty for a file of another program."""
    if is_folder(path):
        return load_state(path)["stackexp"]["config"]
    with safe_open(path, "pt") as file:
        return yaml.safe_load((file.metadata() or {}).get(CONFIG_KEY, "{}"))
