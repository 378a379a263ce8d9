"""The shipped configs and what each is for. Imports no torch."""

from stackexp.config.layers import find_config, get_group_folder, is_recipe, list_config_names, list_sections
from stackexp.config.yaml_files import list_yaml_names, read_purpose
from stackexp.tables import format_table


def format_catalog(max_width: int | None = None) -> str:
    """Return the shipped configs, the recipes and the section choices, each with its purpose."""

    def format_rows(title: str, rows: list[tuple[str, str]]) -> str:
        return format_table(rows, header=(title, "purpose"), max_width=max_width)

    names = list_config_names()
    configs = [(name, read_purpose(find_config(name))) for name in names if not is_recipe(name)]
    recipes = [(name, read_purpose(find_config(name))) for name in names if is_recipe(name)]
    return "\n\n".join(
        [
            format_rows("config", configs),
            "Recipes, as in --config mine.yaml --config recipe/smollm:",
            format_rows("recipe", recipes),
            "Section choices, as in model.memory=queue:",
            format_rows("choice", section_choices()),
            "`configs show NAME` prints a resolved config with its size and cost.",
        ]
    )


def section_choices() -> list[tuple[str, str]]:
    """Return (`section=name`, purpose) of every file that a section can be set to."""
    folders = {section: get_group_folder(section) for section in list_sections()}
    return [
        (f"{s}={name}", read_purpose(f / f"{name}.yaml")) for s, f in folders.items() for name in list_yaml_names(f)
    ]
