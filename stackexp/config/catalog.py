"""The shipped configs and what each is for. Imports no torch."""

from stackexp.config.layers import find_config, get_group_folder, is_recipe, list_config_names, list_sections
from stackexp.config.yaml_files import list_yaml_names, read_purpose
from stackexp.tables import format_table

INTRODUCTIONS = {  # kind of entry -> the line above its table
    "config": "",
    "recipe": "Recipes, as in --config mine.yaml --config recipe/smollm:\n\n",
    "choice": "Section choices, as in model.memory=queue:\n\n",
}


def list_catalog() -> list[tuple[str, str, str]]:
    """Return (kind, name, purpose) of the shipped configs, of the recipes, and of every file for a section."""
    names = list_config_names()
    kinds = {name: "recipe" if is_recipe(name) else "config" for name in names}
    entries = [(kind, name, read_purpose(find_config(name))) for name, kind in kinds.items()]
    for section in list_sections():
        folder = get_group_folder(section)
        entries += [
            ("choice", f"{section}={name}", read_purpose(folder / f"{name}.yaml")) for name in list_yaml_names(folder)
        ]
    return entries


def format_catalog() -> str:
    """Return one table for each kind of entry."""
    entries, parts = list_catalog(), []
    for kind, introduction in INTRODUCTIONS.items():
        rows = [(name, purpose) for other, name, purpose in entries if other == kind]
        parts.append(introduction + format_table(rows, header=(kind, "purpose")))
    return "\n\n".join([*parts, "`configs show NAME` prints a resolved config with its size and cost."])
