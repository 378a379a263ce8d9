"""Files and overrides -> one typed, checked config. Needs no torch; every mistake is a ConfigError of one line.

    config = compose(["quickstart"], ["model.memory=queue", "trainer.max_steps=100"])

Interpolation is resolved once, last: `${data.vocab_size}` and `${div:a,b}`, the exact quotient of two integers.
"""

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stackexp.config import data, formal_language, memory, model, optimizer, recurrent, schedule  # noqa: F401  (they register their kinds)
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.interpolation import first_line, keys, resolve
from stackexp.config.layers import Layers, find_config, find_origin, list_sections
from stackexp.config.plugins import import_plugin
from stackexp.config.registry import SECTIONS, get_entry, list_kinds
from stackexp.config.renames import explain_old_key, explain_old_value
from stackexp.config.suggestions import find_closest, suggest_name
from stackexp.config.validation import check, check_all, field_of, mistake, wrong_value
from stackexp.config.yaml_files import Leaf, Tree


def compose(
    configs: list[str],
    overrides: list[str] | tuple[str, ...] = (),
    is_training: bool = True,
) -> ExperimentConfig:
    """Compose configs (shipped names or paths, in order) and overrides (`a.b=c`, `--a.b=c` or `--a.b c`).

    `is_training`: False where it is for an evaluation, whose options need not fit the global batch.
    Raises ConfigError, one line naming file or override, full key, expectation and the nearest right name.
    """
    layers = Layers()
    for name in configs:
        layers.add_file(find_config(name))
    layers.add_overrides(list(overrides))
    if configs and "name" not in layers.tree:
        names = [Path(name).stem if name.endswith((".yaml", ".yml")) else name for name in configs]
        layers.tree["name"] = Leaf("+".join(names), "")
    layers.tree["plugins"] = Leaf([import_plugin(name, folder) for name, folder in layers.plugins], "")
    return _typed(layers.tree, is_training)


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> ExperimentConfig:
    """The config of a run folder's config.yaml, or of any config file, with overrides on top."""
    return compose([str(path)], overrides)


def to_dict(config: ExperimentConfig) -> dict[str, Any]:
    """A config as plain nested dicts, for checkpoints and loggers."""
    return dataclasses.asdict(config)


def to_yaml(config: ExperimentConfig) -> str:
    """A config as YAML that `load_config` turns into an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def build_dataclass(cls: type, tree: Tree) -> Any:
    """A tree as the dataclass `cls`, whatever it describes: names, types and limits are checked as an experiment's."""
    origins = {key: leaf.origin for key, leaf in _leaves(tree)}
    root = OmegaConf.structured(cls)
    _fill(_open(root, tree), tree, "", root)
    resolve(root, origins)
    config = OmegaConf.to_object(root)
    check_all(config, origins)
    return config


def _open(node: DictConfig, tree: Tree) -> DictConfig:
    """Put its default into each typed entry of `node` that is absent and that the tree writes into."""
    cls = OmegaConf.get_type(node)
    for name, value in tree.items():
        if dataclasses.is_dataclass(cls):
            hint = typing.get_type_hints(cls).get(name)
            hints = [hint, *typing.get_args(hint)]
        else:
            hints = [node._metadata.element_type]
        section = next((hint for hint in hints if dataclasses.is_dataclass(hint)), None)
        if isinstance(value, dict) and section and (name not in node or node[name] is None):
            node[name] = OmegaConf.structured(section)
        if isinstance(value, dict) and name in node and isinstance(node[name], DictConfig):
            _open(node[name], value)
    return node


def _typed(tree: Tree, is_training: bool) -> ExperimentConfig:
    origins = {key: leaf.origin for key, leaf in _leaves(tree)}
    root = _open(_skeleton(tree), tree)
    _fill(root, tree, "", root)
    resolve(root, origins)
    config = OmegaConf.to_object(root)
    check(config, origins, is_training)
    return config


def _leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Leaf]]:
    for key, value in tree.items():
        if isinstance(value, Leaf):
            yield path + key, value
        else:
            yield from _leaves(value, f"{path}{key}.")


