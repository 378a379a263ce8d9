"""Tests of the eager implementation against the reference, and of the choice of an implementation."""

import contextlib
import itertools
import logging

import pytest
import torch

from stackexp import stack
from stackexp.stack import dispatch, eager, reference

B, H, D, L = 3, 2, 3, 30
DISCIPLINES = ["stack", "queue", "push_only"]
READS = [("global", "multiply"), ("global", "log"), ("global", "additive"), ("top", "multiply")]


def make_inputs(discipline, scale, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(L, B, H, D, generator=generator, dtype=dtype)
    logits = scale * torch.randn(L, B, H, 2 if discipline == "push_only" else 3, generator=generator, dtype=dtype)
    return [
        x.requires_grad_(),
        logits.requires_grad_(),
        torch.randn(H, D, generator=generator, dtype=dtype, requires_grad=True),
    ]


def unroll(implementation, inputs, **options):
    """Return the outputs of L steps, the last state padded to S slots, and the gradients of a random functional."""
    x, logits, query = inputs
    state = implementation.empty((B, H), options["num_slots"], D, x)
    outputs = []
    for t in range(L):
        output, state = implementation.step(state, x[t], logits[t], query, **options)
        outputs.append(output)
    fields = [torch.stack(values) for values in zip(*outputs, strict=True)]
    missing = options["num_slots"] - state.mask.shape[-1]
    slots = torch.nn.functional.pad(state.slots, (0, 0, 0, missing))
    fields += [slots, torch.nn.functional.pad(state.mask, (0, missing))]
    generator = torch.Generator().manual_seed(4)
    total = sum((f * torch.randn(f.shape, generator=generator, dtype=f.dtype)).sum() for f in fields)
    return fields, torch.autograd.grad(total, inputs, allow_unused=True)


@pytest.mark.parametrize("num_slots", [1, 2, 7, 24, 40])
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_equals_the_reference(discipline, num_slots):
    for (read, read_mask), scale in itertools.product(READS, [1.0, 1000.0]):  # 1000: saturated actions
        inputs = make_inputs(discipline, scale)
        options = {"num_slots": num_slots, "discipline": discipline, "read": read, "read_mask": read_mask}
        values, gradients = unroll(eager, inputs, **options)
        expected, expected_gradients = unroll(reference, inputs, **options)
        # (1 - M) * 1e9 amplifies the rounding of M in the scores
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if read_mask == "additive" else {"rtol": 1e-9, "atol": 1e-11}
        torch.testing.assert_close(values, expected, **tolerance)
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, **tolerance)


def test_state_holds_only_occupied_slots():
    x, logits, query = make_inputs("stack", 1.0)
    state = eager.empty((B, H), 4, D, x)
    for t, expected in enumerate([1, 2, 3, 4, 4, 4]):
        _, state = eager.step(state, x[t], logits[t], query, num_slots=4)
        assert state.slots.shape == (B, H, expected, D)
        assert state.mask.shape == (B, H, expected)


