"""A faster start: torchmetrics does not import the large packages that only its metrics of images and texts need.

mosaicml-streaming requires torchvision and transformers, so every installation has them. torchmetrics imports what is
installed of `OPTIONAL`, and Lightning imports torchmetrics. Without them, `fit` needs 7 seconds of a core to start
instead of 12. A plugin that uses such a metric imports torchmetrics before Lightning and gets all of it.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest import mock

IMPORTER = "lightning.fabric.utilities.imports"
OPTIONAL = {"matplotlib", "scipy", "torchvision", "transformers"}


def hide_optional_packages() -> None:
    """Hide `OPTIONAL` from torchmetrics when Lightning imports it in this process."""
    if "torchmetrics" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "torchmetrics" or IMPORTER not in sys.modules:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: _hide_while(load, module)  # type: ignore[method-assign]
        return spec


def _hide_while(load: Any, module: ModuleType) -> None:
    from lightning_utilities.core import imports

    is_met, is_available = imports.RequirementCache.__bool__, imports.package_available

    def is_shown(cache: imports.RequirementCache) -> bool:
        return str(cache.requirement).split(">")[0] not in OPTIONAL and is_met(cache)

    with (
        mock.patch.object(imports.RequirementCache, "__bool__", is_shown),
        mock.patch.object(imports, "package_available", lambda name: name not in OPTIONAL and is_available(name)),
    ):
        load(module)
