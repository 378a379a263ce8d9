"""Plugins: Python files and modules, named in a config, that register further kinds."""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path

from stackexp.config.validation import mistake
from stackexp.config.yaml_files import Leaf


def import_plugin(name: Leaf, folder: Path) -> str:
    """Import a Python file (beside the config or in the working directory) or module; its name for config.yaml."""
    places = [place / name.value for place in (folder, Path())]
    files = [p for place in places for p in (place, Path(f"{place}.py")) if p.is_file()]
    try:
        if not files:
            importlib.import_module(name.value)
            return name.value
        path = files[0].resolve()
        module_name = f"stackexp_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if module_name not in sys.modules:
            spec = importlib.util.spec_from_file_location(module_name, path)
            sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[module_name]
                raise
        return str(path)
    except Exception as error:
        where = " and ".join(dict.fromkeys(str(place) for place in places))
        missing = isinstance(error, ModuleNotFoundError) and error.name == name.value.split(".")[0]
        why = f"no file {where}, no module of that name" if missing else f"{type(error).__name__}: {error}"
        raise mistake(name.origin, "plugins", f"cannot import {name.value!r}: {' '.join(why.split())}") from error
