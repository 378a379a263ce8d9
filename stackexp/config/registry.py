"""The registry of kinds: (group, kind) -> the dataclass of its options and the class or function it builds.

A built-in kind is registered with "module:attribute". That module is imported when the kind is built, so that
composing a config does not import torch. A plugin registers the class together with its options:

    @register("memory", "my_memory", config=MyMemoryConfig)
    class MyMemory(Memory): ...

Plugins are Python files or modules that a config lists. A config can come from somebody else, so its files run only if
they are part of the current project, are named on the command line, or are trusted with --trust-plugins. Modules are
trusted, because the user has installed them.
"""

import hashlib
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stackexp.config.fields import config_error
from stackexp.config.trainer import split_class
from stackexp.errors import ConfigError

if TYPE_CHECKING:  # the help text imports this file, and no YAML
    from stackexp.config.yaml_files import Leaf

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
        if known and [*map(_identify, known)] != [*map(_identify, entry)]:
            owner = known.builds if isinstance(known.builds, str) else known.builds.__module__
            raise ValueError(f"{group} kind {kind!r} is already registered by {owner}; choose another kind")
        _entries[group, kind] = entry
        return decorated

    return decorate


def _identify(part: Any) -> Any:
    return part if isinstance(part, str) else (part.__module__, part.__qualname__)


def list_kinds(group: str) -> list[str]:
    """Return the registered kinds of a group, sorted."""
    return sorted(kind for g, kind in _entries if g == group)


def get_entry(group: str, kind: str) -> Entry:
    """Return the entry of a kind. Raises KeyError if it is not registered."""
    return _entries[group, kind]


def build(group: str, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Build the object of a config section's kind; it receives the section and the other arguments."""
    return get_entry(group, config.kind).load()(config, *args, **kwargs)


TRUST_VARIABLE = "STACKEXP_TRUST_PLUGINS"  # set to 1 by --trust-plugins


def import_plugin(name: "Leaf", folder: Path) -> str:
    """Import a plugin and return its name for config.yaml: an absolute path, or the name of a module.

    Raises ConfigError if the plugin is not found, is not trusted, or its import fails.
    """
    paths = [parent / name.value for parent in (folder, Path())]
    file = find_trusted_file(name, folder)
    try:
        if file:
            _import_file(file)
            return str(file)
        if getattr(importlib.import_module(name.value), "__file__", None) is None:
            raise ImportError("a folder without Python files registers nothing; give a Python file")
        return name.value
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == name.value.split(".")[0]
        is_missing |= name.value.startswith(".")  # a path: a module's name cannot start so
        if is_missing:
            files = " or ".join(dict.fromkeys(map(str, paths)))
            reason = f"no file {files}, and no module of that name; correct its path here"
        else:
            reason = f"{_find_line(error, file)}{type(error).__name__}: {error}"
        message = f"cannot import {name.value!r}: {' '.join(reason.split())}"
        raise config_error(name.origin, "plugins", message) from error


def _find_line(error: Exception, file: Path | None) -> str:
    """Return `line N: ` for the innermost line of the file in the traceback, or "" if there is none."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"line {lines[-1]}: " if lines else ""


def find_trusted_file(name: "Leaf", folder: Path) -> Path | None:
    """Return the file of a plugin, or None if it is a module. Raises ConfigError if the file is not trusted.

    Looks for a Python file, named with or without suffix, in the folder of the config, then in the working directory.
    """
    paths = [parent / name.value for parent in (folder, Path())]
    file = next((file.resolve() for path in paths for file in (path, Path(f"{path}.py")) if file.is_file()), None)
    is_trusted = name.origin.startswith("override ") or os.environ.get(TRUST_VARIABLE) == "1"
    if file and not is_trusted and not file.is_relative_to(find_project()):
        message = f"{file} is outside the project {find_project()} and would be executed"
        raise config_error(name.origin, "plugins", f"{message}; read it, then add --trust-plugins")
    return file


def find_project() -> Path:
    """Return the project of the working directory: the closest parent with .git or pyproject.toml, or itself."""
    here = Path.cwd()
    marks = (".git", "pyproject.toml")
    return next((folder for folder in (here, *here.parents) if any((folder / m).exists() for m in marks)), here)


def locate_class(entry: Any, origin: str, folder: Path) -> Any:
    """Return an entry of trainer.callbacks or logging.loggers with the absolute path of its file, if it names a file.

    The rules are those of plugins: raises ConfigError if the file is not trusted.
    """
    from stackexp.config.yaml_files import Leaf

    name, options = split_class(entry)
    module, colon, attribute = name.rpartition(":") if isinstance(name, str) else ("", "", "")
    file = find_trusted_file(Leaf(module, origin), folder) if colon else None
    if file is None:
        if module.endswith(".py"):
            raise config_error(origin, "", f"{module}: file not found; correct the path")
        return entry
    located = f"{file}:{attribute}"
    return {"class": located, "options": options} if isinstance(entry, dict) else located


def build_class(key: str, entry: Any, base: type) -> Any:
    """Build an object of an entry's `module:Class`, which has been located. Raises ConfigError if that fails.

    Only classes derived from `base` are called: others, such as subprocess.Popen, could do anything with the options.
    """
    name, options = split_class(entry)
    module, _, attribute = name.rpartition(":")
    try:
        loaded = _import_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
        found = getattr(loaded, attribute)
        if isinstance(found, type) and issubclass(found, base):
            return found(**options)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{key}: cannot build {name}: {reason}") from error
    raise ConfigError(f"{key}: {name}: not a {base.__name__}; derive it from {base.__module__}.{base.__qualname__}")


def _import_file(path: Path) -> types.ModuleType:
    """Import a Python file once per process, also if another plugin imports it by its name."""
    module_name = f"stackexp_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None:
            raise ImportError("not a Python file; its name must end in .py")
        module = importlib.util.module_from_spec(spec)
        names = [module_name, *([path.stem] if _find_module(path.stem) == path else [])]
        if path.stem in names and path.stem in sys.modules:
            sys.modules[module_name] = sys.modules[path.stem]
            return sys.modules[module_name]
        sys.modules |= dict.fromkeys(names, module)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            for name in names:
                del sys.modules[name]
            raise
    return sys.modules[module_name]


def _find_module(name: str) -> Path | None:
    """Return the file that `import name` would load, or has loaded."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).resolve() if spec and spec.origin else None