@pytest.mark.parametrize(("activation", "units"), [("identity", None), ("tanh", 5), ("gated", 5)])
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_feedback_scan_equals_the_reference(discipline, activation, units):
    x, logits, query = (tensor.detach() for tensor in make_inputs(discipline, 1.0))
    x, logits = x.transpose(0, 1), logits.transpose(0, 1)  # [B, L, H, D], not contiguous
    generator = torch.Generator().manual_seed(5)
    shapes = [(units or H * D, H, n) for n in (D, logits.shape[-1])]
    if units:
        inner = 2 * units if activation == "gated" else units
        shapes += [(inner, H * D), (*x.shape[:2], inner)]
    maps = [0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    results = []
    for name in ("eager", "reference"):
        tensors = [tensor.clone().requires_grad_() for tensor in (x, logits, query, *maps)]
        with stack.use_implementation(name):
            state = stack.empty((B, H), 7, D, x)
            options = {"num_slots": 7, "discipline": discipline}
            options |= {"feedback": tuple(tensors[3:]), "feedback_activation": activation}
            output, _ = stack.scan(state, *tensors[:3], **options)
        results.append((output, torch.autograd.grad(output.read.square().sum() + output.entropy.sum(), tensors)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("read", ["global", "top"])
def test_first_token_receives_no_feedback(read):
    """The read of an empty stack, R_{-1}, is 0."""
    x, logits, query = make_inputs("stack", 1.0)
    feedback = (torch.randn(H * D, H, D).double(), torch.randn(H * D, H, 3).double())
    options = {"num_slots": 7, "read": read}
    state = stack.empty((B, H), 7, D, x)
    plain, _ = stack.scan(state, x[:1].transpose(0, 1), logits[:1].transpose(0, 1), query, **options)
    fed, _ = stack.scan(state, x[:1].transpose(0, 1), logits[:1].transpose(0, 1), query, feedback, **options)
    torch.testing.assert_close(fed, plain)


def test_step_computes_in_float32_under_autocast():
    x, logits, query = (tensor.detach().bfloat16() for tensor in make_inputs("stack", 1.0))
    state = stack.empty((B, H), 7, D, x)
    with torch.autocast("cpu", torch.bfloat16):
        output, state = stack.step(state, x[0], logits[0], query, num_slots=7)
        output, state = stack.step(state, x[1], logits[1], query, num_slots=7)
    assert {t.dtype for t in (*output, *state)} == {torch.float32}
    exact = reference.empty((B, H), 7, D, torch.zeros((), dtype=torch.float64))
    for t in (0, 1):
        expected, exact = reference.step(exact, x[t].double(), logits[t].double(), query.double(), num_slots=7)
    torch.testing.assert_close(output.read, expected.read.float(), rtol=1e-5, atol=1e-6)


def test_feedback_computes_in_float32_under_autocast():
    x, logits, query = (tensor.detach().float() for tensor in make_inputs("stack", 1.0))
    x, logits = x.transpose(0, 1), logits.transpose(0, 1)
    generator = torch.Generator().manual_seed(6)
    feedback = tuple(0.3 * torch.randn(H * D, H, 3, generator=generator) for _ in range(2))
    state = stack.empty((B, H), 7, D, x)
    plain, _ = stack.scan(state, x, logits, query, feedback, num_slots=7)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _ = stack.scan(state, x, logits, query, feedback, num_slots=7)
    assert torch.equal(mixed.read, plain.read)


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_steps_compile_without_graph_breaks(discipline):
    x, logits, query = (tensor.detach().float() for tensor in make_inputs(discipline, 1.0))

    def two_steps(x, logits, query):
        state = stack.empty((B, H), 7, D, x)
        _, state = stack.step(state, x[0], logits[0], query, num_slots=7, discipline=discipline)
        return stack.step(state, x[1], logits[1], query, num_slots=7, discipline=discipline)

    compiled = torch.compile(two_steps, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, logits, query), two_steps(x, logits, query))


def test_chosen_implementation_is_logged_once(caplog):
    dispatch._log_choice_once.cache_clear()
    x, logits, query = make_inputs("stack", 1.0)
    with caplog.at_level(logging.INFO, "stackexp.stack"):
        for _ in range(2):
            stack.step(stack.empty((B, H), 7, D, x), x[0], logits[0], query, num_slots=7)
    assert [record.getMessage() for record in caplog.records] == ["stack implementation: numba"]


def test_forced_implementation_ends_with_its_context():
    x = make_inputs("stack", 1.0)[0]
    with contextlib.suppress(ZeroDivisionError), stack.use_implementation("reference"):
        assert stack.empty((B, H), 7, D, x).mask.shape[-1] == 7
        raise ZeroDivisionError
    assert stack.empty((B, H), 7, D, x).mask.shape[-1] == 0
