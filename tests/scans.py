"""Cases of scans, and comparisons of an implementation with the reference."""

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from stackexp import stack
from stackexp.stack import StackState
from stackexp.stack.feedback import ACTIVATIONS


class Case(NamedTuple):
    """The sizes and options of one scan. `filled` is the number of slots of the first state."""

    num_slots: int
    head_dim: int
    num_heads: int
    num_tokens: int
    discipline: str = "stack"
    read: str = "global"
    read_mask: str = "multiply"
    feedback: str | None = None  # its activation
    scale: float = 1.0  # of the logits; 1000 saturates the actions
    filled: int = 0
    batch_size: int = 2
    dtype: torch.dtype = torch.float64
    cuts: tuple[int, ...] = ()
    hidden: int = 0  # units of the feedback's hidden layer; 0: none

    @property
    def name(self) -> str:
        return "-".join(str(value) for key, value in self._asdict().items() if value != self._field_defaults.get(key))


DISCIPLINES = ["stack", "queue", "push_only"]
READS = [("global", "multiply"), ("global", "log"), ("global", "additive"), ("top", "multiply")]
SHAPES = {"num_slots": [1, 2, 7, 24, 33], "head_dim": [1, 4, 8, 17], "num_heads": [1, 3, 4], "num_tokens": [1, 5, 40]}


def cases() -> Iterator[Case]:
    """Yield all combinations of options with random shapes, each shape alone, and hidden layers of the feedback."""
    rng = random.Random(0)
    products = itertools.product(DISCIPLINES, READS, [None, "identity", "tanh"], [1.0, 50.0])
    for discipline, (read, read_mask), feedback, scale in products:
        sizes = {name: rng.choice(values) for name, values in SHAPES.items()}
        if feedback:  # each token amplifies earlier rounding errors
            sizes["num_tokens"] = min(sizes["num_tokens"], 12)
        filled = rng.choice([0, 1, sizes["num_slots"], sizes["num_slots"] // 2])
        options = {"discipline": discipline, "read": read, "read_mask": read_mask, "feedback": feedback, "scale": scale}
        yield Case(**sizes, **options, filled=filled)
    usual = Case(num_slots=7, head_dim=3, num_heads=2, num_tokens=9)
    for name, values in SHAPES.items():
        for value, (read, feedback) in itertools.product(values, [("top", "tanh"), ("global", None)]):
            yield usual._replace(**{name: value}, read=read, read_mask="log", feedback=feedback, filled=1)
    for units, discipline, (read, read_mask) in zip([1, 8, 13, 64], [*DISCIPLINES, "stack"], READS, strict=True):
        for feedback in ACTIVATIONS:
            yield Case(7, 3, 2, 9, discipline, read, read_mask, feedback, filled=2, hidden=units)
    yield usual._replace(batch_size=0)


def make_inputs(case: Case, device: str) -> list[Tensor]:
    """Return x, logits, query, slots, mask, and with feedback P, Q, and with hidden units V, c.

    x, logits, P and c are not contiguous.
    """
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    B, T, H, D = case.batch_size, case.num_tokens, case.num_heads, case.head_dim
    num_actions = 2 if case.discipline == "push_only" else 3
    mask = torch.rand(B, H, case.filled, generator=generator, dtype=torch.float64).cumprod(-1)
    if case.filled > 1:  # empty: below the smallest normal number
        mask[..., -2:] = torch.finfo(case.dtype).tiny * torch.tensor([0.5, 0.25], dtype=torch.float64)
    inputs = [draw(T, B, D, H).permute(1, 0, 3, 2), draw(T, B, H, num_actions, scale=case.scale).transpose(0, 1)]
    inputs += [draw(1, D).expand(H, D), draw(B, H, case.filled, D) * mask.unsqueeze(-1), mask]
    if case.feedback:
        units = case.hidden or H * D
        gain = 0.3 * (H * D / units) ** 0.5
        inputs += [draw(H, units, D, scale=gain).transpose(0, 1), draw(units, H, num_actions, scale=gain)]
    if case.hidden:
        inner = 2 * case.hidden if case.feedback == "gated" else case.hidden
        inputs += [draw(inner, H * D, scale=0.3), draw(T, B, inner).transpose(0, 1)]
    return [tensor.to(device, case.dtype).requires_grad_() for tensor in inputs]


def scan(implementation: str, case: Case, inputs: list[Tensor]) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
    """Return all outputs and the last state padded to S slots, and the gradients of a random functional of them."""
    x, logits, query, slots, mask, *feedback = inputs
    start = case.num_slots if implementation == "reference" else case.filled
    state = pad_state(StackState(slots, mask), start)
    options = {"num_slots": case.num_slots, "discipline": case.discipline}
    options |= {"read": case.read, "read_mask": case.read_mask}
    if feedback:
        options |= {"feedback_activation": case.feedback}
    parts, outputs = [0, *case.cuts, case.num_tokens], []
    with stack.use_implementation(implementation):
        for begin, end in itertools.pairwise(parts):
            query = query if case.read == "global" else None
            fed = (*feedback[:3], *(given[:, begin:end] for given in feedback[3:])) or None
            output, state = stack.scan(state, x[:, begin:end], logits[:, begin:end], query, fed, **options)
            outputs.append(output)
    values = [torch.cat(fields, 1) for fields in zip(*outputs, strict=True)]
    values += pad_state(state, case.num_slots)
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v) for v in values]
    total = sum((weight * value).sum() for weight, value in zip(weights, values, strict=True))
    return values, torch.autograd.grad(total, inputs, allow_unused=True)


