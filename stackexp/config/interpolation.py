"""Interpolation: `${data.vocab_size}`, and `${div:a,b}`, the exact quotient of two integers."""

import re

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationValidationError, OmegaConfBaseException

from stackexp.config.checks import Origins, mistake
from stackexp.config.yaml_files import nearest


def keys(node: DictConfig, path: str = "") -> list[str]:
    found = []
    for name in node:
        child = node._get_node(name)
        inner = isinstance(child, DictConfig) and not child._is_none() and len(child) > 0
        found += keys(child, f"{path}{name}.") if inner else [f"{path}{name}"]
    return found


def resolve(node: DictConfig | ListConfig, root: DictConfig, path: str, origins: Origins) -> None:
    """Try every interpolation, so that a failure can name its key and origin."""
    items = range(len(node)) if isinstance(node, ListConfig) else list(node)
    for name in items:
        key = path.rstrip(".") if isinstance(node, ListConfig) else f"{path}{name}"
        child = node._get_node(name)
        if isinstance(child, DictConfig | ListConfig) and not child._is_none() and not child._is_interpolation():
            resolve(child, root, f"{key}.", origins)
        elif OmegaConf.is_interpolation(node, name):
            text = child._value()
            try:
                value = node[name]
                if isinstance(value, DictConfig | ListConfig):
                    raise TypeError("it names a section; it must name a single value")
            except (OmegaConfBaseException, RecursionError, TypeError) as error:
                raise mistake(origins.get(key, ""), key, _unresolved(text, error, root)) from error


def _unresolved(text: str, error: Exception, root: DictConfig) -> str:
    if isinstance(error, RecursionError) or "ecursive" in str(error):
        return f"the interpolation {text} goes in a circle"
    if isinstance(error, InterpolationKeyError):
        known = keys(root)
        names = [name for name in re.findall(r"\$\{([\w.]+)\}", text) if name not in known]
        return f"the interpolation {text} names no key of the config{nearest(names[0], known) if names else ''}"
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
