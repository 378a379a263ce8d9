"""Tests of the numba scan against the reference: values and all gradients, for all options and many shapes."""

import itertools
import os
import random
import signal
import subprocess
import sys

import pytest
import torch
from scans import Case, check, check_autocast, make_inputs, run, scan
from torch._subclasses.fake_tensor import FakeTensorMode

from stackexp import stack
from stackexp.stack import StackState
from stackexp.stack.feedback import ACTIVATIONS
from stackexp.stack.numba import threads, time_scan

DISCIPLINES = ["stack", "queue", "push_only"]
READS = [("global", "multiply"), ("global", "log"), ("global", "additive"), ("top", "multiply")]
FEEDBACK = [None, "identity", "tanh"]
SHAPES = {"num_slots": [1, 2, 7, 24, 33], "head_dim": [1, 4, 8, 17], "num_heads": [1, 3, 4], "num_tokens": [1, 5, 40]}


def cases():
    """Yield all combinations of options with random shapes, also saturated actions and nonempty first states."""
    rng = random.Random(0)
    products = itertools.product(DISCIPLINES, READS, FEEDBACK, [1.0, 50.0])
    for discipline, (read, read_mask), feedback, scale in products:
        sizes = {name: rng.choice(values) for name, values in SHAPES.items()}
        if feedback:  # each token amplifies earlier rounding errors
            sizes["num_tokens"] = min(sizes["num_tokens"], 12)
        filled = rng.choice([0, 1, sizes["num_slots"], sizes["num_slots"] // 2])
        options = {"discipline": discipline, "read": read, "read_mask": read_mask, "feedback": feedback, "scale": scale}
        yield Case(**sizes, **options, filled=filled)


def shapes():
    """Yield each size alone, with the options that experiments use."""
    usual = {"num_slots": 7, "num_tokens": 9, "num_heads": 2, "head_dim": 3}
    for name, values in SHAPES.items():
        for value, read, feedback in itertools.product(values, ["top", "global"], [None, "tanh"]):
            yield Case(**usual | {name: value}, read=read, read_mask="log", feedback=feedback, filled=1)


def hidden_layers():
    """Yield hidden layers narrower and wider than the vectors, with each discipline and read."""
    for units, discipline, (read, read_mask) in zip([1, 8, 13, 64], [*DISCIPLINES, "stack"], READS, strict=True):
        for feedback in ACTIVATIONS:
            yield Case(7, 3, 2, 9, discipline, read, read_mask, feedback, filled=2, hidden=units)


CASES = [*cases(), *shapes(), *hidden_layers(), Case(7, 3, 2, 3, batch_size=0)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(case):
    check("numba", case)


@pytest.mark.parametrize(("feedback", "hidden"), [*((name, 0) for name in FEEDBACK), ("tanh", 5), ("gated", 5)])
@pytest.mark.parametrize("cuts", [(1,), (4,), (9,), tuple(range(1, 10))], ids=str)
def test_scan_equals_its_parts(cuts, feedback, hidden):
    """Gradients flow through the state; the last case is one token at a time, as token_major calls it."""
    check("numba", Case(6, 3, 2, 10, "queue", feedback=feedback, filled=2, cuts=cuts, hidden=hidden))


def test_float32_errors_are_at_most_three_times_those_of_the_reference():
    """The errors of values and gradients are against float64."""
    for (read, read_mask), feedback in itertools.product([READS[0], READS[1], READS[3]], [None, "tanh"]):
        num_tokens = 12 if feedback else 40  # each token amplifies earlier rounding errors
        case = Case(24, 8, 4, num_tokens, "stack", read, read_mask, feedback, batch_size=8, dtype=torch.float32)
        rounded = [tensor.detach() for tensor in make_inputs(case, "cpu")]
        exact = flat(scan("reference", case, [tensor.double().requires_grad_() for tensor in rounded]))
        errors = []
        for name in ("numba", "reference"):
            found = flat(scan(name, case, [tensor.clone().requires_grad_() for tensor in rounded]))
            errors.append([(a - b).norm() / (b.norm() + 1e-9) for a, b in zip(found, exact, strict=True)])
        for ours, theirs in zip(*errors, strict=True):
            assert ours <= 3 * theirs + 1e-7, case.name


def flat(result):
    values, gradients = result
    return [tensor.detach() for tensor in (*values, *gradients) if tensor is not None]


@pytest.fixture
def set_threads(monkeypatch):
    """Return a function that sets the number of threads, without a minimum work per thread."""
    monkeypatch.setattr(threads, "MIN_WORK_PER_THREAD", 1)
    previous = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(previous)


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch, set_threads):
    team, parts, results = threads._find_team(), [], []

    def record_parts(kernel, job, *size_and_flags):
        parts.append(job[1])
        team(kernel, job, *size_and_flags)
        assert job[0] == job[1] + torch.get_num_threads()  # all parts were taken; then each thread found none

    monkeypatch.setattr(threads, "_find_team", lambda: record_parts)
    for number in (1, 2, 4):
        set_threads(number)
        results.append(run("numba", Case(7, 3, 2, 9, feedback="tanh", filled=2, batch_size=5)))
    assert parts == [2, 2, 4, 4]  # forward and backward
    for result in results[1:]:
        for ours, theirs in zip(result, results[0], strict=True):
            assert torch.equal(ours, theirs)


def test_scan_without_openmp_runs_in_one_thread_and_logs_it(monkeypatch, set_threads, caplog):
    caplog.set_level("INFO")
    set_threads(2)
    case = Case(7, 3, 2, 9, batch_size=5)
    expected = run("numba", case)
    threads._find_team.cache_clear()
    monkeypatch.setattr(threads.ctypes, "CDLL", lambda name: object())
    try:
        for ours, theirs in zip(run("numba", case), expected, strict=True):
            assert torch.equal(ours, theirs)
    finally:
        threads._find_team.cache_clear()
    messages = [record.message for record in caplog.records if "thread" in record.message]
    assert messages == ["the stack runs in one thread: OpenMP is not available"]


def read(x, logits, query):
    return stack.scan(stack.empty(x.shape[:1] + x.shape[2:3], 7, 3, x), x, logits, query, num_slots=7)[0].read


def test_scan_works_in_a_forked_process(set_threads):
    set_threads(2)
    x, logits, query, *_ = (tensor.detach() for tensor in make_inputs(Case(7, 3, 2, 3, batch_size=4), "cpu"))
    expected = read(x, logits, query)
    if (child := os.fork()) == 0:
        code = 1
        try:
            signal.alarm(30)
            code = 0 if torch.equal(read(x, logits, query), expected) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(2, 3, 2, 4)}, "4 actions"),
        ({"logits": torch.zeros(2, 4, 2, 3)}, "logits has"),
        ({"query": None}, "requires a query"),
        ({"query": torch.zeros(2, 3, dtype=torch.float64)}, "float64"),
        ({"x": torch.zeros(2, 3, 2, 3, device="meta")}, "meta"),
    ],
    ids=["actions", "shape", "no query", "dtype", "device"],
)
def test_invalid_tensors_are_rejected_before_the_kernel_runs(changes, message):
    given = {"x": torch.zeros(2, 3, 2, 3), "logits": torch.zeros(2, 3, 2, 3), "query": torch.zeros(2, 3)} | changes
    state = StackState(torch.zeros(2, 2, 0, 3), torch.zeros(2, 2, 0))
    with pytest.raises(AssertionError, match=message):
        time_scan.scan(state, *given.values(), num_slots=7)


