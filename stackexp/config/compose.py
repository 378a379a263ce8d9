"""Composition of files and overrides into one typed, validated config. Imports no torch, but registers all kinds.

    config = compose(["quickstart"], ["model.memory=queue", "trainer.max_steps=100"])

Every error is a ConfigError of one line. Interpolations are resolved last: `${data.vocab_size}`, and `${div:a,b}`, the
exact quotient of two integers.
"""

import copy
import dataclasses
import functools
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import BooleanNode, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationValidationError, OmegaConfBaseException

from stackexp.config import data, memory, model  # noqa: F401
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.fields import (
    Origins,
    config_error,
    find_dataclass,
    get_field,
    validate,
    wrong_value_error,
)
from stackexp.config.layers import CLASS_LISTS, Layers, find_config, find_origin, list_sections
from stackexp.config.registry import SECTIONS, get_entry, import_plugin, list_kinds
from stackexp.config.yaml_files import Leaf, Tree, iterate_leaves
from stackexp.errors import find_closest, suggest_name

RENAMED_KEYS = {
    "data.download_timeout": "data.download_timeout_seconds",
    "data.keep_remainder": "data.score_remainder",
    "init": "warm_start",
    "logging.mirrors": "logging.loggers",
    "model.memory.action_noise_steps": "model.memory.action_noise_warmup_steps",
    "model.memory.keep_every": "model.memory.checkpoint_every_layers",
    "trainer.checkpoint_minutes": "trainer.checkpoint_interval_minutes",
    "trainer.collective_timeout": "trainer.collective_timeout_seconds",
}
REMOVED_KEYS = {
    "beside": "run a sweep instead",
    "logging.tensorboard": "add tensorboard to logging.loggers, or remove it there",
    "model.memory.constrained": "true is now model.memory=mhc",
}


def explain_old_key(key: str) -> str:
    """Return the fix for a key of an earlier version, or "" if the key never existed."""
    if key in RENAMED_KEYS:
        return f"renamed; use {RENAMED_KEYS[key]}"
    section = next((old for old in REMOVED_KEYS if f"{key}.".startswith(f"{old}.")), None)
    return f"removed; {REMOVED_KEYS[section]}" if section else ""


def compose(
    configs: list[str],
    overrides: list[str] | tuple[str, ...] = (),
    is_training: bool = True,
) -> ExperimentConfig:
    """Compose configs (shipped names or paths; later ones win) and overrides (`a.b=c`, `--a.b=c` or `--a.b c`).

    With `is_training=False`, for an evaluation, the global batch is not checked. Raises ConfigError for the first
    error; its line has the file and line or the override, the full key, the expected value and the closest valid name.
    """
    layers = Layers()
    for name in configs:
        layers.add_file(find_config(name))
    layers.add_overrides(list(overrides))
    if configs and "name" not in layers.tree:
        names = [Path(name).stem if name.lower().endswith((".yaml", ".yml")) else name for name in configs]
        layers.tree["name"] = Leaf("+".join(names), f"named after {' '.join(configs)}")
    layers.tree["plugins"] = Leaf([import_plugin(name, folder) for name, folder in layers.plugins], "")
    schema = _build_schema(layers.tree)
    config, origins = _convert(schema, layers.tree)
    config.environment_texts = _find_environment_texts(schema)
    config.interpolated_keys = _find_interpolated_keys(schema)
    arguments = {"": (is_training,), "model.memory.": (config.model,), "schedule.": (config.trainer,)}
    validate(config, origins, arguments)
    return config


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> ExperimentConfig:
    """Load the config.yaml of a run folder, or any other config file, with overrides."""
    return compose([str(path)], overrides)


def to_dict(config: ExperimentConfig) -> dict[str, Any]:
    """Convert a config to plain nested dicts, for run folders, checkpoints and loggers.

    Paths, URLs and names that contain `${oc.env:NAME}` are kept unresolved.
    """
    values = dataclasses.asdict(config)
    for key, text in config.environment_texts.items():
        _replace(values, key, text)
    return values


