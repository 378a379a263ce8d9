"""The memory between layers as two operations: one `step`, and a `scan` over the tokens. Both update, then read.

The state is opaque to callers: make it with `empty`, thread it through. Implementations are modules of this package
with the same `empty`, `step` and `scan`; `reference` is the specification that the others are tested against. All but
`reference` share one form of state, so the step and the scan of one memory may be different implementations'.

Everything is computed in float32 at least (float64 stays float64), also under autocast; so is the state.

Under torch.compile a scan is `eager`'s loop, unrolled: compiling takes time in proportion to the tokens. A warning
says so.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from stackexp.stack import eager, reference
from stackexp.stack.reference import StackOutput, StackState

__all__ = ["StackOutput", "StackState", "empty", "implementation", "scan", "step"]

IMPLEMENTATIONS: dict[str, ModuleType | None] = {  # None: imported when it is first used
    "reference": reference,
    "eager": eager,
    "compiled": None,
    "triton": None,
}
FILES = {"triton": "triton_scan"}  # where the name is another's
# what "auto" is for a scan on a device of this type; otherwise, for steps, and on CUDA without Triton, eager
SCANS = {"cpu": "compiled", "cuda": "triton"}
_wanted = "auto"


@contextlib.contextmanager
def implementation(name: str) -> Iterator[None]:
    """Use the implementation `name`, or "auto", within this context: for tests and benchmarks."""
    global _wanted
    assert name == "auto" or name in IMPLEMENTATIONS, name
    before, _wanted = _wanted, name
    try:
        yield
    finally:
        _wanted = before


def empty(shape: tuple[int, ...], num_slots: int, head_dim: int, like: Tensor) -> StackState:
    """Empty stacks for leading dimensions `shape` (heads included), on the device of `like`."""
    made = reference if _wanted == "reference" else eager
    return made.empty(shape, num_slots, head_dim, _wide(like[..., :0]))


def step(
    state: StackState, x: Tensor, logits: Tensor, query: Tensor | None, **options: str | int
) -> tuple[StackOutput, StackState]:
    """One update and read of every stack. Leading dimensions `...` are any (depth axis: [B, T]).

    x [..., H, D] is what a push would push; logits [..., H, 3] of push, pop, no-op ([..., H, 2] of push, no-op for
    push_only); query [H, D] is w_g, None for `read: top`. Options: num_slots, discipline, read, read_mask.
    """
    with torch.autocast(x.device.type, enabled=False):
        return _pick().step(state, _wide(x), _wide(logits), query if query is None else _wide(query), **options)


def scan(
    state: StackState,
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    feedback: tuple[Tensor, Tensor] | None = None,
    **options: str | int,
) -> tuple[StackOutput, StackState]:
    """`step` for each token in turn. x [B, T, H, D], logits [B, T, H, 3 or 2]; outputs [B, T, H, ...].

    `feedback` = (P [H*D, H, D], Q [H*D, H, 3 or 2]) adds P f(R_{t-1}) to x_t and Q f(R_{t-1}) to the logits of t; the
    option feedback_activation is f, identity or tanh. No tokens leave the state as it is.
    """
    if x.shape[1] == 0:
        x = _wide(x.detach())
        return StackOutput(x, x.new_zeros(*x.shape[:3], 3), x.new_zeros(x.shape[:3]), x.new_zeros(x.shape[:3])), state
    with torch.autocast(x.device.type, enabled=False):
        feedback = feedback and (_wide(feedback[0]), _wide(feedback[1]))
        query = query if query is None else _wide(query)
        return _pick(_for_scan(x)).scan(state, _wide(x), _wide(logits), query, feedback=feedback, **options)


def _pick(automatic: str = "eager") -> ModuleType:
    name = _resolve(automatic)
    return IMPLEMENTATIONS[name] or _load(name)


@torch.compiler.assume_constant_result  # under torch.compile the choice is made, and logged, while tracing
def _resolve(automatic: str) -> str:
    name = automatic if _wanted == "auto" else _wanted
    _log_once(name)
    return name


def _for_scan(x: Tensor) -> str:
    """What "auto" is for a scan of x: eager where operations are recorded, counted or transformed, not computed.

    So it is in forward-mode differentiation, which the kernels do not know: they would lose the tangents.
    """
    if torch.compiler.is_compiling():
        if x.shape[1] > 1:
            _warn_of_unrolling()
        return "eager"
    if _get_current_dispatch_mode() is not None or torch._C._are_functorch_transforms_active():
        return "eager"
    if forward_ad._current_level >= 0:
        return "eager"
    name = SCANS.get(x.device.type, "eager") if type(x) in (Tensor, torch.nn.Parameter) else "eager"
    return "eager" if name == "triton" and not _has_triton() else name


@torch.compiler.assume_constant_result
def _warn_of_unrolling() -> None:
    _warn_of_unrolling_once()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _load(name: str) -> ModuleType:
    module = IMPLEMENTATIONS[name] = importlib.import_module(f"{__name__}.{FILES.get(name, name)}")
    return module


@functools.cache
def _log_once(name: str) -> None:
    logging.getLogger(__name__).info("stack implementation: %s", name)


@functools.cache
def _warn_of_unrolling_once() -> None:
    logging.getLogger(__name__).warning(
        "torch.compile unrolls the scan of a stack over the tokens, which is slow to compile"
    )


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
