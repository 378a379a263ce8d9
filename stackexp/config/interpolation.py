"""Interpolation: `${data.vocab_size}`, and `${div:a,b}`, the exact quotient of two integers."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationValidationError, OmegaConfBaseException

from stackexp.config.fields import Origins, config_error, get_field
from stackexp.errors import suggest_name


def resolve(root: DictConfig, origins: Origins) -> None:
    """Resolve all interpolations.

    Raises ConfigError if a value is missing, or if an interpolation has the wrong type or no value.
    """
    for key, node, name in _iterate_slots(root):
        if node._get_node(name)._value() == "???":
            raise config_error(origins.get(key, ""), key, f"a value is required; set it with {key}=VALUE")
    for key, node, name in _iterate_slots(root):
        if OmegaConf.is_interpolation(node, name):
            try:
                node[name]
            except (OmegaConfBaseException, RecursionError) as error:
                message = _describe_failure(node._get_node(name)._value(), error, root, origins)
                raise config_error(origins.get(key, ""), key, message) from error


def _iterate_slots(node: DictConfig | ListConfig, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the full key of every value, and the node and name (or index) that hold it.

    The items of a list have the key of the list.
    """
    is_list = isinstance(node, ListConfig)
    for name in range(len(node)) if is_list else list(node):
        key = path if is_list else f"{path}.{name}".lstrip(".")
        child = node._get_node(name)  # type: ignore[arg-type]
        if isinstance(child, DictConfig | ListConfig) and not child._is_none() and not child._is_interpolation():
            yield from _iterate_slots(child, key)
        else:
            yield key, node, name


def _find_names(text: str) -> list[str]:
    return re.findall(r"\$\{([\w.]+)\}", text)


def find_interpolated_keys(root: DictConfig) -> set[str]:
    """Return the keys that other options interpolate."""
    texts = (node._get_node(name)._value() for _, node, name in _iterate_slots(root))
    return {key for text in texts if isinstance(text, str) for key in _find_names(text)}


def find_environment_texts(root: DictConfig) -> dict[str, str]:
    """Return the unresolved text of paths, URLs and names that contain `${oc.env:NAME}`, by key.

    Options that affect training are excluded, because a run folder must contain their values.
    """
    found = {}
    for key, node, name in _iterate_slots(root):
        cls, text = OmegaConf.get_type(node), node._get_node(name)._value()
        if isinstance(text, str) and "${oc.env:" in text and isinstance(node[name], str):
            is_set = key.startswith(("data.validation.", "data.test."))
            metadata = get_field(cls, name)[1] if dataclasses.is_dataclass(cls) else {}
            if is_set or metadata.get("affects", "training") != "training":
                found[key] = text
    return found


def list_keys(node: DictConfig) -> list[str]:
    """Return the full keys of all single values and of all empty mappings."""
    keys = []
    for name in node:
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and len(child) > 0:
            keys += [f"{name!s}.{key}" for key in list_keys(child)]
        else:
            keys.append(str(name))
    return keys


def _describe_failure(text: str, error: Exception, root: DictConfig, origins: Origins) -> str:
    """Return why the interpolation `text` has no value, with the origin of another key that is the cause."""
    slots = ((key, node, name) for key, node, name in _iterate_slots(root) if OmegaConf.is_interpolation(node, name))
    texts = {key: node._get_node(name)._value() for key, node, name in slots}
    if isinstance(error, RecursionError) or _is_circular(text, texts):
        return f"circular interpolation {text}"
    for key in _find_names(text):
        if key in texts:
            where = f"{origins[key]}: " if origins.get(key) else ""
            return f"{text} requires {key}: {where}{_describe_failure(texts[key], error, root, {})}"
    if isinstance(error, InterpolationKeyError):
        known = list_keys(root)
        unknown = [name for name in _find_names(text) if name not in known]
        return f"unknown key in the interpolation {text}{suggest_name(unknown[0], known) if unknown else ''}"
    if isinstance(error, InterpolationValidationError):
        return f"the interpolation {text} has the wrong type: {describe_error(error).split(': ', 1)[-1]}"
    return f"cannot resolve the interpolation {text}: {describe_error(error)}"


def _is_circular(text: str, texts: dict[str, str], seen: tuple[str, ...] = ()) -> bool:
    return any(
        key in seen or (key in texts and _is_circular(texts[key], texts, (*seen, key))) for key in _find_names(text)
    )


def describe_error(error: Exception) -> str:
    """Return the first line of an OmegaConf error."""
    return str(error).strip().split("\n")[0].removeprefix("ValueError raised while resolving interpolation: ")


def _divide(numerator: int, denominator: int) -> int:
    if type(numerator) is not int or type(denominator) is not int:
        raise ValueError(f"div requires two integers, found {numerator!r} and {denominator!r}")
    if denominator == 0 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


OmegaConf.register_resolver("div", _divide, replace=True, annotation_validation="off")
