"""Select options by what they affect, for resume, sweep trials and reports.

Options are a flat mapping {full key: value}; see `flatten_config`. Keys that are not in the schema (from a plugin that
is not imported, or removed since) count as `training`.
"""

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import Any

from stackexp.config.compose import to_dict
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.fields import find_dataclass
from stackexp.config.registry import SECTIONS, get_entry, list_kinds
from stackexp.config.yaml_files import flatten

FlatConfig = Mapping[str, Any]

AFFECT_RESULTS = ("training", "continuation", "evaluation", "location")
"""The effects of the options that identify a trial. With the others, the results are the same."""


def flatten_config(config: ExperimentConfig) -> dict[str, Any]:
    """Return a config as {full key: value}."""
    return flatten(to_dict(config))


def get_effect(options: FlatConfig, key: str) -> str:
    """Return what the option `key` affects; `options` must include the kind of its section."""
    field = _find_field(options, key)
    return field.metadata.get("affects", "training") if field else "training"


def changes_scores(options: FlatConfig, key: str) -> bool:
    """Return True if `key` changes the scores of fixed weights on a fixed evaluation set."""
    field = _find_field(options, key)
    is_architecture = key.startswith("model.") and get_effect(options, key) == "training"
    return is_architecture or (field is not None and field.metadata.get("changes_scores", False))


def is_default(options: FlatConfig, key: str) -> bool:
    """Return True if `options` has the default value of `key`."""
    field = _find_field(options, key)
    return field is not None and field.name == key.rpartition(".")[2] and options[key] == get_default(field)


def select_options(options: FlatConfig, which: Collection[str]) -> dict[str, Any]:
    """Return the options that affect one of `which`."""
    return {key: value for key, value in options.items() if get_effect(options, key) in which}


def find_changed_keys(ours: FlatConfig, theirs: FlatConfig, which: Collection[str]) -> list[str]:
    """Return the keys whose values differ and that affect one of `which`, model options first.

    An option that is newer than one side has its default value there.
    """
    keys = sorted(ours.keys() | theirs.keys(), key=lambda key: (not key.startswith("model."), key))
    changed = (key for key in keys if get_value(ours, theirs, key) != get_value(theirs, ours, key))
    return [key for key in changed if get_effect(ours if key in ours else theirs, key) in which]


def remove_defaults(section: Any, which: Collection[str]) -> Any:
    """Return a config as nested dicts, with only kinds and values that differ from the defaults.

    Options that affect none of `which` are omitted.
    """
    if isinstance(section, dict):
        return {key: remove_defaults(item, which) for key, item in section.items()}
    if not dataclasses.is_dataclass(section):
        return section
    kept = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if field.metadata.get("affects", "training") in which and (field.name == "kind" or value != get_default(field)):
            kept[field.name] = remove_defaults(value, which)
    return kept


def get_default(field: dataclasses.Field) -> Any:
    """Return a field's default value; `usual` if the default is an interpolation."""
    if (usual := field.metadata.get("usual")) is not None:
        return usual
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def get_value(options: FlatConfig, others: FlatConfig, key: str) -> Any:
    """Return the value of `key`: its default if only `others` have it, in a section of the same kind."""
    kind = f"{key.rpartition('.')[0]}.kind"
    if key in options or options.get(kind) != others.get(kind):
        return options.get(key)
    field = _find_field(others, key)
    return get_default(field) if field and field.name == key.rpartition(".")[2] else None


def _find_field(
    options: FlatConfig, key: str, cls: Any = ExperimentConfig, section: str = ""
) -> dataclasses.Field | None:
    """Return the field of the key `section + key`, or None if there is no such field."""
    name, _, rest = key.partition(".")
    field = next((field for field in dataclasses.fields(cls) if field.name == name), None)
    if field is None:
        return None
    hint, section = typing.get_type_hints(cls)[name], section + name
    if section in SECTIONS:
        kind = options.get(f"{section}.kind")
        inner = get_entry(SECTIONS[section], kind).config if kind in list_kinds(SECTIONS[section]) else None
    else:
        inner = find_dataclass(hint)
    if inner is None or not rest:
        return field
    if typing.get_origin(hint) is dict:  # {name: dataclass}, where the name may contain dots
        rest = rest.rpartition(".")[2]
    return _find_field(options, rest, inner, f"{section}.")
