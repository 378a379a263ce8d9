"""What a config must satisfy beyond its types, and how a mistake is told: origin, key, expectation, in one line."""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union

from stackexp.config.experiment import ExperimentConfig
from stackexp.config.suggestions import suggest_name
from stackexp.errors import ConfigError

Origins = dict[str, str]
"""Full key -> where its value was written; keys left at their default are missing."""


def mistake(origin: str, key: str, message: str) -> ConfigError:
    """`origin: key: message`, without the origin where a default is at fault."""
    return ConfigError(": ".join(part for part in (origin, key, message) if part))


def expected(hint: Any, metadata: Mapping[str, Any]) -> str:
    """A field's type and limits in words: `an integer >= 1`, `one of depth, time, token_major`."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        options = [t for t in typing.get_args(hint) if t is not type(None)]
        return " or ".join([*(expected(t, metadata) for t in options), "null"])
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(hint)))}"
    if dataclasses.is_dataclass(hint):
        return f"the keys {', '.join(field.name for field in dataclasses.fields(hint))}"
    if "choices" in metadata:
        return f"one of {', '.join(metadata['choices'])}"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    word = words.get(hint) or {list: "a list", dict: "a mapping"}.get(typing.get_origin(hint), str(hint))
    low, high = metadata.get("min"), metadata.get("max")
    if low is not None and high is not None:
        return f"{word} from {low} to {high}"
    signs = {"min": ">=", "above": ">", "max": "<=", "below": "<"}
    limits = " and ".join(f"{sign} {metadata[name]}" for name, sign in signs.items() if name in metadata)
    return f"{word} {limits}" if limits else word


def field_of(cls: type, name: str) -> tuple[Any, Mapping[str, Any]]:
    """Type and metadata of a dataclass's field."""
    metadata = next(field.metadata for field in dataclasses.fields(cls) if field.name == name)
    return typing.get_type_hints(cls)[name], metadata


def wrong_value(origin: str, key: str, hint: Any, metadata: Mapping[str, Any], value: Any) -> ConfigError:
    """The error of a value that a field cannot take, with the nearest right one."""
    if value is None or value == "":
        found = "null" if value is None else "empty text"
    else:
        found = "a mapping" if isinstance(value, dict) else repr(value)
    options = [hint, *typing.get_args(hint)] if typing.get_origin(hint) is Union else [hint]
    choices = [str(choice) for t in options if typing.get_origin(t) is Literal for choice in typing.get_args(t)]
    choices += metadata.get("choices", [])
    close = suggest_name(value, choices) if isinstance(value, str) else ""
    if int in options and isinstance(value, float) and value.is_integer():
        close = f"; write {int(value)}"
    return mistake(origin, key, f"expected {expected(hint, metadata)}, found {found}{close}")


def check(config: ExperimentConfig, origins: Origins, is_training: bool = True) -> None:
    """Limits of single values first, then what involves several. Raises ConfigError for the first mistake."""
    context = {"": (is_training,), "model.memory.": (config.model,), "schedule.": (config.trainer,)}
    check_all(config, origins, context)


def check_all(config: Any, origins: Origins, context: Mapping[str, tuple] = types.MappingProxyType({})) -> None:
    """Check any dataclass. `context`: {key prefix: arguments of the section's `find_errors`}."""
    for path, section in walk(config):
        for field in dataclasses.fields(section):
            value, key = getattr(section, field.name), f"{path}{field.name}"
            if not _is_valid(value, field.metadata):
                raise wrong_value(origins.get(key, ""), key, *field_of(type(section), field.name), value)
    keys = {path + field.name for path, section in walk(config) for field in dataclasses.fields(section)}
    for path, section in walk(config):
        for key, message in getattr(section, "find_errors", _no_errors)(*context.get(path, ())):
            origin = origins.get(path + key, "")
            named = [k for k in _named_keys(message, path, keys) if origins.get(k) and origins[k] != origin]
            others = "; ".join(f"{k}: {origins[k]}" for k in named)
            raise mistake(origin, path + key, f"{message} ({others})" if others else message)


def walk(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A section and the sections within it, each with the prefix of its keys: `model.memory.`"""
    yield path, section
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        inner = {f"{field.name}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {}
        for name, item in (inner or {field.name: value}).items():
            if dataclasses.is_dataclass(item):
                yield from walk(item, f"{path}{name}.")


def _no_errors(*_: Any) -> Iterator[tuple[str, str]]:
    return iter(())


def _is_valid(value: Any, metadata: Mapping[str, Any]) -> bool:
    if "choices" in metadata:
        return value is None or value in metadata["choices"]
    if not isinstance(value, int | float):
        return True
    low, high = metadata.get("min", -math.inf), metadata.get("max", math.inf)
    above, below = metadata.get("above", -math.inf), metadata.get("below", math.inf)
    finite = isinstance(value, int) or math.isfinite(value)
    return finite and low <= value <= high and above < value < below


def _named_keys(message: str, path: str, keys: set[str]) -> list[str]:
    """The full keys that a message of the section `path` names: its own, those of the section around it, full ones."""
    prefixes = [path, path.rstrip(".").rpartition(".")[0] + ".", ""]
    words = re.findall(r"[a-z][a-z_.]*[a-z]", message)
    found = (next((prefix + word for prefix in prefixes if prefix + word in keys), None) for word in words)
    return [key for key in dict.fromkeys(found) if key]
