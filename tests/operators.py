"""Record the operators that run in a context."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorRecord(TorchDispatchMode):
    """Records each operator with its arguments, keyword arguments and output."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict | None, Any]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs, output))
        return output


def list_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
