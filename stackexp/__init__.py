"""stackexp: what does a differentiable stack between Transformer layers gain, and at what cost?"""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `load_run` on first use, because it needs torch."""
    if name == "load_run":
        return importlib.import_module("stackexp.evaluation.loading").load_run
    raise AttributeError(f"module 'stackexp' has no attribute {name!r}")
