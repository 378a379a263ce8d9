"""`stackexp configs list` and `configs show`: what is shipped, and how large it is."""

import torch

from stackexp.config import registry
from stackexp.config.compose import compose, to_yaml
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.layers import config_names, find_config, group_folder, is_recipe, sections
from stackexp.config.yaml_files import names_in, purpose
from stackexp.reports.tables import table


def show_list() -> int:
    """Print every shipped config with parameters, tokens and purpose, then the recipes and the sections' choices."""
    rows = [("config", "parameters", "tokens", "what it is for")]
    recipes = [(name, purpose(find_config(name))) for name in config_names() if is_recipe(name)]
    for name in config_names():
        if is_recipe(name):
            continue
        config = compose([name])
        parameters = build_on_meta(config).num_parameters()
        rows.append((name, short(parameters), short(config.total_tokens), purpose(find_config(name))))
    print(table(rows, align="<>><"))
    print("\nRecipes, to lay on top of a config, as in --config mine.yaml --config recipe/smollm:\n")
    print(table([("recipe", "what it is for"), *recipes]))
    print("\nChoices for a section, as in model.memory=queue:\n")
    print(table([("choice", "what it is for"), *choices()]))
    return 0


def choices() -> list[tuple[str, str]]:
    """(`section=name`, purpose) of every group file."""
    folders = {section: group_folder(section) for section in sections()}
    return [(f"{s}={name}", purpose(f / f"{name}.yaml")) for s, f in folders.items() for name in names_in(f)]


def show(config: ExperimentConfig) -> int:
    """Print a resolved config, then its size and cost."""
    model = build_on_meta(config)
    backbone, memory = model.num_parameters(memory=False), model.num_parameters(memory=True)
    per_token = model.flops_per_token(config.data.context_length)
    about = "about " if config.data.lengths_vary else ""
    facts = [
        ("parameters", f"{backbone + memory:,} = {backbone:,} backbone + {memory:,} memory"),
        ("tokens", f"{config.total_tokens:,} ({short(config.total_tokens)})"),
        ("steps", f"{config.trainer.max_steps:,} of {about}{config.data.global_batch_tokens:,} tokens"),
        ("FLOPs", f"{per_token:.3e} per token, {per_token * config.total_tokens:.3e} in all"),
    ]
    print(f"{to_yaml(config)}\n{table(facts)}")
    return 0


def build_on_meta(config: ExperimentConfig) -> torch.nn.Module:
    """The model of a config without its weights: shapes only, no memory."""
    with torch.device("meta"):
        return registry.build("model", config.model)


def short(number: float) -> str:
    """1234567 -> 1.2M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
