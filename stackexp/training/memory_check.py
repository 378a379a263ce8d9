"""A check, before anything slow happens, that the model and its optimizer state fit the machine at all."""

import sys
from pathlib import Path

import torch

from stackexp.config import registry
from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import RunError
from stackexp.training.trainer import find_device_type


def check_model_fits(config: ExperimentConfig) -> None:
    """Raise RunError if weights, gradients and Adam's state alone exceed the memory of the devices.

    They take 16 bytes per parameter, or 8 with precision bf16-true. Activations come on top; see `plan`.
    """
    with torch.device("meta"):
        parameters = registry.build("model", config.model).num_parameters()
    trainer, device_type = config.trainer, find_device_type(config)
    needed = parameters * (8 if trainer.precision == "bf16-true" else 16)
    if trainer.is_sharded:
        needed //= trainer.devices * trainer.num_nodes
    if device_type == "cpu":
        needed *= trainer.devices
    if needed > (free := _read_free_bytes(device_type)):
        raise RunError(
            f"the model has {parameters:,} parameters; weights, gradients and optimizer state need {needed / 1e9:,.1f} "
            f"GB, but {free / 1e9:,.1f} GB are free; use a smaller model, or trainer=fsdp on more devices (see `plan`)"
        )


def _read_free_bytes(device_type: str) -> int:
    if device_type == "cuda":
        return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else sys.maxsize  # reported later
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