def _skeleton(tree: Tree) -> DictConfig:
    """The schema with every section that is chosen by `kind` in its place, at its defaults."""
    root = OmegaConf.structured(ExperimentConfig)
    for section, group in SECTIONS.items():
        *outer, name = section.split(".")
        parent, place = root, tree
        for part in outer:
            parent, place = parent[part], place[part]
        if name not in parent or name not in place:
            continue
        chosen = place[name]
        if isinstance(chosen, Leaf) and chosen.value is None:
            parent[name] = None
            continue
        parent[name] = _defaults_of_kind(section, group, chosen)
    return root


def _defaults_of_kind(section: str, group: str, chosen: Leaf | Tree) -> DictConfig:
    known = list_kinds(group)
    kind = chosen.get("kind") if isinstance(chosen, dict) else None
    if kind is None:
        ways = f"{section}=NAME (see `configs list`) or {section}.kind=KIND ({', '.join(known)})"
        raise mistake(find_origin(chosen), section, f"is switched off here; choose one with {ways}")
    value = kind.value if isinstance(kind, Leaf) else "a mapping"
    if value not in known:
        hint = suggest_name(str(value), known)
        raise mistake(
            find_origin(kind), f"{section}.kind", f"expected one of {', '.join(known)}, found {value!r}{hint}"
        )
    cls = get_entry(group, value).config
    try:
        return OmegaConf.structured(cls)
    except OmegaConfBaseException as error:
        raise mistake(find_origin(kind), f"{section}.kind", f"{cls.__name__}: {first_line(error)}") from error


def _fill(node: DictConfig, tree: Tree, path: str, root: DictConfig) -> None:
    """Put the values of a tree into their fields, checking names and types."""
    cls = OmegaConf.get_type(node)
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else None
    for name, value in tree.items():
        key = path + name
        if fields is not None and name not in fields:
            message = explain_old_key(key) or f"unknown key{_nearest_key(name, path, root)}"
            raise mistake(find_origin(value), key, message)
        child = node._get_node(name) if name in node else None
        if isinstance(value, dict) and isinstance(child, DictConfig) and not child._is_none():
            _fill(child, value, f"{key}.", root)
        else:
            _set(node, name, _plain(value), find_origin(value), key)


def _set(node: DictConfig, name: str, value: Any, origin: str, key: str) -> None:
    """Put a value into its field; stricter than OmegaConf, which takes numbers for booleans and mappings for text."""
    cls = OmegaConf.get_type(node)
    hint, metadata = field_of(cls, name) if dataclasses.is_dataclass(cls) else (node._metadata.element_type, {})
    refused = {bool: int, str: dict, dict: str, list: str}.get(typing.get_origin(hint) or hint)
    if refused and type(value) is refused:
        raise wrong_value(origin, key, hint, metadata, value)
    try:
        if isinstance(value, list):
            node[name] = value
        else:
            node.merge_with({name: value})
    except OmegaConfBaseException as error:
        if isinstance(value, str) and "${" in value:
            raise mistake(origin, key, f"malformed interpolation {value}: {first_line(error)}") from error
        if message := explain_old_value(key, value):
            raise mistake(origin, key, message) from error
        raise wrong_value(origin, key, hint, metadata, value) from error


def _plain(value: Leaf | Tree) -> Any:
    return value.value if isinstance(value, Leaf) else {key: _plain(item) for key, item in value.items()}


def _nearest_key(name: str, path: str, root: DictConfig) -> str:
    """The nearest key in the same section, else the same name elsewhere, else the nearest full key."""
    if "." in name:
        return "; write the parts of a key one inside the other, or as an override"
    known = [*keys(root), *(list_sections() if OmegaConf.get_type(root) is ExperimentConfig else [])]
    beside = {key.removeprefix(path).split(".")[0] for key in known if key.startswith(path)}
    close = find_closest(name, beside)
    elsewhere = [key for key in known if key.split(".")[-1] == name]
    if close or elsewhere:
        return f"; did you mean {path + close if close else elsewhere[0]!r}?"
    return suggest_name(path + name, known) or f"; {path.rstrip('.') or 'a config'} has {', '.join(sorted(beside))}"
