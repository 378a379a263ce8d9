"""Name and describe the recipes of runs on formal languages: the shipped configs and what differs from them."""

import functools
import json
import shlex
from typing import Any

from stackexp.config.affects import flatten_config
from stackexp.config.compose import compose
from stackexp.errors import ConfigError
from stackexp.reports.formal.paper import DEPTH
from stackexp.reports.formal.runs import FormalRun, Options, select_recipe
from stackexp.sweeps.grid import format_value

SHIPPED = {
    "LSTM": "formal/lstm",
    "StackRNN": "formal/stack_rnn",
    "StackAttn": "formal/stack_attention",
    "Transformer": "formal/transformer",
    "StackTrans": "formal/stacktrans",
    DEPTH: "formal/stacktrans-depth",
}
"""Column -> shipped config; StackTrans has one for each task in a folder of that name."""

TASK_OPTIONS = ("data.task", "data.vocab_size", "data.output_vocab_size", "model.vocab_size", "model.output_vocab_size")
MAX_OVERRIDES = 4
"""A recipe that differs in more options from the shipped config is named by its run folder."""


def name_recipe(run: FormalRun) -> str:
    """Return the shipped config with the overrides that reproduce a run, or the run's config if that is shorter."""
    name = f"{SHIPPED[run.column]}/{run.task}" if run.column == "StackTrans" else SHIPPED[run.column]
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


def hash_without_task(recipe: Options) -> str:
    """Return text that is equal for recipes that differ only in their task."""
    return json.dumps({k: v for k, v in recipe.items() if k not in TASK_OPTIONS}, sort_keys=True, default=str)


def format_curriculum(config: Options) -> str:
    """Describe how the longest training string grows, and how many batches have it."""
    longest = config.get("data.longest_fraction")
    share = f", longest in {longest:.0%} of the batches" if longest else ""
    if not config["data.curriculum_steps"]:
        return f"none (1..{config['data.max_length']}){share}"
    start, end = config["data.curriculum_start"], config["data.max_length"]
    return f"{start} to {end} in {config['data.curriculum_steps']:,} steps{share}"


def format_feedback(config: Options) -> str:
    """Describe the feedback of the memory."""
    if not config.get("model.memory.feedback"):
        return "no"
    units = config.get("model.memory.feedback_hidden_size")
    return config.get("model.memory.feedback_activation", "identity") + (f", {units} units" if units else "")


def format_slots(config: Options) -> str:
    """Return the slots of the stack in training, and in tests if they differ."""
    train, test = config.get("model.memory.num_slots"), config.get("model.memory.eval_num_slots")
    return f"{train}" if test in (None, train) else f"{train}, test {test}"