def _replace(values: dict[str, Any], key: str, text: Any) -> None:
    """Replace a value in nested dicts, whose names may contain dots, too."""
    for name, value in values.items():
        if name == key:
            values[name] = text
        elif isinstance(value, dict) and key.startswith(f"{name}."):
            _replace(value, key.removeprefix(f"{name}."), text)


def to_yaml(config: ExperimentConfig) -> str:
    """Convert a config to YAML. `load_config` returns an equal config for it."""
    values = _escape(dataclasses.asdict(config))
    for key, text in config.environment_texts.items():
        _replace(values, key, text)
    return OmegaConf.to_yaml(OmegaConf.create(values))


def _escape(value: Any) -> Any:
    """Return nested values in which a text with `${` is no interpolation."""
    if isinstance(value, dict):
        return {key: _escape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escape(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def build_dataclass(cls: type, tree: Tree) -> Any:
    """Build a dataclass from a tree, with the same validation and errors as for an experiment config."""
    config, origins = _convert(OmegaConf.structured(cls), tree)
    validate(config, origins)
    return config


def _convert(root: DictConfig, tree: Tree) -> tuple[Any, dict[str, str]]:
    """Fill a schema from a tree and resolve interpolations; return the dataclass and the origins of its values."""
    origins = {key: leaf.origin for key, leaf in iterate_leaves(tree)}
    for key, leaf in iterate_leaves(tree):
        if str(leaf.value).startswith("~/"):
            raise config_error(leaf.origin, key, f"{leaf.value}: ~ is not expanded here; write the whole path")
    _fill(root, tree, "", root)
    _resolve(root, origins)
    return OmegaConf.to_object(root), origins


def _build_schema(tree: Tree) -> DictConfig:
    """Return the schema of an experiment in which each section has the options of the kind chosen in the tree."""
    root = copy.deepcopy(_build_structure(ExperimentConfig))
    for section, group in SECTIONS.items():
        *outer, name = section.split(".")
        parent, values = root, tree
        for part in outer:
            parent, values = parent[part], values[part]
        if name not in parent or name not in values:
            continue
        value = values[name]
        is_null = isinstance(value, Leaf) and value.value is None
        parent[name] = None if is_null else _build_kind(section, group, value)
    return root


@functools.cache
def _build_structure(cls: type) -> DictConfig:
    """Return the schema of a dataclass. Building it is slow; copying it, or assigning it to a node, is fast."""
    return OmegaConf.structured(cls)


def _build_kind(section: str, group: str, value: Leaf | Tree) -> DictConfig:
    """Return the default options of a section's kind."""
    known = list_kinds(group)
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind is None:
        choices = f"{section}=NAME (see `configs list`) or {section}.kind=KIND ({', '.join(known)})"
        raise config_error(find_origin(value), section, f"no kind is set; set {choices}")
    name = kind.value if isinstance(kind, Leaf) else "a mapping"
    if name not in known:
        message = f"expected one of {', '.join(known)}, found {name!r}{suggest_name(str(name), known)}"
        raise config_error(find_origin(kind), f"{section}.kind", message)
    cls = get_entry(group, name).config
    try:
        return _build_structure(cls)
    except OmegaConfBaseException as error:
        raise config_error(find_origin(kind), f"{section}.kind", f"{cls.__name__}: {_describe_error(error)}") from error


def _fill(node: DictConfig, tree: Tree, path: str, root: DictConfig) -> None:
    """Set the values of a tree in a node of the schema. Raises ConfigError for unknown keys and wrong types."""
    cls = OmegaConf.get_type(node)
    for name, value in tree.items():
        key, hint = path + name, node._metadata.element_type
        metadata: Mapping[str, Any] = {}
        if dataclasses.is_dataclass(cls):
            if name not in {field.name for field in dataclasses.fields(cls)}:
                message = explain_old_key(key) or f"unknown key{_suggest_key(name, path, root)}"
                raise config_error(find_origin(value), key, message)
            hint, metadata = get_field(cls, name)
        child = node._get_node(name) if name in node else None
        if isinstance(value, dict) and (section := find_dataclass(hint)) and (child is None or child._is_none()):
            node[name] = OmegaConf.structured(section)
            child = node._get_node(name)
        if isinstance(value, dict) and isinstance(child, DictConfig) and not child._is_none():
            _fill(child, value, f"{key}.", root)
        else:
            plain = _to_plain(value)
            if hint in (str, str | None) and isinstance(value, Leaf) and value.text is not None:
                plain = value.text
            _set_value(node, name, plain, find_origin(value), key, hint, metadata)


def _set_value(
    node: DictConfig, name: str, value: Any, origin: str, key: str, hint: Any, metadata: Mapping[str, Any]
) -> None:
    """Set one value. Stricter than OmegaConf, which accepts numbers for booleans and mappings for text."""
    rejected = {bool: int, str: dict, dict: str, list: str}.get(typing.get_origin(hint) or hint)
    types = {hint, *typing.get_args(hint)}
    items = value if isinstance(value, list) else [value]
    has_text = any(isinstance(item, str) and "${" not in item for item in items)
    is_text_for_number = has_text and types & {int, float, bool} and str not in types  # such as '1' or 010
    if value == "???" or (rejected and type(value) is rejected) or is_text_for_number:  # "???" marks a missing value
        raise wrong_value_error(origin, key, hint, metadata, value)
    try:
        if type(value) is int and hint in (float, float | None):
            value = float(value)  # OmegaConf warns about an implicit conversion
        if isinstance(value, list):
            is_text = typing.get_args(hint) == (str,)
            node[name] = [str(item) if is_text and isinstance(item, int | float) else item for item in value]
        elif isinstance(value, dict):
            node.merge_with({name: value})
        else:  # merging copies all entries of a section or mapping, which is slow
            node[name] = str(value) if hint is str and value is not None else value
    except (OmegaConfBaseException, OverflowError) as error:  # an integer that is too large for a float
        if isinstance(value, str) and "${" in value:
            raise config_error(origin, key, f"malformed interpolation {value}: {_describe_error(error)}") from error
        raise wrong_value_error(origin, key, hint, metadata, value) from error


def _to_plain(value: Leaf | Tree) -> Any:
    return value.value if isinstance(value, Leaf) else {key: _to_plain(item) for key, item in value.items()}


def _suggest_key(name: str, path: str, root: DictConfig) -> str:
    """Return a hint for an unknown key: the kinds that have it, the closest key here, or the same name elsewhere."""
    if "." in name:
        return "; nest the parts of a dotted key, or give it as an override"
    section, is_config = path.rstrip("."), OmegaConf.get_type(root) is ExperimentConfig
    if not section and is_config and name in ("config", "grid", "axes", "list", "seeds"):
        return "; a sweep has it: use `sweep run FILE`"
    if not section and not is_config and name in ExperimentConfig.__dataclass_fields__:
        return "; a config has it: use `fit --config FILE`"
    group = SECTIONS.get(section, "")
    kinds = [kind for kind in list_kinds(group) if name in get_entry(group, kind).config.__dataclass_fields__]
    if kinds:
        return f"; it exists for {section}.kind: {', '.join(kinds)}"
    known = _list_keys(root)
    if is_config:
        known = [section for section in list_sections() if any(key.startswith(f"{section}.") for key in known)] + known
    siblings = {key.removeprefix(path).split(".")[0] for key in known if key.startswith(path)}
    candidates = {sibling: path + sibling for sibling in siblings}
    found = candidates.get(find_closest(name, siblings) or "")
    found = found or next((key for key in known if key.split(".")[-1] == name), None)
    if found:
        return f"; did you mean {found!r}?"
    kind = "config" if is_config else OmegaConf.get_type(root).__name__.removesuffix("Config").lower()
    return f"; {section or f'a {kind}'} has {', '.join(sorted(siblings))}"


# Interpolation


def _resolve(root: DictConfig, origins: Origins) -> None:
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
            child = node._get_node(name)
            sources = [OmegaConf.select(root, source) for source in _find_names(str(child._value()), key)]
            if isinstance(child, BooleanNode) and int in map(type, sources):  # OmegaConf accepts it
                message = f"the interpolation {child._value()} has the wrong type: expected true or false"
                raise config_error(origins.get(key, ""), key, message)


def _iterate_slots(node: DictConfig | ListConfig, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the full key of every value or empty section, and the node and name (or index) that hold it.

    The items of a list have the key of the list.
    """
    is_list = isinstance(node, ListConfig)
    for name in range(len(node)) if is_list else list(node):
        key = path if is_list else f"{path}.{name}".lstrip(".")
        child = node._get_node(name)  # type: ignore[arg-type]
        if isinstance(child, DictConfig | ListConfig) and len(child):  # 0 if it is null or an interpolation
            yield from _iterate_slots(child, key)
        else:
            yield key, node, name


def _find_names(text: str, key: str = "") -> list[str]:
    """Return the full keys that the text of `key` interpolates: `seed` for `${..seed}` in data.shuffle_seed."""
    return [_resolve_dots(name, key) for name in re.findall(r"\$\{\s*([\w.]+)\s*\}", text)]


def _resolve_dots(name: str, key: str) -> str:
    """Return the full key of a name that starts with a dot for each level up from `key`. A list is no level."""
    short = name.lstrip(".")
    above = key.split(".")[: -(len(name) - len(short)) or None]
    return ".".join([*above, short]) if short != name else name


def _find_interpolated_keys(root: DictConfig) -> set[str]:
    """Return the keys that other options interpolate, and all words in such texts, which may be keys in a resolver."""
    texts = ((key, node._get_node(name)._value()) for key, node, name in _iterate_slots(root))
    texts = ((key, text) for key, text in texts if isinstance(text, str) and "${" in text)
    return {_resolve_dots(word, key) for key, text in texts for word in re.findall(r"[\w.]+", text)}


def _find_environment_texts(root: DictConfig) -> dict[str, Any]:
    """Return the unresolved text of paths, URLs and names that contain `${oc.env:NAME}`, by key.

    Options that affect training are excluded, because a run folder must contain their values. A list of callbacks or
    loggers, whose options may be secrets, is returned as a whole.
    """
    found: dict[str, Any] = {}
    for section, name in CLASS_LISTS:
        entries = root[section]._get_node(name)
        if isinstance(entries, ListConfig):
            unresolved = OmegaConf.to_container(entries, resolve=False)
            found |= {f"{section}.{name}": unresolved} if "${oc.env:" in repr(unresolved) else {}
    for key, node, name in _iterate_slots(root):
        cls, text = OmegaConf.get_type(node), node._get_node(name)._value()
        if isinstance(text, str) and "${oc.env:" in text and isinstance(node[name], str):
            is_set = key.startswith(("data.validation.", "data.test."))
            metadata = get_field(cls, name)[1] if dataclasses.is_dataclass(cls) else {}
            if is_set or metadata.get("affects", "training") != "training":
                found[key] = text
    return found


def _list_keys(node: DictConfig) -> list[str]:
    """Return the full keys of all values and empty sections, each once."""
    return list(dict.fromkeys(key for key, _, _ in _iterate_slots(node)))


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
        known = _list_keys(root)
        unknown = [name for name in _find_names(text) if name not in known]
        return f"unknown key in the interpolation {text}{suggest_name(unknown[0], known) if unknown else ''}"
    if isinstance(error, InterpolationValidationError):
        return f"the interpolation {text} has the wrong type: {_describe_error(error).split(': ', 1)[-1]}"
    return f"cannot resolve the interpolation {text}: {_describe_error(error)}"


def _is_circular(text: str, texts: dict[str, str], seen: tuple[str, ...] = ()) -> bool:
    return any(
        key in seen or (key in texts and _is_circular(texts[key], texts, (*seen, key))) for key in _find_names(text)
    )


def _describe_error(error: Exception) -> str:
    """Return the first line of an OmegaConf error."""
    return str(error).strip().split("\n")[0].removeprefix("ValueError raised while resolving interpolation: ")


def _divide(numerator: int, denominator: int) -> int:
    if type(numerator) is not int or type(denominator) is not int:
        raise ValueError(f"div requires two integers, found {numerator!r} and {denominator!r}")
    if denominator == 0 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


OmegaConf.register_resolver("div", _divide, replace=True, annotation_validation="off")
