"""Tests of all stack implementations: scans against the reference, the choice of one, autocast and torch.compile."""

import contextlib
import itertools
import logging

import pytest
import torch
from scans import DISCIPLINES, READS, Case, cases, check, check_autocast, make_inputs, scan
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from stackexp import stack
from stackexp.stack import StackState, dispatch, reference
from stackexp.stack.numba import time_scan

ALL = list(stack.IMPLEMENTATIONS)
CASES = list(cases())


def make_detached(case):
    return [tensor.detach() for tensor in make_inputs(case, "cpu")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numba_equals_the_reference(case):
    check("numba", case)


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_eager_equals_the_reference(case):
    check("eager", case)


@pytest.mark.parametrize(("feedback", "hidden"), [(None, 0), ("identity", 0), ("tanh", 5), ("gated", 5)])
@pytest.mark.parametrize("cuts", [(1,), (4,), (9,), tuple(range(1, 10))], ids=str)
def test_scan_equals_its_parts(cuts, feedback, hidden):
    """Gradients flow through the state; the last case is one token at a time, as token_major calls it."""
    check("numba", Case(6, 3, 2, 10, "queue", feedback=feedback, filled=2, cuts=cuts, hidden=hidden))


def test_float32_errors_are_at_most_three_times_those_of_the_reference():
    """The errors of values and gradients are against float64."""
    for (read, read_mask), feedback in itertools.product([READS[0], READS[1], READS[3]], [None, "tanh"]):
        num_tokens = 12 if feedback else 40  # each token amplifies earlier rounding errors
        case = Case(24, 8, 4, num_tokens, "stack", read, read_mask, feedback, batch_size=8, dtype=torch.float32)
        rounded = make_detached(case)
        exact = flatten(scan("reference", case, [tensor.double().requires_grad_() for tensor in rounded]))
        errors = []
        for name in ("numba", "reference"):
            found = flatten(scan(name, case, [tensor.clone().requires_grad_() for tensor in rounded]))
            errors.append([(a - b).norm() / (b.norm() + 1e-9) for a, b in zip(found, exact, strict=True)])
        for ours, theirs in zip(*errors, strict=True):
            assert ours <= 3 * theirs + 1e-7, case.name


def flatten(result):
    values, gradients = result
    return [tensor.detach() for tensor in (*values, *gradients) if tensor is not None]


def test_backward_ignores_autocast():
    check_autocast("numba")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("discipline", ["queue", "push_only"])
def test_scan_of_no_tokens_returns_its_state(name, discipline):
    x, logits, query, slots, mask, *maps = make_inputs(Case(7, 3, 2, 0, discipline, feedback="tanh", filled=7), "cpu")
    with stack.use_implementation(name):
        output, state = stack.scan(StackState(slots, mask), x, logits, query, tuple(maps), num_slots=7)
    assert state.slots is slots
    assert state.mask is mask
    assert [tuple(value.shape) for value in output] == [(2, 0, 2, 3), (2, 0, 2, 3), (2, 0, 2), (2, 0, 2)]
    assert {value.dtype for value in output} == {torch.float64}


@pytest.mark.parametrize("name", ALL)
def test_invalid_options_are_rejected(name):
    x, logits, query, slots, mask, *maps = make_inputs(Case(7, 3, 2, 2, feedback="tanh", filled=7), "cpu")
    arguments = StackState(slots, mask), x, logits, query
    with stack.use_implementation(name), pytest.raises(AssertionError, match=r"7|slots"):
        stack.scan(*arguments, num_slots=6)
    with stack.use_implementation(name), pytest.raises(AssertionError, match="relu"):
        stack.scan(*arguments, tuple(maps), num_slots=7, feedback_activation="relu")


def test_step_computes_in_float32_under_autocast():
    x, logits, query, *_ = (tensor.bfloat16() for tensor in make_detached(Case(7, 3, 2, 2)))
    state = stack.empty((2, 2), 7, 3, x)
    exact = reference.empty((2, 2), 7, 3, torch.zeros((), dtype=torch.float64))
    for t in (0, 1):
        with torch.autocast("cpu", torch.bfloat16):
            output, state = stack.step(state, x[:, t], logits[:, t], query, num_slots=7)
        expected, exact = reference.step(exact, x[:, t].double(), logits[:, t].double(), query.double(), num_slots=7)
    assert {t.dtype for t in (*output, *state)} == {torch.float32}
    torch.testing.assert_close(output.read, expected.read.float(), rtol=1e-5, atol=1e-6)


def test_feedback_computes_in_float32_under_autocast():
    x, logits, query, slots, mask, *maps = make_detached(Case(7, 3, 2, 5, feedback="identity", dtype=torch.float32))
    arguments = StackState(slots, mask), x, logits, query, tuple(maps)
    plain, _ = stack.scan(*arguments, num_slots=7)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(stack.scan(*arguments, num_slots=7)[0].read, plain.read)


def test_forward_mode_tangents_equal_eager():
    x, logits, query, slots, mask = make_detached(Case(7, 3, 2, 4, filled=2))
    tangents = []
    for name in ("auto", "eager"):
        with forward_ad.dual_level(), stack.use_implementation(name):
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            output, _ = stack.scan(StackState(slots, mask), dual, logits, query, num_slots=7)
            tangents.append(forward_ad.unpack_dual(output.read).tangent)
    torch.testing.assert_close(*tangents)


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_steps_compile_without_graph_breaks(discipline):
    x, logits, query, *_ = make_detached(Case(7, 3, 2, 2, discipline, dtype=torch.float32))

    def two_steps(x, logits, query):
        state = stack.empty((2, 2), 7, 3, x)
        _, state = stack.step(state, x[:, 0], logits[:, 0], query, num_slots=7, discipline=discipline)
        return stack.step(state, x[:, 1], logits[:, 1], query, num_slots=7, discipline=discipline)

    compiled = torch.compile(two_steps, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, logits, query), two_steps(x, logits, query))


