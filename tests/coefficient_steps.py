"""Checks of the depth axis in coefficient form that run in a process with Triton's interpreter, or on a GPU."""

import contextlib
import functools
from collections.abc import Iterator

import pytest
import torch
from depth_steps import Case, compute, differentiate, make_inputs, unroll
from small_models import make_model, make_tokens
from torch.utils.checkpoint import checkpoint
from triton_steps import SavedBytes

from stackexp import stack
from stackexp.inspection.interventions import Intervention, clear, intervene
from stackexp.stack.triton import coefficients


@contextlib.contextmanager
def fill_new_tensors() -> Iterator[None]:
    """Fill new tensors with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(case: Case, device: str = "cpu") -> None:
    """Check that values and gradients equal those of the reference in float64, and depend on no unwritten memory."""
    inputs = make_inputs(case, device)
    with fill_new_tensors():
        found = compute("coefficients", case, inputs)
    tolerance = {"rtol": 1e-12, "atol": 1e-12 * case.scale}
    if case.read_mask == "additive":  # (1 - M) * 1e9 amplifies the rounding of M in the scores
        tolerance = {"rtol": 1e-5, "atol": 1e-6 * case.scale}
    torch.testing.assert_close(found, compute("reference", case, inputs), **tolerance)


def check_layers_without_gradients() -> None:
    """Only some outputs have gradients: those of the first layers, of the last, or no read."""
    functionals = [
        lambda outputs: outputs[1].read.square().sum() + outputs[3].entropy.sum(),
        lambda outputs: outputs[-1].read.square().sum(),
        lambda outputs: torch.stack([o.entropy.mean() for o in outputs]).mean(),
        lambda outputs: outputs[2].action[..., 0].sum() + outputs[0].read.sum(),
    ]
    case = Case(3, 4, 1, 6)
    for functional in functionals:
        found = []
        for name in ("coefficients", "reference"):
            inputs = make_inputs(case)
            total = functional(unroll(name, case, inputs))
            found.append(torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True))
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def check_recomputed_layers() -> None:
    """Activation checkpointing writes the history again, which the backward pass of higher layers has overwritten."""
    case, found = Case(3, 4, 2, 5), []
    inputs = make_inputs(case)
    for step in (None, functools.partial(checkpoint, coefficients.step, use_reentrant=False)):
        saved = SavedBytes()
        with saved:
            outputs = unroll("coefficients", case, inputs, step)
        found.append((saved.count(), differentiate(outputs, inputs)))
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=0)
    assert found[1][0] < found[0][0]


def check_second_backward_pass() -> None:
    case = Case(3, 4, 1, 3)
    inputs = make_inputs(case)
    outputs = unroll("coefficients", case, inputs)
    total = sum(output.read.sum() for output in outputs)
    torch.autograd.grad(total, inputs, retain_graph=True)
    for again in (total, outputs[1].read.sum()):
        with pytest.raises(RuntimeError, match="the backward pass runs once for each forward pass"):
            torch.autograd.grad(again, inputs, retain_graph=True)


def count_saved_bytes(case: Case) -> tuple[int, int]:
    """Return the bytes that autograd saves in all layers, and those of the history."""
    inputs, saved = make_inputs(case), SavedBytes()
    with saved:
        unroll("coefficients", case, inputs)
    return saved.count(), case.num_layers * inputs[0][0].numel() * case.state_dtype.itemsize


def check_model(**memory: str) -> None:
    """Check a model with long vectors against the eager implementation, also recomputed, evaluated and changed."""
    memory |= {
        "axis": "depth",
        "projection": "none",
        "num_heads": 1,
        "head_dim": 128,
        "num_slots": 3,
        "eval_num_slots": 5,
    }
    sizes = {"hidden_size": 128, "num_layers": 4}
    model, tokens, found = make_model(memory, **sizes), make_tokens(), []
    cleared = Intervention("x", state=lambda _, state: clear(state), layer=2)
    for name, recompute in (("eager", False), ("triton", False), ("triton", True)):
        model.checkpoint_blocks = recompute
        with stack.use_implementation(name):
            state = model.memories[0].empty_state(model.embedding(tokens))
            assert isinstance(state, coefficients.CoefficientState) == (name == "triton")
            output = model.train()(tokens)
            total = output.logits.logsumexp(-1).sum() + output.entropy
            found.append([output.logits, *torch.autograd.grad(total, list(model.parameters()))])
            with torch.no_grad(), intervene(model.eval(), cleared):
                found[-1].append(model(tokens).logits)
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], rtol=1e-10, atol=1e-10)