def pad_state(state: StackState, num_slots: int) -> StackState:
    missing = num_slots - state.mask.shape[-1]
    return StackState(F.pad(state.slots, (0, 0, 0, missing)), F.pad(state.mask, (0, missing)))


def run(implementation: str, case: Case, device: str = "cpu") -> list[Tensor]:
    """Return all values and gradients of the case."""
    values, gradients = scan(implementation, case, make_inputs(case, device))
    return [*(value.detach() for value in values), *gradients]


def check_autocast(implementation: str) -> None:
    """Check that autocast around the backward pass does not change the gradients."""
    case, gradients = Case(7, 4, 2, 5, feedback="tanh", dtype=torch.float32), []
    for enabled in (False, True):
        x, logits, query, slots, mask, *maps = make_inputs(case, "cpu")
        with stack.use_implementation(implementation):
            output, _ = stack.scan(StackState(slots, mask), x, logits, query, tuple(maps), num_slots=case.num_slots)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            gradients.append(torch.autograd.grad(output.read.square().sum(), maps))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-6)


def check(implementation: str, case: Case, device: str = "cpu") -> None:
    """Check that values and gradients equal those of the reference, up to rounding."""
    inputs = make_inputs(case, device)
    values, gradients = scan(implementation, case, inputs)
    expected, expected_gradients = scan("reference", case, inputs)
    tolerance = {"rtol": 1e-9, "atol": 1e-11}
    if case.dtype != torch.float64:
        tolerance = {"rtol": 1e-4, "atol": 2e-5 if case.feedback else 1e-5}  # feedback amplifies rounding errors
    if case.read_mask == "additive":  # (1 - M) * 1e9 amplifies the rounding of M in the scores
        tolerance = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(values, expected, **tolerance)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        if theirs is not None:  # the query of `read: top` has none
            # a small gradient of a weight can be a sum over all tokens of large terms, which are rounded
            cancelled = 0.1 * tolerance["rtol"] * theirs.detach().abs().max().item() if theirs.numel() else 0.0
            atol = max(tolerance["atol"], cancelled)
            torch.testing.assert_close(ours, theirs, rtol=tolerance["rtol"], atol=atol)
        else:
            assert ours is None
