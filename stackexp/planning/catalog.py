"""The size and cost of a config."""

import torch

from stackexp.config import registry
from stackexp.config.compose import to_yaml
from stackexp.config.experiment import ExperimentConfig
from stackexp.tables import format_table


def describe_config(config: ExperimentConfig) -> str:
    """Return a resolved config as YAML, followed by its size and cost."""
    model = build_on_meta(config)
    backbone, memory = model.num_parameters(memory=False), model.num_parameters(memory=True)
    per_token = model.flops_per_token(config.data.context_length)
    about = "about " if config.data.lengths_vary else ""
    rows = [
        ("parameters", f"{backbone + memory:,} = {backbone:,} backbone + {memory:,} memory"),
        ("tokens", f"{config.total_tokens:,} ({shorten(config.total_tokens)})"),
        ("steps", f"{config.trainer.max_steps:,} of {about}{config.data.global_batch_tokens:,} tokens"),
        ("FLOPs", f"{per_token:.3e} per token, {per_token * config.total_tokens:.3e} in total"),
    ]
    return f"{to_yaml(config)}\n{format_table(rows)}"


def build_on_meta(config: ExperimentConfig) -> torch.nn.Module:
    """Build the model of a config on the meta device: shapes without storage."""
    with torch.device("meta"):
        return registry.build("model", config.model)


def shorten(number: float) -> str:
    """Format a count with one decimal and a unit: 1234567 -> 1.2M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
