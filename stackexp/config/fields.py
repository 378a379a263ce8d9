"""Fields of the config schema: default, limits, effect, and the validation of a filled schema."""

import copy
import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, Union

from stackexp.errors import ConfigError, suggest_name

Affects = Literal["training", "continuation", "evaluation", "location", "execution", "logging"]
"""The effects of an option:

training      the trained weights; a resumed run must keep it
continuation  the trained weights, from the current step on (how long to train, what to do about loss spikes)
evaluation    what is measured, when and on what
location      where data are read from; the data themselves are compared by their hashes
execution     where and how fast a run executes, what it keeps on disk; results differ by rounding at most
logging       what is shown and recorded

Only the options of `training` must not differ on resume; the last two do not identify a trial (see `affects.py`).
"""

Errors = Iterator[tuple[str, str]]
"""Pairs (key, message), as `find_errors` of a config section yields them."""


def option(
    default: Any,
    *,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Collection[str] | None = None,
    affects: Affects = "training",
    changes_scores: bool = False,
) -> Any:
    """Define a field of a config dataclass; a list, dict or dataclass as default is copied for each instance.

    Numbers are valid from `min` to `max`, strictly between `above` and `below`. `choices` are the valid names, where
    `Literal` cannot list them. Set `changes_scores` if the option changes the scores of fixed weights on a fixed
    evaluation set. Options of the section `model` that affect training do so anyway.
    """
    limits = {"min": min, "max": max, "above": above, "below": below, "choices": choices}
    metadata = {name: limit for name, limit in limits.items() if limit is not None}
    metadata |= {"affects": affects, "changes_scores": changes_scores}
    if default.__hash__ is None:  # mutable
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


LARGEST_INTEGER, LARGEST_FLOAT = 2**63 - 1, 1e30
"""The largest numbers of any option: int64 can hold the integer, float32 the other."""

Origins = dict[str, str]
"""Full key -> where its value was written (see `yaml_files.Leaf`). Keys left at their default are missing."""


def config_error(origin: str, key: str, message: str) -> ConfigError:
    """Return the error `origin: key: message`; empty parts are omitted."""
    return ConfigError(f"{key}: {message}" if key else message, origin)


def wrong_value_error(origin: str, key: str, hint: Any, metadata: Mapping[str, Any], value: Any) -> ConfigError:
    """Return the error for a value that a field does not accept, with the closest valid value."""
    if value is None or value == "":
        found = "null" if value is None else "empty text"
    else:
        found = "a mapping" if isinstance(value, dict) else repr(value)
    types = [hint, *typing.get_args(hint)] if typing.get_origin(hint) is Union else [hint]
    choices = [_spell(choice) for t in types if typing.get_origin(t) is Literal for choice in typing.get_args(t)]
    choices += metadata.get("choices", [])
    suggestion = suggest_name(value, choices) if isinstance(value, str) else ""
    if value in ("true", "false") and value in choices:
        suggestion = f"; write {value} without quotes"
    if int in types and isinstance(value, float) and value.is_integer():
        suggestion = f"; write {int(value)}"
    return config_error(origin, key, f"expected {describe_type(hint, metadata)}, found {found}{suggestion}")


