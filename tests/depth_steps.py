"""Cases of steps through several layers, and comparisons of an implementation with the reference."""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from scans import DISCIPLINES, READS
from torch import Tensor

from stackexp.stack import StackOutput, dispatch
from stackexp.stack.triton import coefficients, depth_step

F64 = torch.float64


class Case(NamedTuple):
    """The sizes and options of L layers. The last two are of the Triton step."""

    num_slots: int
    head_dim: int
    num_heads: int
    num_layers: int
    discipline: str = "stack"
    read: str = "global"
    read_mask: str = "multiply"
    scale: float = 1.0  # of the logits; 1000 saturates the actions
    leading: tuple[int, ...] = (1, 2)
    dtype: torch.dtype = F64  # of x, logits, query
    segment: int = depth_step.CHECKPOINT_EVERY
    state_dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        return "-".join(str(value) for key, value in self._asdict().items() if value != self._field_defaults.get(key))

    @property
    def options(self) -> dict[str, str | int]:
        return {name: getattr(self, name) for name in ("num_slots", "discipline", "read", "read_mask")}


SIZES = {"num_slots": [1, 2, 7, 24, 33], "head_dim": [1, 4, 16, 17, 64, 240], "num_heads": [1, 3, 4, 8]}
SIZES |= {"num_layers": [1, 2, 5, 12, 26, 40], "leading": [(2, 1), (2, 3)]}
USUAL = Case(num_slots=7, head_dim=5, num_heads=2, num_layers=10)


def cases() -> Iterator[Case]:
    """Yield all combinations of options with random sizes, then each size alone."""
    rng = random.Random(0)
    for discipline, (read, read_mask), scale in itertools.product(DISCIPLINES, READS, [1.0, 1000.0]):
        sizes = {name: rng.choice(values) for name, values in SIZES.items()}
        yield Case(**sizes, discipline=discipline, read=read, read_mask=read_mask, scale=scale)
    for name, values in SIZES.items():
        yield from (USUAL._replace(**{name: value}) for value in values)
    yield USUAL._replace(leading=(2, 0))


def make_inputs(case: Case, device: str = "cpu") -> list[Tensor]:
    """Return x [L, ..., H, D], logits [L, ..., H, 3 or 2] and w_g [L, H, D], whose layers are not contiguous."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(case.num_layers, *shape, generator=generator, dtype=F64).to(device, case.dtype)

    num_actions = 2 if case.discipline == "push_only" else 3
    x = draw(case.head_dim, case.num_heads, *case.leading).movedim((1, 2), (-1, -2))
    logits = (case.scale * draw(num_actions, case.num_heads, *case.leading)).movedim((1, 2), (-1, -2))
    query = draw(1, case.head_dim).expand(-1, case.num_heads, -1)
    return [tensor.requires_grad_() for tensor in (x, logits, query)]


def unroll(name: str, case: Case, inputs: list[Tensor], step: Callable | None = None) -> list[StackOutput]:
    """Return the output of each layer's step, by default that of the implementation (or "coefficients")."""
    x, logits, query = inputs
    is_triton, is_coefficients = name == "triton", name == "coefficients"
    module = coefficients if is_coefficients else dispatch._load_module(dispatch.STEP_MODULES[name])
    kwargs = {"dtype": case.state_dtype} if is_triton or is_coefficients else {}
    kwargs |= {"num_updates": case.num_layers} if is_coefficients else {}
    state = module.empty((*case.leading, case.num_heads), case.num_slots, case.head_dim, x, **kwargs)
    options = case.options | ({"checkpoint_every": case.segment} if is_triton else {})
    outputs = []
    for layer in range(case.num_layers):
        layer_query = query[layer] if case.read == "global" else None
        output, state = (step or module.step)(state, x[layer], logits[layer], layer_query, **options)
        outputs.append(output)
    return outputs


def stack_outputs(outputs: list[StackOutput]) -> dict[str, Tensor]:
    """Return the outputs of all layers: name -> [L, ...]."""
    return {name: torch.stack([getattr(o, name) for o in outputs]) for name in StackOutput._fields}


def draw_weights(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of reads, actions and entropies in a functional, on the device of the values."""
    generator = torch.Generator().manual_seed(4)
    values = {name: values[name] for name in ("read", "action", "entropy")}
    return {name: torch.randn(v.shape, generator=generator, dtype=F64).to(v) for name, v in values.items()}


def differentiate(
    outputs: list[StackOutput], inputs: list[Tensor], weights: dict[str, Tensor] | None = None
) -> dict[str, Tensor | None]:
    """Return the outputs of all layers and the gradients of a functional, by default with random weights.

    Drawing the weights copies from the CPU; a CUDA graph needs weights that were drawn before its capture.
    """
    values = stack_outputs(outputs)
    weights = draw_weights(values) if weights is None else weights
    total = sum((weight * values[name]).sum() for name, weight in weights.items())
    gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    found = {name: value.detach() for name, value in values.items()}
    return found | dict(zip(("to_x", "to_logits", "to_query"), gradients, strict=True))


def compute(name: str, case: Case, inputs: list[Tensor], step: Callable | None = None) -> dict:
    """Return all outputs and gradients of a case."""
    return differentiate(unroll(name, case, inputs, step), inputs)


@contextlib.contextmanager
def fill_new_tensors() -> Iterator[None]:
    """Fill new tensors with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(name: str, case: Case, device: str = "cpu") -> None:
    """Check that values and gradients equal those of the reference in float64, and depend on no unwritten memory."""
    inputs = make_inputs(case, device)
    with fill_new_tensors():
        found = compute(name, case, inputs)
    tolerance = {"rtol": 1e-12, "atol": 1e-12 * case.scale}
    if case.read_mask == "additive":  # (1 - M) * 1e9 amplifies the rounding of M in the scores
        tolerance = {"rtol": 1e-5, "atol": 1e-6 * case.scale}
    torch.testing.assert_close(found, compute("reference", case, inputs), **tolerance)


def check_errors(name: str, case: Case, device: str = "cpu") -> None:
    """Check that root mean square errors are at most twice those of the reference in the same dtype.

    Errors below the rounding of the result, plus that of six float32 operations, always pass.
    """
    inputs = make_inputs(case, device)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = compute("reference", case, exact_inputs)
    ours, theirs = (compute(each, case, inputs) for each in (name, "reference"))
    for key, value in exact.items():
        errors = [(found[key].double() - value).square().mean().sqrt().item() for found in (ours, theirs)]
        rounding = torch.finfo(case.dtype).eps / 2 + 6 * torch.finfo(torch.float32).eps
        rounding = rounding * value.square().mean().sqrt().item() + torch.finfo(F64).eps
        assert errors[0] <= max(2 * errors[1], rounding), (key, errors, rounding)
