"""Expand the grid, axes, list and seeds of a sweep into labeled trial values."""

import itertools
import json
import re
from collections.abc import Iterable
from typing import Any

from stackexp.config.model import SYMBOLS
from stackexp.config.yaml_files import Leaf, read_value
from stackexp.errors import ConfigError
from stackexp.sweeps.schema import Space, SweepConfig

MAX_LABEL = 120

Values = dict[str, Any]
"""Searched config key -> value."""


def expand(config: SweepConfig) -> list[tuple[str, Values]]:
    """Return (label, values) of every trial: the product of grid, axes, list and seeds."""
    grid = [dict(zip(config.grid, values, strict=True)) for values in itertools.product(*config.grid.values())]
    seeds = [{"seed": seed} for seed in config.seeds]
    names = shorten_keys([*config.grid, *config.axes, *(key for entry in config.list for key in entry), "seed"])
    trials = []
    for entry, cell, point, seed in itertools.product(config.list or [{}], grid, _expand_axes(config), seeds or [{}]):
        listed = {key: value for key, value in entry.items() if key != "name"}
        searched = cell | point | seed
        words = [_format_word(entry["name"])] if "name" in entry else _format_values(listed, names)
        trials.append((_join_label([*words, *_format_values(searched, names)]), listed | searched))
    return trials


def _expand_axes(config: SweepConfig) -> list[Values]:
    """Return the center, and every value of each axis with the other axes at the center."""
    center = {key: config.center[key] for key in config.axes}
    points = [center] + [center | {key: value} for key, values in config.axes.items() for value in values]
    return [point for i, point in enumerate(points) if point not in points[:i]]


def list_extremes(space: dict[str, Space]) -> list[Values]:
    """Return the points that vary one key at a time over its choices, or over the ends of its range."""
    if not space:
        return []
    choices = {key: s.values or [int(x) if s.int else x for x in (s.low or 0, s.high or 0)] for key, s in space.items()}
    first = {key: values[0] for key, values in choices.items()}
    return [first, *(first | {key: value} for key, values in choices.items() for value in values[1:])]


def format_label(values: Values) -> str:
    """Return a readable trial name, such as `H=4-S=24`."""
    return _join_label(_format_values(values, shorten_keys(values)))


def shorten_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return key -> the paper's symbol, or the shortest ending that is unique among the keys."""
    keys = list(dict.fromkeys(keys))
    plain = [key for key in keys if key not in SYMBOLS]
    return {key: SYMBOLS.get(key) or _shortest_ending(key, plain) for key in keys}


def _shortest_ending(key: str, keys: list[str]) -> str:
    parts = key.split(".")
    endings = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
    return next((end for end in endings if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key)


def format_value(value: Any) -> str:
    """Return a value as override text that parses back to the same value."""
    if isinstance(value, str):
        try:
            if read_value(value, "") == Leaf(value, ""):
                return value
        except ConfigError:
            pass
    return json.dumps(value, default=str)


def _format_values(values: Values, names: dict[str, str]) -> list[str]:
    return [f"{names[key]}={_format_word(value)}" for key, value in values.items()]


def _format_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str).replace("null", "none")


def _join_label(words: list[str]) -> str:
    return re.sub(r"[^\w.+=-]+", "_", "-".join(words) or "trial")[:MAX_LABEL]