def describe_type(hint: Any, metadata: Mapping[str, Any]) -> str:
    """Return a field's type and limits in words: `an integer >= 1`, `one of depth, time, token_major`."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        options = [t for t in typing.get_args(hint) if t is not type(None)]
        return " or ".join([*(describe_type(t, metadata) for t in options), "null"])
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(_spell, typing.get_args(hint)))}"
    if dataclasses.is_dataclass(hint):
        return f"the keys {', '.join(field.name for field in dataclasses.fields(hint))}"
    if "choices" in metadata:
        return f"one of {', '.join(metadata['choices'])}"
    words: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    words |= {list[int]: "a list of integers", list[float]: "a list of numbers"}
    word = words.get(hint) or {list: "a list", dict: "a mapping"}.get(typing.get_origin(hint), str(hint))
    low, high = metadata.get("min"), metadata.get("max")
    if low is not None and high is not None:
        return f"{word} from {low} to {high}"
    signs = {"min": ">=", "above": ">", "max": "<=", "below": "<"}
    limits = " and ".join(f"{sign} {metadata[name]}" for name, sign in signs.items() if name in metadata)
    return f"{word} {limits}" if limits else word


def _spell(choice: str | bool) -> str:
    return choice if isinstance(choice, str) else str(choice).lower()  # as in YAML


def find_dataclass(hint: Any) -> Any:
    """Return the dataclass inside a type such as `Optional[Options]` or `dict[str, Options]`, or None."""
    return next((t for t in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(t)), None)


_get_type_hints: Any = functools.cache(typing.get_type_hints)


def get_field(cls: type, name: str) -> tuple[Any, Mapping[str, Any]]:
    """Return the type and the metadata of a dataclass field."""
    metadata: Mapping[str, Any] = next((field.metadata for field in dataclasses.fields(cls) if field.name == name), {})
    return _get_type_hints(cls)[name], metadata


def validate(config: Any, origins: Origins, arguments: Mapping[str, tuple] = types.MappingProxyType({})) -> None:
    """Validate any dataclass: first the limits of single values, then `find_errors` of every section.

    `arguments` has the arguments of `find_errors` by key prefix. Raises ConfigError for the first error.
    """
    sections = list(_iterate_sections(config))
    for path, section in sections:
        for field in dataclasses.fields(section):
            value, key = getattr(section, field.name), f"{path}{field.name}"
            limit = LARGEST_INTEGER if isinstance(value, int) else LARGEST_FLOAT
            if isinstance(value, int | float) and limit < abs(value) != math.inf:
                message = f"expected a number of at most {limit:g}, found {value}"
                raise config_error(origins.get(key, ""), key, message)
            if not _is_valid(value, field.metadata):
                raise wrong_value_error(origins.get(key, ""), key, *get_field(type(section), field.name), value)
    keys = {path + field.name for path, section in sections for field in dataclasses.fields(section)}
    for path, section in sections:
        find_errors = getattr(section, "find_errors", lambda *_: ())
        for key, message in find_errors(*arguments.get(path, ())):
            origin = origins.get(path + key, "")
            named = [k for k in _find_named_keys(message, path, keys) if origins.get(k) and origins[k] != origin]
            others = "; ".join(f"{k}: {origins[k]}" for k in named)
            raise config_error(origin, path + key, f"{message} ({others})" if others else message)


def _iterate_sections(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a section and all sections inside it, each with its key prefix, such as `model.memory.`."""
    yield path, section
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        inner = {f"{field.name}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {}
        for name, item in (inner or {field.name: value}).items():
            if dataclasses.is_dataclass(item):
                yield from _iterate_sections(item, f"{path}{name}.")


def _is_valid(value: Any, metadata: Mapping[str, Any]) -> bool:
    if isinstance(value, list | dict):
        items = value.values() if isinstance(value, dict) else value
        return all(_is_valid(item, metadata) for item in items if isinstance(item, int | float))
    if "choices" in metadata:
        return value is None or value in metadata["choices"]
    if not isinstance(value, int | float):
        return True
    low, high = metadata.get("min", -math.inf), metadata.get("max", math.inf)
    above, below = metadata.get("above", -math.inf), metadata.get("below", math.inf)
    is_finite = isinstance(value, int) or math.isfinite(value)
    return is_finite and low <= value <= high and above < value < below


def _find_named_keys(message: str, path: str, keys: set[str]) -> list[str]:
    """Return the full keys that a message of the section `path` mentions.

    The message may write a key relative to the section, relative to the section around it, or in full.
    """
    prefixes = [path, path.rstrip(".").rpartition(".")[0] + ".", ""]
    words = re.findall(r"[a-z][a-z_.]*[a-z]", message)
    found = (next((prefix + word for prefix in prefixes if prefix + word in keys), None) for word in words)
    return [key for key in dict.fromkeys(found) if key]
