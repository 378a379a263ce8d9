"""stackexp: what does a differentiable stack between Transformer layers gain, and at what cost?"""

import importlib
from typing import Any

__version__ = "0.1.0"
_LAZY = {"load_run": "stackexp.evaluation.loading", "load_runs": "stackexp.frame"}


def __getattr__(name: str) -> Any:
    """Import `load_run` and `load_runs` on first use, because they need torch and pandas."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'stackexp' has no attribute {name!r}")
