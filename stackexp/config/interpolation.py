"""Interpolation: `${data.vocab_size}`, and `${div:a,b}`, the exact quotient of two integers."""

import re
from collections.abc import Iterator

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationValidationError, OmegaConfBaseException

from stackexp.config.suggestions import suggest_name
from stackexp.config.validation import Origins, mistake

Place = tuple[str, DictConfig | ListConfig, str | int]
"""The full key of a value, and the node and name or index that hold it."""


def places(node: DictConfig | ListConfig, path: str = "") -> Iterator[Place]:
    """Every value below a node; the items of a list go under the key of the list."""
    listed = isinstance(node, ListConfig)
    for name in range(len(node)) if listed else list(node):
        key = path if listed else f"{path}.{name}".lstrip(".")
        child = node._get_node(name)
        if isinstance(child, DictConfig | ListConfig) and not child._is_none() and not child._is_interpolation():
            yield from places(child, key)
        else:
            yield key, node, name


def resolve(root: DictConfig, origins: Origins) -> None:
    """Raise ConfigError for a missing value, then for an interpolation that does not give a value of its key's type."""
    for key, node, name in places(root):
        if node._get_node(name)._value() == "???":
            raise mistake(origins.get(key, ""), key, f"a value is required; set it with {key}=VALUE")
    for key, node, name in places(root):
        if OmegaConf.is_interpolation(node, name):
            try:
                node[name]
            except (OmegaConfBaseException, RecursionError) as error:
                message = _unresolved(node._get_node(name)._value(), error, root)
                raise mistake(origins.get(key, ""), key, message) from error


def keys(node: DictConfig) -> list[str]:
    """The full keys of all single values and of all mappings that are empty."""
    found = []
    for name in node:
        child = node._get_node(name)
        inner = isinstance(child, DictConfig) and not child._is_none() and len(child) > 0
        found += [f"{name}.{key}" for key in keys(child)] if inner else [str(name)]
    return found


def _unresolved(text: str, error: Exception, root: DictConfig) -> str:
    if isinstance(error, RecursionError) or "ecursive" in str(error):
        return f"the interpolation {text} goes in a circle"
    if isinstance(error, InterpolationKeyError):
        known = keys(root)
        names = [name for name in re.findall(r"\$\{([\w.]+)\}", text) if name not in known]
        return f"the interpolation {text} names no key of the config{suggest_name(names[0], known) if names else ''}"
    if isinstance(error, InterpolationValidationError):
        return f"the interpolation {text} gives a wrong type: {first_line(error).split(': ', 1)[-1]}"
    return f"the interpolation {text} cannot be resolved: {first_line(error)}"


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].removeprefix("ValueError raised while resolving interpolation: ")


def _div(numerator: int, denominator: int) -> int:
    if type(numerator) is not int or type(denominator) is not int:
        raise ValueError(f"div needs two integers, found {numerator!r} and {denominator!r}")
    if denominator == 0 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


OmegaConf.register_resolver("div", _div, replace=True, annotation_validation="off")
