"""The configuration reference: type, default and description of every key, from the schema. Imports no torch."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from stackexp.config.affects import get_default
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.fields import describe_type, find_dataclass
from stackexp.config.model import PAPER_SYMBOLS
from stackexp.config.registry import SECTIONS, get_entry, list_kinds
from stackexp.errors import ConfigError, suggest_name
from stackexp.tables import format_table

OTHER_NAMES = {"slot_size": "model.memory.head_dim", "lambda": "model.memory.entropy_weight"}
"""Names that people look for, and the keys that they mean."""
MAX_NAMES = 20  # of more, the page has the first four


@dataclass(frozen=True)
class Key:
    """A key of the config. `kind` is the kind of its section, or "" for a section without kinds."""

    name: str
    kind: str
    type: str
    default: str
    description: str


def list_keys() -> list[Key]:
    """Return every key of the schema, of all registered kinds, in the order of the schema."""
    return list(_iterate(ExperimentConfig, "", ""))


def explain(name: str) -> str:
    """Return type, default and description of a key, for each kind that has it, or a table of a section's keys.

    The last part of a key is enough, or a symbol of the paper such as d_s. Raises ConfigError for unknown keys.
    """
    known = list_keys()
    meant = {symbol: key for key, symbol in PAPER_SYMBOLS.items()} | OTHER_NAMES
    if inside := [key for key in known if key.name.startswith(f"{name}.")]:
        rows = [(key.name, key.kind, key.default, key.description) for key in inside]
        return format_table(rows, header=("key", "kind", "default", "description"))
    keys = [key for key in known if key.name == name] or [key for key in known if key.name.endswith(f".{name}")]
    keys += [key for key in known if key.name == meant.get(name)]
    if not keys:
        raise ConfigError(f"configs explain {name}: no such key{suggest_name(name, [key.name for key in known])}")
    texts = []
    for key in keys:
        title = f"{key.name} (kind {key.kind})" if key.kind else key.name
        texts.append(f"{title}\n  {key.description}\n  type     {key.type}\n  default  {key.default}")
    return "\n\n".join(dict.fromkeys(texts))


def format_reference() -> str:
    """Return the reference of all keys as a Markdown page."""
    groups: dict[tuple[str, str], list[Key]] = {}
    for key in list_keys():
        groups.setdefault((key.name.rpartition(".")[0], key.kind), []).append(key)
    parts = [
        "# Configuration reference\n\nEvery key of a config, generated from the schema by `python -m stackexp configs "
        "explain`. A section with a\n`kind` has the keys of that kind. `configs explain KEY` prints one key, `configs "
        "list` the shipped files."
    ]
    for (section, kind), keys in groups.items():
        title = f"{section or 'top level'}{f': {kind}' if kind else ''}"
        rows = [(f"`{k.name}`", _shorten(k), f"`{k.default}`", k.description) for k in keys]
        table = format_table(rows, header=("key", "type", "default", "description"), style="markdown")
        parts.append(f"## {title}\n\n{table}")
    return "\n\n".join(parts) + "\n"


def _shorten(key: Key) -> str:
    names = key.type.split(", ")
    if len(names) <= MAX_NAMES:
        return key.type
    return f"{', '.join(names[:4])} and {len(names) - 4} others: `configs explain {key.name}` prints them"


def _iterate(cls: type, prefix: str, kind: str) -> Iterator[Key]:
    hints, sections = typing.get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        inner = find_dataclass(hint)
        if name in SECTIONS or inner:
            sections.append((name, hint, inner))
        if name not in SECTIONS and (inner is None or typing.get_origin(hint) is dict) and field.name != "kind":
            text = describe_type(hint, field.metadata)
            yield Key(name, kind, text, _format_default(get_default(field)), read_description(cls, field.name))
    for name, hint, inner in sections:
        if name in SECTIONS:
            kinds = ", ".join(list_kinds(SECTIONS[name]))
            default = _format_default((getattr(ExperimentConfig(), name, None) or {}).get("kind"))
            description = "The kind of the section; decides its other keys."
            yield Key(f"{name}.kind", "", f"one of {kinds}", default, description)
            for section_kind in list_kinds(SECTIONS[name]):
                yield from _iterate(get_entry(SECTIONS[name], section_kind).config, f"{name}.", section_kind)
        elif inner is not None:
            is_mapping = typing.get_origin(hint) is dict
            yield from _iterate(inner, f"{name}.NAME." if is_mapping else f"{name}.", kind)


def _format_default(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "{}" if isinstance(value, dict) else str(value)


def read_description(cls: type, field: str) -> str:
    """Return the string below a field in the source of its class or a base class; "" if there is none."""
    return next((texts[field] for base in cls.__mro__ if field in (texts := _read_descriptions(base))), "")


@cache
def _read_descriptions(cls: type) -> dict[str, str]:
    if not dataclasses.is_dataclass(cls):
        return {}
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    return {
        statement.target.id: " ".join(str(text.value.value).split())
        for statement, text in itertools.pairwise(body)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }
