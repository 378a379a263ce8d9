"""The registry of kinds: (group, kind) -> the dataclass of its options and the class or function it builds.

A built-in kind is registered with "module:attribute". That module is imported when the kind is built, so that
composing a config does not import torch. A plugin registers the class together with its options:

    @register("memory", "my_memory", config=MyMemoryConfig)
    class MyMemory(Memory): ...
"""

import pkgutil
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, NamedTuple

SECTIONS = {
    "model": "model",
    "model.memory": "memory",
    "data": "data",
    "optimizer": "optimizer",
    "schedule": "schedule",
}
"""The group of each config section that has a `kind`."""


class Entry(NamedTuple):
    """A registered kind."""

    config: type  # the dataclass of options; its field `kind` equals the registered name
    builds: Any  # "module:attribute", or the class or function itself

    def load(self) -> Callable:
        """Return the class or function that this kind builds; import it if necessary."""
        return pkgutil.resolve_name(self.builds) if isinstance(self.builds, str) else self.builds


_entries: dict[tuple[str, str], Entry] = {}


def register(group: str, kind: str, *, builds: str | None = None, config: type | None = None) -> Callable[[type], type]:
    """Return a decorator that registers a kind: decorate its options and pass `builds`, or its class and pass `config`.

    Raises ValueError if the kind is already registered, or its options are not a dataclass with the field `kind`.
    """
    if (builds is None) == (config is None):
        raise ValueError(f"register({group!r}, {kind!r}): give `builds` on a dataclass or `config` on what it builds")

    def decorate(decorated: type) -> type:
        entry = Entry(config or decorated, builds or decorated)
        if not is_dataclass(entry.config) or getattr(entry.config, "kind", None) != kind:
            raise ValueError(f'{entry.config.__name__} must be a dataclass with the field `kind: str = "{kind}"`')
        known = _entries.get((group, kind))
        if known and _identify(known.config) != _identify(entry.config):
            raise ValueError(f"{group} kind {kind!r} is already registered by {known.config.__module__}")
        _entries[group, kind] = entry
        return decorated

    return decorate


def _identify(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def list_kinds(group: str) -> list[str]:
    """Return the registered kinds of a group, sorted."""
    return sorted(kind for g, kind in _entries if g == group)


def find_kinds_with(option: str, group: str) -> list[str]:
    """Return the kinds of a group that have an option, sorted."""
    return [kind for kind in list_kinds(group) if option in get_entry(group, kind).config.__dataclass_fields__]


def get_entry(group: str, kind: str) -> Entry:
    """Return the entry of a kind. Raises KeyError if it is not registered."""
    return _entries[group, kind]


def build(group: str, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Build the object of a config section's kind; it receives the section and the other arguments."""
    return get_entry(group, config.kind).load()(config, *args, **kwargs)
