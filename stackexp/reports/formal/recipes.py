"""Name the recipes of runs on formal languages: the shipped configs and what differs from them."""

import functools
import shlex
from typing import Any

from stackexp.config.affects import flatten_config
from stackexp.config.compose import compose
from stackexp.errors import ConfigError
from stackexp.reports.formal.paper import COLUMNS
from stackexp.reports.formal.runs import FormalRun, Options, select_recipe
from stackexp.sweeps.grid import format_value

TASK_OPTIONS = ("data.task", "data.vocab_size", "data.output_vocab_size", "model.vocab_size", "model.output_vocab_size")
MAX_OVERRIDES = 4
"""A recipe that differs in more options from the shipped config is named by its run folder."""


def name_recipe(run: FormalRun) -> str:
    """Return the shipped config with the overrides that reproduce a run, or the run's config if that is shorter."""
    name = f"formal/{COLUMNS[run.column]}" + f"/{run.task}" * (run.column == "StackTrans")
    shipped = _compose_recipe(name)
    changes = find_differences(run.recipe, shipped) if shipped else {}
    if shipped is None or len(changes) > MAX_OVERRIDES:
        return f"{run.path}/config.yaml"
    return f"{name} {format_overrides(changes)}".strip()


@functools.cache
def _compose_recipe(name: str) -> Options | None:
    """Return the recipe of a shipped config, or None if this version does not ship it."""
    try:
        return select_recipe(flatten_config(compose([name])))
    except ConfigError:
        return None


def find_differences(recipe: Options, other: Options) -> dict[str, Any]:
    """Return the options of `recipe` that differ from `other`, except those of the task; None for missing ones."""
    keys = [key for key in {**other, **recipe} if key not in TASK_OPTIONS]
    return {key: recipe.get(key) for key in keys if recipe.get(key) != other.get(key)}


def format_overrides(options: dict[str, Any]) -> str:
    """Return options as overrides for the command line."""
    return " ".join(shlex.quote(f"{key}={format_value(value)}") for key, value in options.items())
