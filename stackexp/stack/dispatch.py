"""The choice of the stack implementation.

auto        CPU: numba. CUDA: triton, if it is installed. Otherwise eager.
reference   the specification; slow
eager       plain PyTorch, on any device
numba       compiled kernels for the CPU
triton      compiled kernels for CUDA; the depth axis in coefficient form where that moves fewer bytes

auto also selects eager for what the kernels do not support: torch.compile, torch.func, forward-mode differentiation,
tensor subclasses and dispatch modes (fake tensors, FLOP counters), except those of selective checkpointing. The Triton
depth step does support torch.compile and dispatch modes; its coefficient form does not.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from stackexp.stack import eager, reference
from stackexp.stack.triton import coefficients, depth_step

STEP_MODULES = {"reference": "reference", "eager": "eager", "numba": "numba.time_scan", "triton": "triton.depth_step"}
SCAN_MODULES = STEP_MODULES | {"triton": "triton.time_scan"}
IMPLEMENTATIONS = tuple(STEP_MODULES)
CHECKPOINT_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
"""Dispatch modes of selective checkpointing, which run all operators: in the forward pass, and when recomputing."""
HAS_TRITON = importlib.util.find_spec("triton") is not None  # a constant: find_spec would break a compiled graph

_logger = logging.getLogger("stackexp.stack")
_loaded_modules = {"reference": reference, "eager": eager, "triton.depth_step": depth_step}
_requested = "auto"


@contextlib.contextmanager
def use_implementation(name: str) -> Iterator[None]:
    """Use the implementation `name`, or "auto", within this context, for tests and benchmarks.

    Create a state in the same context in which it is updated.
    """
    global _requested
    assert name == "auto" or name in IMPLEMENTATIONS, name
    previous, _requested = _requested, name
    try:
        yield
    finally:
        _requested = previous


def choose_state_module(like: Tensor, axis: str) -> ModuleType:
    """Return the module that creates the state for tensors like `like`, on the axis "depth" or "time"."""
    assert axis in ("depth", "time"), axis
    if _requested == "reference":
        return reference
    use_triton = like.device.type == "cuda" and not _is_transformed() and HAS_TRITON
    if axis == "depth" and (_requested == "triton" or (_requested == "auto" and use_triton)):
        return depth_step
    return eager


def uses_coefficients(like: Tensor, num_updates: int, num_slots: int, head_dim: int) -> bool:
    """Return True if the Triton depth axis has a state in coefficient form for tensors like `like`."""
    return _is_executed_eagerly(like) and coefficients.is_cheaper(num_updates, num_slots, head_dim)


def choose_step_module(x: Tensor) -> ModuleType:
    """Return the module that updates a `StackState` with x, and log the choice."""
    automatic = "numba" if x.device.type == "cpu" and _is_executed_eagerly(x) else "eager"
    return _load_module(STEP_MODULES[_select(automatic)])


def choose_plain_module() -> ModuleType:
    """Return the module that updates a `StackState` for an option that the kernels do not have."""
    return _load_module("reference" if _select("eager") == "reference" else "eager")


def choose_scan_module(x: Tensor) -> ModuleType:
    """Return the module that scans the tokens of x, and log the choice."""
    if torch.compiler.is_compiling() and x.shape[1] > 1:
        text = "torch.compile unrolls the stack scan over the tokens, which takes long; set trainer.compile=false"
        log_once(logging.WARNING, text)
    automatic = _kernels_for(x.device.type) if _is_executed_eagerly(x) else "eager"
    return _load_module(SCAN_MODULES[_select(automatic)])


def choose_products(h: Tensor, dtype: torch.dtype) -> ModuleType | None:
    """Return the module with the fused products for h, or None for separate operations; log the choice on CUDA.

    They exist for CUDA. `dtype`, that of the products, must have 16 bits; float32 requires the implementation `triton`,
    because PyTorch's products are faster. With `triton`, a fake h gets what `auto` would choose on CUDA, so that `plan`
    counts that memory.
    """
    is_fake = _requested == "triton" and isinstance(h, FakeTensor)
    if _requested in ("reference", "eager") or not (is_fake or _is_executed_eagerly(h)):
        return None
    is_interpreted = _requested == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    can_run = is_fake or is_interpreted or h.device.type == "cuda"
    is_slow = dtype == torch.float32 and (is_fake or _requested != "triton")
    if not (HAS_TRITON and can_run) or is_slow or dtype == torch.float64 or _requested == "numba":
        return None
    if not is_fake:
        log_once(logging.INFO, "stack projections: triton")
    return _load_module("triton.projection")


def _kernels_for(device_type: str) -> str:
    if device_type == "cpu":
        return "numba"
    return "triton" if device_type == "cuda" and HAS_TRITON else "eager"


@torch.compiler.assume_constant_result  # under torch.compile the choice is made once, while tracing
def _select(automatic: str) -> str:
    if _requested != "auto":
        return _requested  # not logged: the probes of validations use eager
    log_once(logging.INFO, f"stack implementation: {automatic}")
    return automatic


@torch.compiler.assume_constant_result  # functools.cache alone would be traced, with a warning
def log_once(level: int, message: str) -> None:
    """Log a message once per process."""
    _log_once(level, message)


@functools.cache
def _log_once(level: int, message: str) -> None:
    _logger.log(level, message)


def _is_executed_eagerly(x: Tensor) -> bool:
    """Return True if operations on x run now, instead of being traced, counted or transformed."""
    if torch.compiler.is_compiling() or _is_transformed():
        return False
    if not all(isinstance(mode, CHECKPOINT_MODES) for mode in _get_current_dispatch_mode_stack()):
        return False
    return type(x) in (Tensor, torch.nn.Parameter)


def _is_transformed() -> bool:
    """Return True within torch.func or forward-mode differentiation, where kernels would lose the tangents."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _load_module(name: str) -> ModuleType:
    """Import numba and Triton only when they are used."""
    if name not in _loaded_modules:
        _loaded_modules[name] = importlib.import_module(f"stackexp.stack.{name}")
    return _loaded_modules[name]
