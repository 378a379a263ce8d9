"""The YAML files a config is made of: where they are, and their contents with the file and line of every value."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stackexp.config.renames import REMOVED_KEYS, translate_options
from stackexp.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
RUN_CONFIG = "config.yaml"
"""The file name of a run folder's config. Keys of earlier versions are translated in such files only."""
Tree = dict[str, Any]
"""Nested mappings of text keys down to leaves."""


@dataclass(frozen=True)
class Leaf:
    """A value (a scalar, a list or an empty mapping) and where it was written: `file:line` or `override KEY=VALUE`."""

    value: Any
    origin: str


def configs_folder(package: Path = PACKAGE) -> Path:
    """The shipped YAML: inside the package when installed from a wheel, beside it in a checkout."""
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def display_path(path: Path) -> str:
    """A path as the user would write it: relative to the working directory where it lies below it."""
    absolute, here = os.path.abspath(path), os.getcwd()
    return os.path.relpath(absolute, here) if absolute.startswith(here + os.sep) else absolute


def list_yaml_names(folder: Path, pattern: str = "*.yaml") -> list[str]:
    """Names of the YAML files of a folder, without their ending, sorted."""
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob(pattern))


def read_purpose(path: Path) -> str:
    """What a file says it is for: its first line, a comment."""
    with path.open(encoding="utf-8") as file:
        return file.readline().lstrip("#").strip()


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML as OmegaConf reads it: 3e-4 is a number, 2025-07-20 is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_file(path: Path) -> tuple[list[Leaf], Tree]:
    """The `defaults:` list and the keys of a file. Raises ConfigError naming file and line."""
    name = display_path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    loader, node = _parse(text, lambda line: f"{name}:{line}")
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name}:1: expected keys and values at the top of the file, found {_kind(node)}")
    reader = _Reader(loader, lambda line: f"{name}:{line}")
    defaults: list[Leaf] = []
    for key, value in list(node.value):
        if key.value == "defaults":
            if not isinstance(value, yaml.SequenceNode):
                raise ConfigError(f"{reader.origin(value)}: defaults: expected a list, found {_kind(value)}")
            defaults = [reader.leaf(item) for item in value.value]
    tree = reader.mapping(node)
    tree.pop("defaults", None)
    if path.name == RUN_CONFIG:
        tree = _translate(tree)
    return defaults, tree


def _translate(tree: Tree, path: str = "") -> Tree:
    """Return the config of an old run folder under today's names."""
    translated: Tree = {}
    for name, value in tree.items():
        key = path + name
        if isinstance(value, Leaf):
            for new_key, new_value in translate_options({key: value.value}).items():
                translated[new_key.removeprefix(path)] = Leaf(new_value, value.origin)
        elif key not in REMOVED_KEYS:
            translated[name] = _translate(value, f"{key}.")
    return translated


def read_value(text: str, origin: str) -> Leaf | Tree:
    """The value of an override. Raises ConfigError naming the override."""
    loader, node = _parse(text, lambda line: f"{origin}: the value")
    if node is None:
        raise ConfigError(f"{origin}: empty value; write null, or '\"\"' for empty text")
    return _Reader(loader, lambda line: origin).value(node)


def _parse(text: str, origin: Callable[[int], str]) -> tuple[_Loader, yaml.Node | None]:
    try:
        loader = _Loader(text)
        return loader, loader.get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = mark.line + 1 if mark else text.count("\n", 0, getattr(error, "position", 0)) + 1
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or getattr(error, "context", "")
        raise ConfigError(f"{origin(line)}: not valid YAML: {what}") from error


def _kind(node: yaml.Node | None) -> str:
    return {"scalar": "a single value", "sequence": "a list", "mapping": "a mapping"}[node.id] if node else "nothing"


class _Reader:
    """Turns YAML nodes into trees. `located` names a line (counted from 1)."""

    def __init__(self, loader: _Loader, located: Callable[[int], str]) -> None:
        self.loader, self.located = loader, located
        self.inside: list[yaml.Node] = []

    def origin(self, node: yaml.Node) -> str:
        return self.located(node.start_mark.line + 1)

    def leaf(self, node: yaml.Node) -> Leaf:
        try:
            return Leaf(self.loader.construct_object(node, deep=True), self.origin(node))
        except Exception as error:  # PyYAML lets any exception through for a value that does not fit its !!tag
            what = getattr(error, "problem", None) or error
            raise ConfigError(f"{self.origin(node)}: not valid YAML: {what}") from error

    def value(self, node: yaml.Node) -> Leaf | Tree:
        return self.mapping(node) if isinstance(node, yaml.MappingNode) and node.value else self.leaf(node)

    def mapping(self, node: yaml.MappingNode) -> Tree:
        if node in self.inside:
            raise ConfigError(f"{self.origin(node)}: not valid YAML: an anchor that contains itself")
        self.inside.append(node)
        tree: Tree = {}
        for key_node, value_node in node.value:
            key = self.leaf(key_node).value
            if not isinstance(key, str):
                written = str(key_node.value)
                raise ConfigError(f"{self.origin(key_node)}: the key {written} reads as {key!r}; put it in quotes")
            if key in tree:
                raise ConfigError(f"{self.origin(key_node)}: duplicate key {key!r}")
            tree[key] = self.value(value_node)
        self.inside.pop()
        return tree


def flatten(tree: Tree, path: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}, of plain values or of a file's tree."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flatten(value, f"{path}{key}.")
        else:
            found[path + key] = value.value if isinstance(value, Leaf) else value
    return found
