"""Import plugins: Python files and modules, listed in a config, that register more kinds.

A config can come from somebody else, so its files run only if they are part of the current project, are named on the
command line, or are trusted with --trust-plugins. Modules are trusted, because the user has installed them.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path

from stackexp.config.validation import config_error
from stackexp.config.yaml_files import Leaf

TRUST_VARIABLE = "STACKEXP_TRUST_PLUGINS"  # set to 1 by --trust-plugins


def import_plugin(name: Leaf, folder: Path) -> str:
    """Import a plugin and return its name for config.yaml: an absolute path, or the name of a module.

    Raises ConfigError if the plugin is not found, is not trusted, or its import fails.
    """
    paths = [parent / name.value for parent in (folder, Path())]
    file = find_trusted_file(name, folder)
    try:
        if file:
            return _import_file(file)
        importlib.import_module(name.value)
        return name.value
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == name.value.split(".")[0]
        is_missing |= name.value.startswith(".")  # a path: a module's name cannot start so
        if is_missing:
            files = " or ".join(dict.fromkeys(map(str, paths)))
            reason = f"no file {files}, and no module of that name; correct its path here"
        else:
            reason = f"{type(error).__name__}: {error}"
        message = f"cannot import {name.value!r}: {' '.join(reason.split())}"
        raise config_error(name.origin, "plugins", message) from error


def find_trusted_file(name: Leaf, folder: Path) -> Path | None:
    """Return the file of a plugin, or None if it is a module. Raises ConfigError if the file is not trusted.

    Looks for a Python file, named with or without suffix, in the folder of the config, then in the working directory.
    """
    paths = [parent / name.value for parent in (folder, Path())]
    file = next((file.resolve() for path in paths for file in (path, Path(f"{path}.py")) if file.is_file()), None)
    if file and not _is_trusted(file, name.origin):
        message = f"{file} is outside the project {find_project()} and would be executed"
        raise config_error(name.origin, "plugins", f"{message}; read it, then add --trust-plugins")
    return file


def find_project() -> Path:
    """Return the project of the working directory: the closest parent with .git or pyproject.toml, or itself."""
    here = Path.cwd()
    marks = (".git", "pyproject.toml")
    return next((folder for folder in (here, *here.parents) if any((folder / m).exists() for m in marks)), here)


def _is_trusted(file: Path, origin: str) -> bool:
    is_named_by_user = origin.startswith("override ")
    return is_named_by_user or os.environ.get(TRUST_VARIABLE) == "1" or file.is_relative_to(find_project())


def _import_file(path: Path) -> str:
    """Import a Python file once per process; return its path."""
    module_name = f"stackexp_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None:
            raise ImportError("not a Python file; its name must end in .py")
        sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    return str(path)
