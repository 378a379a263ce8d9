"""Tests of the Triton scan against the reference: in Triton's interpreter, and on a GPU."""

import itertools
from importlib.util import find_spec

import pytest
import torch
from scans import DISCIPLINES, READS, Case, check, check_autocast, run

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

F32 = torch.float32
CASES = [
    Case(1, 1, 1, 1),
    Case(1, 4, 1, 5, "queue", read_mask="log", filled=1),
    Case(2, 1, 1, 5, "push_only", read="top", dtype=F32),
    Case(2, 8, 1, 5, "queue", scale=1000, dtype=F32),
    Case(7, 17, 1, 2, "stack", read_mask="log", filled=2),
    Case(7, 4, 1, 9, "queue", filled=3, batch_size=1),
    Case(2, 4, 1, 9, "push_only", read_mask="additive", batch_size=1),
    Case(7, 4, 3, 2, "stack", read_mask="log", dtype=F32, batch_size=1),
    Case(33, 4, 1, 5, "stack", read_mask="additive", filled=30, batch_size=1),
    Case(24, 8, 1, 5, "stack", read_mask="log", scale=1000, batch_size=1),
    Case(7, 4, 1, 5, "queue", filled=2, cuts=(1, 4), batch_size=1),
    Case(7, 4, 3, 5, "stack", read_mask="log", feedback="tanh", filled=2, batch_size=1),
    Case(2, 17, 3, 5, "queue", feedback="identity", batch_size=1),
    Case(7, 1, 3, 2, "push_only", read="top", feedback="tanh", dtype=F32),
    Case(7, 4, 3, 5, "queue", read="top", feedback="identity", cuts=(2, 3), batch_size=1),
    Case(7, 4, 3, 5, "stack", feedback="tanh", scale=1000, dtype=F32, batch_size=1),
    Case(7, 4, 3, 5, "stack", read="top", feedback="tanh", filled=2, cuts=(2,), hidden=5),
    Case(2, 17, 3, 4, "queue", feedback="gated", batch_size=1, hidden=40),  # more units than one block
]
MORE = [
    Case(S, D, H, T, discipline, *read, feedback, scale, filled, 1, hidden=hidden)
    for (S, D, H, T, filled), discipline, read, (feedback, scale, hidden) in itertools.product(
        [(7, 4, 1, 9, 2), (24, 8, 1, 5, 23), (33, 17, 3, 2, 0), (2, 1, 3, 5, 0)],
        DISCIPLINES,
        READS,
        [(None, 1, 0), (None, 1000, 0), ("identity", 1, 0), ("tanh", 1, 0), ("tanh", 1, 21), ("gated", 1, 21)],
    )
]
# kernels compile slowly, so a GPU runs only some cases
GPU_CASES = [*CASES, *(case for case in MORE if case.num_slots == 7 and case.feedback != "identity")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(triton_interpreter, case):
    triton_interpreter.submit(check, "triton", case).result()


def test_backward_ignores_autocast(triton_interpreter):
    triton_interpreter.submit(check_autocast, "triton").result()


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_equals_the_reference_with_all_options(triton_interpreter, case):
    triton_interpreter.submit(check, "triton", case).result()


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
def test_equals_the_reference_on_a_gpu(case):
    check("triton", case, "cuda")


@pytest.mark.gpu
def test_results_are_deterministic_on_a_gpu():
    case = Case(24, 8, 4, 40, "queue", read_mask="log", feedback="tanh", dtype=F32, batch_size=128)
    for ours, theirs in zip(run("triton", case, "cuda"), run("triton", case, "cuda"), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("feedback", [None, "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_slots", "filled"), [(24, 1), pytest.param(300, 250, marks=pytest.mark.slow)])
def test_equals_the_reference_at_realistic_sizes_on_a_gpu(num_slots, filled, dtype, feedback):
    """Programs have several warps, there are more programs than the device runs at once, and all slots fill."""
    for discipline, read_mask in (("stack", "log"), ("queue", "multiply")):
        case = Case(num_slots, 8, 4, 100, discipline, "global", read_mask, feedback, filled=filled, batch_size=300)
        check("triton", case._replace(dtype=dtype), "cuda")
