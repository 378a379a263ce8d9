"""The shipped configs: what they are for, and how large they are."""

import torch

from stackexp.config import registry
from stackexp.config.compose import compose, to_yaml
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.layers import find_config, get_group_folder, is_recipe, list_config_names, list_sections
from stackexp.config.yaml_files import list_yaml_names, read_purpose
from stackexp.tables import format_table


def format_catalog() -> str:
    """Return the shipped configs with parameters, tokens and purpose, then the recipes and the section choices."""
    names = list_config_names()
    rows = []
    for name in names:
        if not is_recipe(name):
            config = compose([name])
            parameters = build_on_meta(config).num_parameters()
            rows.append((name, shorten(parameters), shorten(config.total_tokens), read_purpose(find_config(name))))
    recipes = [(name, read_purpose(find_config(name))) for name in names if is_recipe(name)]
    return "\n\n".join(
        [
            format_table(rows, header=("config", "parameters", "tokens", "purpose"), align="<>><"),
            "Recipes to combine with a config, as in --config mine.yaml --config recipe/smollm:",
            format_table(recipes, header=("recipe", "purpose")),
            "Section choices, as in model.memory=queue:",
            format_table(section_choices(), header=("choice", "purpose")),
        ]
    )


def section_choices() -> list[tuple[str, str]]:
    """Return (`section=name`, purpose) of every file that a section can be set to."""
    folders = {section: get_group_folder(section) for section in list_sections()}
    return [
        (f"{s}={name}", read_purpose(f / f"{name}.yaml")) for s, f in folders.items() for name in list_yaml_names(f)
    ]


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
