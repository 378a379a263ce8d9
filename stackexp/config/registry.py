"""Names of what a config can choose: (group, kind) -> (dataclass of its options, where the thing itself is).

A built-in kind is registered with "module:attribute", imported only when it is built, so composing a config
needs no torch. A plugin holds dataclass and module together:

    @register("memory", "my_memory", config=MyMemoryConfig)
    class MyMemory(Memory): ...
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any

SECTIONS = {
    "model": "model",
    "model.memory": "memory",
    "data": "data",
    "optimizer": "optimizer",
    "schedule": "schedule",
}
"""Sections of a config that are chosen by `kind`, and the group each draws from."""


@dataclass(frozen=True)
class Entry:
    config: type  # the dataclass of options; its field `kind` equals the registered name
    builds: Any  # "module:attribute", or the class or function itself

    def load(self) -> Callable:
        """The class or function that builds it, imported now."""
        if not isinstance(self.builds, str):
            return self.builds
        module, attribute = self.builds.split(":")
        return getattr(importlib.import_module(module), attribute)


_entries: dict[tuple[str, str], Entry] = {}


def register(group: str, kind: str, *, builds: str | None = None, config: type | None = None) -> Callable[[type], type]:
    """Decorate the options' dataclass (giving `builds`) or the thing itself (giving `config`).

    Raises ValueError if another entry has the name already.
    """
    if (builds is None) == (config is None):
        raise ValueError(f"register({group!r}, {kind!r}): give `builds` on a dataclass or `config` on what it builds")

    def decorate(decorated: type) -> type:
        entry = Entry(config or decorated, builds or decorated)
        if not is_dataclass(entry.config) or getattr(entry.config, "kind", None) != kind:
            raise ValueError(f'{entry.config.__name__} must be a dataclass with the field `kind: str = "{kind}"`')
        known = _entries.get((group, kind))
        if known and _identity(known.config) != _identity(entry.config):
            raise ValueError(f"{group} kind {kind!r} is registered already, by {known.config.__module__}")
        _entries[group, kind] = entry
        return decorated

    return decorate


def _identity(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def list_kinds(group: str) -> list[str]:
    """The registered names of a group, sorted."""
    return sorted(kind for g, kind in _entries if g == group)


def get_entry(group: str, kind: str) -> Entry:
    """The entry of a name. Raises KeyError for an unknown one."""
    return _entries[group, kind]


def build(group: str, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Build what a checked section describes: the registered callable gets the section, then the arguments."""
    return get_entry(group, config.kind).load()(config, *args, **kwargs)