def test_torch_compile_warns_about_unrolled_tokens(caplog):
    x, logits, query, slots, mask = make_detached(Case(7, 3, 2, 2, filled=2))
    dispatch._log_once.cache_clear()

    @torch.compile(fullgraph=True, backend="eager")
    def read(x, logits):
        return stack.scan(StackState(slots, mask), x, logits, query, num_slots=7)[0].read

    with caplog.at_level(logging.WARNING, "stackexp.stack"):
        read(x[:, :1], logits[:, :1])
        assert not caplog.records
        read(x, logits)
    assert ["torch.compile" in record.getMessage() for record in caplog.records] == [True]


def test_chosen_implementation_is_logged_once(caplog):
    dispatch._log_once.cache_clear()
    x, logits, query, *_ = make_detached(Case(7, 3, 2, 1))
    with caplog.at_level(logging.INFO, "stackexp.stack"):
        for _ in range(2):
            stack.step(stack.empty((2, 2), 7, 3, x), x[:, 0], logits[:, 0], query, num_slots=7)
        with contextlib.suppress(ZeroDivisionError), stack.use_implementation("eager"):  # as probes of validations do
            stack.step(stack.empty((2, 2), 7, 3, x), x[:, 0], logits[:, 0], query, num_slots=7)
            raise ZeroDivisionError
        stack.step(stack.empty((2, 2), 7, 3, x), x[:, 0], logits[:, 0], query, num_slots=7)
    assert [record.getMessage() for record in caplog.records] == ["stack implementation: numba"]


def test_auto_selects_numba_only_for_real_cpu_tensors(monkeypatch):
    calls = []
    numba_scan = time_scan.scan
    monkeypatch.setattr(time_scan, "scan", lambda *args, **kwargs: calls.append(args) or numba_scan(*args, **kwargs))
    x, logits, query, *_ = make_detached(Case(7, 3, 2, 3))

    def read(x, logits, query):
        return stack.scan(stack.empty((2, 2), 7, 3, x), x, logits, query, num_slots=7)[0].read

    expected = read(x, logits, query)
    assert len(calls) == 1
    with FakeTensorMode() as mode:
        assert read(*(mode.from_tensor(tensor) for tensor in (x, logits, query))).shape == expected.shape
    torch.testing.assert_close(torch.compile(read, fullgraph=True, backend="eager")(x, logits, query), expected)
    torch.testing.assert_close(torch.func.vmap(read, (None, None, 0))(x, logits, query.expand(2, -1, -1))[1], expected)
    with stack.use_implementation("eager"):
        read(x, logits, query)
    assert len(calls) == 1


def test_auto_selects_triton_for_scans_on_cuda(monkeypatch):
    for has_triton, expected in ((True, ["numba", "triton", "eager"]), (False, ["numba", "eager", "eager"])):
        monkeypatch.setattr(dispatch, "HAS_TRITON", has_triton)
        assert [dispatch._kernels_for(device) for device in ("cpu", "cuda", "mps")] == expected


def test_the_choice_for_cuda_neither_breaks_a_graph_nor_warns(recwarn):
    """Dynamo of torch 2.11 cannot trace `find_spec`; later versions only warn, once per process."""

    @torch.compile(fullgraph=True, backend="eager")
    def choose(x):
        dispatch.log_once(logging.INFO, "a new message")
        return x, dispatch._kernels_for("cuda")

    assert choose(torch.ones(1))[1] in ("triton", "eager")
    assert not [warning for warning in recwarn if "Dynamo" in str(warning.message)]
