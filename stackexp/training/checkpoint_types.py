"""Compare the types in the state of a checkpoint with those that a run expects, before anything is restored."""

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stackexp.models.checkpoints import STATE
from stackexp.runs import damaged_error


def check_structure(path: Path, state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare the types in a state with those in `expected`, a state of the same run without that of callbacks.

    Raises DamagedCheckpointError if a value is missing or of another type, or a list is of another length.
    """
    restored = {"accumulate_grad_batches": 1, "tokens": 0, "torch_rng": torch.get_rng_state()}
    restored["python_rng"] = (*random.getstate()[:2], None)  # the last is a number or None
    parts: dict[str, Any] = {"stackexp": restored, "losses": [], "callbacks": {}}
    parts |= {key: expected[key] for key in ("loops", "lr_schedulers")}
    if "data_record" in state:
        parts["data_record"] = {"hash": "", "sequences": [], "sources": {}}
    if mismatch := _find_mismatch(state, parts, STATE):
        raise damaged_error(path, mismatch)


def _find_mismatch(value: Any, expected: Any, name: str) -> str | None:
    """Return where and how a nested value differs from an expected one in its types or sizes, or None.

    None matches everything, and an empty list matches a list of numbers.
    """
    items: list[tuple[Any, Any, str]] = []
    if isinstance(expected, dict) and isinstance(value, dict):
        items = [(value.get(key), item, f"{name}: {key}") for key, item in expected.items()]
    elif isinstance(expected, list | tuple) and isinstance(value, list | tuple) and not expected:
        items = [(item, 0.0, f"{name}: {i}") for i, item in enumerate(value)]
    elif isinstance(expected, list | tuple) and isinstance(value, list | tuple) and len(value) == len(expected):
        items = [(*pair, f"{name}: {i}") for i, pair in enumerate(zip(value, expected, strict=True))]
    elif isinstance(expected, Tensor) and isinstance(value, Tensor):
        if (value.dtype, value.shape) != (expected.dtype, expected.shape):
            return f"{name} is of another type or shape"
    elif expected is not None and type(value) not in ({int, float} if type(expected) is float else {type(expected)}):
        return f"{name} is {value!r:.40}"
    elif isinstance(expected, list | tuple):
        return f"{name} has {len(value)} values instead of {len(expected)}"
    return next(filter(None, (_find_mismatch(*item) for item in items)), None)
