"""Cases of depth steps through several layers, and comparisons of an implementation with the reference."""

import itertools
import random
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from stackexp.stack import reference


class Case(NamedTuple):
    """The sizes and options of L layers of B x T tokens."""

    num_slots: int
    head_dim: int
    num_heads: int
    num_layers: int
    discipline: str = "stack"
    read: str = "global"
    read_mask: str = "multiply"
    scale: float = 1.0  # of the logits; 1000 saturates the actions
    num_tokens: int = 3
    dtype: torch.dtype = torch.float64

    @property
    def name(self) -> str:
        how = self.read if self.read == "top" else self.read_mask
        sizes = f"S{self.num_slots}-D{self.head_dim}-H{self.num_heads}-L{self.num_layers}-T{self.num_tokens}"
        return "-".join([sizes, self.discipline, how, str(self.dtype)[6:], *(["saturated"] if self.scale > 1 else [])])

    @property
    def options(self) -> dict[str, str | int]:
        return {name: getattr(self, name) for name in ("num_slots", "discipline", "read", "read_mask")}


DISCIPLINES = ["stack", "queue", "push_only"]
READS = [("global", "multiply"), ("global", "log"), ("global", "additive"), ("top", "multiply")]
SIZES = {"num_slots": [1, 2, 7, 24, 33], "head_dim": [1, 4, 16, 17, 64, 240], "num_heads": [1, 3, 4, 8]}
SIZES |= {"num_layers": [1, 2, 5, 12, 26, 40], "num_tokens": [1, 3]}
USUAL = Case(num_slots=7, head_dim=5, num_heads=2, num_layers=10)


def cases() -> Iterator[Case]:
    """Yield all combinations of options with random sizes, then each size alone."""
    rng = random.Random(0)
    for discipline, (read, read_mask), scale in itertools.product(DISCIPLINES, READS, [1.0, 1000.0]):
        sizes = {name: rng.choice(values) for name, values in SIZES.items()}
        yield Case(**sizes, discipline=discipline, read=read, read_mask=read_mask, scale=scale)
    for name, values in SIZES.items():
        yield from (USUAL._replace(**{name: value}) for value in values)
    yield USUAL._replace(num_tokens=0)


def make_inputs(case: Case) -> list[Tensor]:
    """Return x [L, B, T, H, D] and logits [L, B, T, H, 3 or 2], not contiguous, and w_g [L, H, D]."""
    generator = torch.Generator().manual_seed(3)
    layers, tokens, heads, size = case.num_layers, case.num_tokens, case.num_heads, case.head_dim
    shapes = [(layers, 2, size, heads, tokens), (layers, heads, 2, tokens, 2 if case.discipline == "push_only" else 3)]
    x, logits = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    query = torch.randn(layers, 1, size, generator=generator, dtype=torch.float64).expand(-1, heads, -1)
    inputs = [x.permute(0, 1, 4, 3, 2), case.scale * logits.permute(0, 2, 3, 1, 4), query]
    return [tensor.to(case.dtype).requires_grad_() for tensor in inputs]


def unroll(implementation: ModuleType, case: Case, inputs: list[Tensor]) -> list[Tensor]:
    """Return read, action, entropy and occupancy [L, B, T, H, ...]."""
    x, logits, query = inputs
    state, outputs = implementation.empty(x.shape[1:4], case.num_slots, case.head_dim, x), []
    for layer in range(case.num_layers):
        layer_query = query[layer] if case.read == "global" else None
        output, state = implementation.step(state, x[layer], logits[layer], layer_query, **case.options)
        outputs.append(output)
    return [torch.stack(values) for values in zip(*outputs, strict=True)]


def differentiate(values: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a random functional of the values."""
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v) for v in values]
    total = sum((weight * value).sum() for weight, value in zip(weights, values, strict=True))
    return torch.autograd.grad(total, inputs, allow_unused=True)


def check(implementation: ModuleType, case: Case) -> None:
    """Check that values and gradients equal those of the reference in float64."""
    inputs = make_inputs(case)
    values, expected = (unroll(module, case, inputs) for module in (implementation, reference))
    tolerance = {"rtol": 1e-9, "atol": 1e-11}
    if case.read_mask == "additive":  # (1 - M) * 1e9 amplifies the rounding of M in the scores
        tolerance = {"rtol": 1e-5, "atol": 1e-6 * max(1.0, case.scale)}
    torch.testing.assert_close(values, expected, **tolerance)
    pairs = zip(differentiate(values, inputs), differentiate(expected, inputs), strict=True)
    for ours, theirs in pairs:
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, **tolerance)


def check_rounding(implementation: ModuleType, case: Case, query_scale: float, factor: float) -> None:
    """Check that float32 errors are at most `factor` times those of the reference."""
    x, logits, query = (tensor.detach() for tensor in make_inputs(case._replace(dtype=torch.float32)))
    inputs = [tensor.requires_grad_() for tensor in (x, logits, query_scale * query)]
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = unroll(reference, case, exact_inputs)
    exact += differentiate(exact, exact_inputs)
    errors = []
    for module in (implementation, reference):
        values = unroll(module, case, inputs)
        values += differentiate(values, inputs)
        errors.append(
            [compute_relative_error(value, true) for value, true in zip(values, exact, strict=True) if true is not None]
        )
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= factor * theirs + torch.finfo(torch.float32).eps, (errors, case.name)


def compute_relative_error(value: Tensor, true: Tensor) -> float:
    """Return the root mean square error divided by the root mean square of the true values."""
    value, true = value.detach().double(), true.detach()
    return float((value - true).square().mean().sqrt() / true.square().mean().sqrt().clamp_min(1e-30))