def test_backward_ignores_autocast():
    check_autocast("numba")


def measure_saved_bytes(tokens, needs_grad):
    """Return the bytes saved for the backward pass besides inputs and outputs, and the output."""
    x, logits, query, *_ = (t.detach().contiguous() for t in make_inputs(Case(8, 3, 2, tokens), "cpu"))
    x, known, sizes = x.requires_grad_(needs_grad), set(), []

    def pack(tensor):
        if tensor.data_ptr() not in known:
            sizes.append(tensor.nbytes)
        return tensor

    known.update(t.data_ptr() for t in (x, logits, query))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.set_grad_enabled(needs_grad):
        output, _ = time_scan.scan(time_scan.empty((2, 2), 8, 3, x), x, logits, query, num_slots=8)
    return sum(sizes) - (sum(t.nbytes for t in output[:3]) if needs_grad else 0), output


def test_backward_saves_about_sqrt_T_states():
    state = 2 * 2 * 8 * (3 + 1) * 8  # bytes
    assert measure_saved_bytes(100, True)[0] == 9 * state
    assert measure_saved_bytes(400, True)[0] == 19 * state


def test_scan_without_gradients_saves_nothing():
    size, output = measure_saved_bytes(100, False)
    assert size == 0
    assert output.read.grad_fn is None


def test_auto_selects_numba_only_for_real_cpu_tensors(monkeypatch):
    calls = []
    scan = time_scan.scan
    monkeypatch.setattr(time_scan, "scan", lambda *args, **kwargs: calls.append(args) or scan(*args, **kwargs))
    x, logits, query, *_ = (tensor.detach() for tensor in make_inputs(Case(7, 3, 2, 3), "cpu"))
    expected = read(x, logits, query)
    assert len(calls) == 1
    with FakeTensorMode() as mode:
        assert read(*(mode.from_tensor(tensor) for tensor in (x, logits, query))).shape == expected.shape
    torch.testing.assert_close(torch.compile(read, fullgraph=True, backend="aot_eager")(x, logits, query), expected)
    torch.testing.assert_close(torch.func.vmap(read, (None, None, 0))(x, logits, query.expand(2, -1, -1))[1], expected)
    assert len(calls) == 1
    with stack.use_implementation("eager"):
        read(x, logits, query)
    assert len(calls) == 1


def test_numba_is_not_imported_before_a_scan():
    code = "import sys, stackexp.stack; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
