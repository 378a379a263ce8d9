"""Find and read the YAML files of configs; every value keeps its file and line."""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from stackexp.errors import ConfigError, RunError
from stackexp.files import open_regular

PACKAGE = Path(__file__).parents[1]
T = TypeVar("T")
Tree = dict[str, Any]
"""Nested mappings from text keys to leaves."""


@dataclass(frozen=True)
class Leaf:
    """A value and where it was written.

    The value is a scalar, a list or an empty mapping; the origin is `file:line` or `override KEY=VALUE`. `text` is how
    a number or boolean was written, for options that are text, such as `name: 1_0`.
    """

    value: Any
    origin: str
    text: str | None = None


def get_configs_folder() -> Path:
    """Return the folder of the shipped YAML files: in an installed package, or next to the package in a checkout."""
    installed = PACKAGE / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def display_path(path: Path) -> str:
    """Return the path relative to the working directory if it is inside it, otherwise the absolute path."""
    absolute, working = os.path.abspath(path), os.getcwd()
    return os.path.relpath(absolute, working) if absolute.startswith(working + os.sep) else absolute


@functools.cache
def list_yaml_names(folder: Path, pattern: str = "*.yaml") -> tuple[str, ...]:
    """Return the names of the YAML files in a shipped folder, without their suffix, sorted."""
    return tuple(sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob(pattern)))


def read_purpose(path: Path) -> str:
    """Return the purpose of a YAML file: its first line, a comment."""
    with path.open(encoding="utf-8") as file:
        return file.readline().lstrip("#").strip()


class _Reader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML loader with OmegaConf's rules (3e-4 is a number, 2025-07-20 is text) that keeps the origin of each value.

    `format_origin` returns the origin of a line, counted from 1.
    """

    def __init__(self, text: str, format_origin: Callable[[int], str]) -> None:
        super().__init__(text)
        self.format_origin = format_origin

    def get_origin(self, node: yaml.Node) -> str:
        return self.format_origin(node.start_mark.line + 1)

    def read_leaf(self, node: yaml.Node) -> Leaf:
        try:
            value = self.construct_object(node, deep=True)
            return Leaf(value, self.get_origin(node), node.value if isinstance(value, int | float) else None)
        except RecursionError:
            raise  # see `_parse`
        except Exception as error:  # PyYAML raises any exception for a value that does not match its !!tag
            reason = getattr(error, "problem", None) or error
            raise ConfigError(f"not valid YAML: {reason}", self.get_origin(node)) from error

    def read_value(self, node: yaml.Node) -> Leaf | Tree:
        return self.read_mapping(node) if isinstance(node, yaml.MappingNode) and node.value else self.read_leaf(node)

    def read_mapping(self, node: yaml.MappingNode) -> Tree:
        tree: Tree = {}
        if node.tag != self.DEFAULT_MAPPING_TAG:
            raise ConfigError(f"not valid YAML: remove the tag {node.tag}", self.get_origin(node))
        for key_node, value_node in node.value:
            key, origin = self.read_leaf(key_node).value, self.get_origin(key_node)
            if not isinstance(key, str):
                written = key_node.value if isinstance(key_node, yaml.ScalarNode) else key
                raise ConfigError(f"the key {written} is read as {key!r}; put it in quotes", origin)
            if key in tree:
                raise ConfigError(f"duplicate key {key!r}", origin)
            tree[key] = self.read_value(value_node)
        return tree


_DECIMAL = r"[-+]?(0|[1-9][0-9_]*)"  # YAML 1.1 also reads 010 as octal and 1:30 in base 60, here they are text
_FLOAT = rf"({_DECIMAL}(\.[0-9_]*)?|[-+]?\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_Reader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":bool", ":null"))]
    for first, resolvers in _Reader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in {"int": _DECIMAL, "float": _FLOAT}.items():
    _Reader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_pattern})$"), list("-+.0123456789"))


def read_file(path: Path) -> tuple[list[Leaf], Tree]:
    """Return the `defaults:` list and the keys of a file. Raises ConfigError with file and line."""
    name = display_path(path)
    try:
        with open_regular(path) as file:
            text = file.read()
    except (OSError, UnicodeDecodeError, RunError) as error:
        raise ConfigError(f"cannot read the file: {getattr(error, 'strerror', None) or error}", name) from error
    return _parse(text, lambda line: f"{name}:{line}", _read_root)


def _read_root(reader: _Reader, node: yaml.Node | None) -> tuple[list[Leaf], Tree]:
    if not isinstance(node, yaml.MappingNode):
        found = _describe_kind(node)
        raise ConfigError(f"expected keys and values at the top of the file, found {found}", reader.format_origin(1))
    defaults: list[Leaf] = []
    for key, value in list(node.value):
        if key.value == "defaults":
            if not isinstance(value, yaml.SequenceNode):
                origin = reader.get_origin(value)
                raise ConfigError(f"defaults: expected a list, found {_describe_kind(value)}", origin)
            defaults = [reader.read_leaf(item) for item in value.value]
    tree = reader.read_mapping(node)
    tree.pop("defaults", None)
    return defaults, tree


def read_options(path: Path) -> dict[str, Any]:
    """Return the keys of a run's config.yaml as {full key: value}. Raises the errors of `read_file`."""
    with contextlib.suppress(Exception), open_regular(path) as file:  # PyYAML raises any; `read_file` explains it
        sections = map(_read_section, filter(None, re.split(r"(?m)^(?=[a-z_]+:)", file.read())))
        items = [item for section in sections for item in section.items()]
        if items and len(options := dict(items)) == len(items):
            return options
    return flatten(read_file(path)[1])


@functools.lru_cache(maxsize=10_000)
def _read_section(text: str) -> dict[str, Any]:
    """Return the keys of one section. Most sections of the runs of a sweep are equal, so their values are kept."""
    reader = _Reader(text, lambda line: "")
    return flatten(reader.read_mapping(reader.get_single_node()))


def read_value(text: str, origin: str) -> Leaf | Tree:
    """Return the value of an override. Raises ConfigError if it is not valid YAML."""

    def read(reader: _Reader, node: yaml.Node | None) -> Leaf | Tree:
        if node is None:
            raise ConfigError("empty value; write null, or '\"\"' for empty text", origin)
        return reader.read_value(node)

    return _parse(text, lambda line: origin, read)


def _parse(text: str, origin: Callable[[int], str], read: Callable[[_Reader, yaml.Node | None], T]) -> T:
    """Return `read(reader, node)` for the root node of a text. Raises ConfigError if the text is not valid YAML."""
    try:
        reader = _Reader(text, origin)
        node = reader.get_single_node()
        return read(reader, node)
    except RecursionError as error:
        raise ConfigError("nested too deeply, or an anchor contains itself", origin(1)) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = mark.line + 1 if mark else text.count("\n", 0, getattr(error, "position", 0)) + 1
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or getattr(error, "context", "")
        raise ConfigError(f"not valid YAML: {reason}", origin(line)) from error


def _describe_kind(node: yaml.Node | None) -> str:
    return {"scalar": "a single value", "sequence": "a list", "mapping": "a mapping"}[node.id] if node else "nothing"


def flatten(tree: Tree) -> dict[str, Any]:
    """Return a nested mapping, or a file's tree, as {full key: value}: {"a": {"b": 1}} -> {"a.b": 1}."""
    return {key: value.value if isinstance(value, Leaf) else value for key, value in iterate_leaves(tree)}


def iterate_leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full keys of a nested mapping and their values or leaves."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from iterate_leaves(value, f"{path}{key}.")
        else:
            yield path + key, value
