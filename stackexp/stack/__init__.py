"""The memory between layers as two operations: one `step`, and a `scan` over the tokens. Both update, then read.

The state is opaque to callers: make it with `empty`, thread it through. Implementations are modules of this package
with the same `empty` and `step`, or `scan`; `reference` is the specification that the others are tested against. A
state has one of three forms: slots and mask (scans, and the steps of `reference`, `eager` and `compiled`),
coefficients, and the last stack kept with what was pushed since (`triton_depth`). A step is that of its state's form.

Everything is computed in float32 at least (float64 stays float64), also under autocast; so is the state, but for what
`triton_depth` is told to keep in bfloat16.

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
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from stackexp.stack import coefficients, eager, reference
from stackexp.stack.coefficients import CoefficientState
from stackexp.stack.reference import StackOutput, StackState
from stackexp.stack.triton import depth as triton_depth
from stackexp.stack.triton.depth import DepthState

__all__ = ["StackOutput", "StackState", "empty", "implementation", "scan", "step"]

IMPLEMENTATIONS: dict[str, tuple[str, str]] = {  # name -> the modules of its steps and of its scans
    "reference": ("reference", "reference"),
    "eager": ("eager", "eager"),
    "coefficients": ("coefficients", "eager"),
    "compiled": ("numba.scan", "numba.scan"),
    "triton": ("triton.depth", "triton.scan"),
}
# what "auto" is for a scan on a device of this type; otherwise, and on CUDA without Triton, eager
SCANS = {"cpu": "compiled", "cuda": "triton"}
_modules = {"reference": reference, "eager": eager, "coefficients": coefficients, "triton.depth": triton_depth}
_wanted = "auto"


@contextlib.contextmanager
def implementation(name: str) -> Iterator[None]:
    """Use the implementation `name`, or "auto", within this context: for tests and benchmarks.

    It says what states are made and what takes those of slots; `empty` and `step` belong into the same context.
    """
    global _wanted
    assert name == "auto" or name in IMPLEMENTATIONS, name
    before, _wanted = _wanted, name
    try:
        yield
    finally:
        _wanted = before


def empty(
    shape: tuple[int, ...],
    num_slots: int,
    head_dim: int,
    like: Tensor,
    layers: int | None = None,
    dtype: torch.dtype | None = None,
) -> StackState | CoefficientState | DepthState:
    """Empty stacks for leading dimensions `shape` (heads included), on the device of `like`.

    `layers`: how many steps will follow; None: a scan. `dtype`: of what `triton_depth` keeps of the contents; None: as
    `like`.
    """
    made = _form(head_dim, like, layers)
    if made is triton_depth:
        return made.empty(shape, num_slots, head_dim, like[..., :0], dtype=dtype)
    return made.empty(shape, num_slots, head_dim, _wide(like[..., :0]))


def _form(head_dim: int, like: Tensor, layers: int | None) -> ModuleType:
    """Whose states are made. "auto" for steps: on CUDA Triton's; on a CPU slots, for `compiled`; where torch's own
    operations are all there is (torch.compile on a CPU, torch.func) the form of fewer numbers, a slot of `head_dim` or
    one coefficient for each of the `layers`."""
    if _wanted == "reference":
        return reference
    if layers is None or _wanted in ("eager", "compiled"):
        return eager
    if _wanted != "auto":
        return _modules[IMPLEMENTATIONS[_wanted][0]]
    if like.device.type == "cuda" and not _is_transformed() and _has_triton():
        return triton_depth
    return coefficients if _of_slots(like) == "eager" and head_dim >= layers else eager


def step(
    state: StackState | CoefficientState | DepthState,
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    segment: int | None = None,
    **options: str | int,
) -> tuple[StackOutput, Any]:
    """One update and read of every stack. Leading dimensions `...` are any (depth axis: [B, T]).

    x [..., H, D] is what a push would push; logits [..., H, 3] of push, pop, no-op ([..., H, 2] of push, no-op for
    push_only); query [H, D] is w_g, None for `read: top`. Options: num_slots, discipline, read, read_mask. `segment`:
    see `triton_depth`; it changes no value.
    """
    with torch.autocast(x.device.type, enabled=False):
        if isinstance(state, DepthState):
            _say("triton")
            kept = {} if segment is None else {"segment": segment}
            return triton_depth.step(state, x, logits, query, **kept, **options)
        name = "coefficients" if isinstance(state, CoefficientState) else _resolve(_of_slots(x))
        _say(name)
        query = query if query is None else _wide(query)
        return _load(IMPLEMENTATIONS[name][0]).step(state, _wide(x), _wide(logits), query, **options)


def scan(
    state: StackState,
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    feedback: tuple[Tensor, ...] | None = None,
    **options: str | int,
) -> tuple[StackOutput, StackState]:
    """`step` for each token in turn. x [B, T, H, D], logits [B, T, H, 3 or 2]; outputs [B, T, H, ...].

    `feedback` = (P [m, H, D], Q [m, H, 3 or 2]) adds P u_t to x_t and Q u_t to the logits of t, where u_t = f(R_{t-1})
    and m = H*D; with two more, V [m, H*D] and c [B, T, m], u_t = f(c_t + V R_{t-1}). The option feedback_activation is
    f: identity, tanh, or gated, a product of two tanh, for which V and c have 2 m rows. No tokens leave the state as it
    is.
    """
    if x.shape[1] == 0:
        x = _wide(x.detach())
        return StackOutput(x, x.new_zeros(*x.shape[:3], 3), x.new_zeros(x.shape[:3]), x.new_zeros(x.shape[:3])), state
    with torch.autocast(x.device.type, enabled=False):
        feedback = feedback and tuple(map(_wide, feedback))
        query = query if query is None else _wide(query)
        name = _resolve(_for_scan(x))
        _say(name)
        module = _load(IMPLEMENTATIONS[name][1])
        return module.scan(state, _wide(x), _wide(logits), query, feedback=feedback, **options)


@torch.compiler.assume_constant_result  # under torch.compile the choice is made while tracing
def _resolve(automatic: str) -> str:
    return automatic if _wanted == "auto" else _wanted


def _of_slots(x: Tensor) -> str:
    """What "auto" is for the steps of x whose state is of slots."""
    return "compiled" if x.device.type == "cpu" and _is_computed(x) else "eager"


def _for_scan(x: Tensor) -> str:
    """What "auto" is for a scan of x."""
    if torch.compiler.is_compiling() and x.shape[1] > 1:
        _warn_of_unrolling()
    name = SCANS.get(x.device.type, "eager") if _is_computed(x) else "eager"
    return "eager" if name == "triton" and not _has_triton() else name


def _is_computed(x: Tensor) -> bool:
    """Whether operations are computed here and now, not recorded, counted or transformed."""
    if torch.compiler.is_compiling() or _is_transformed() or _get_current_dispatch_mode() is not None:
        return False
    return type(x) in (Tensor, torch.nn.Parameter)


def _is_transformed() -> bool:
    """By torch.func or in forward-mode differentiation, which kernels do not know: they would lose the tangents."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


@torch.compiler.assume_constant_result
def _warn_of_unrolling() -> None:
    _warn_of_unrolling_once()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _load(name: str) -> ModuleType:
    if name not in _modules:
        _modules[name] = importlib.import_module(f"{__name__}.{name}")
    return _modules[name]


@torch.compiler.assume_constant_result
def _say(name: str) -> None:
    _log_once(name)


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
