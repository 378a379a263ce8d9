"""Tests of the numba kernels: cache, threads, checks of arguments, saved states and building blocks."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit
from numba.core.caching import CacheImpl, NullCache
from scans import Case, make_inputs, run

from stackexp.stack import StackState
from stackexp.stack.numba import launch, time_scan
from stackexp.stack.numba.vectors import OPTIONS, tanh_into

PACKAGE = Path(launch.__file__).parents[1]


def test_digest_depends_on_every_source_file_of_the_kernels(tmp_path):
    shutil.copytree(PACKAGE, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    digests = {launch.digest_sources(tmp_path)}
    sources = [tmp_path / "reference.py", *(tmp_path / "numba").glob("*.py")]
    for source in sources:
        source.write_text(source.read_text() + "# changed\n")
        digests.add(launch.digest_sources(tmp_path))
    assert len(digests) == 1 + len(sources)
    kernel = launch.load_kernel(np.float32, False)
    assert launch.digest_sources() in [cell.cell_contents for cell in kernel._pyfunc.__closure__]


def test_kernels_compile_without_a_writable_cache(monkeypatch):
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    assert isinstance(launch.compile_kernel(lambda address: 0)._cache, NullCache)


@pytest.mark.parametrize(("dtype", "roundings"), [(np.float32, 2), (np.float64, 10)])
def test_tanh_is_accurate_relative_to_its_value(dtype, roundings):
    rng = np.random.default_rng(0)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 100, -100, 1e-30]
    numbers = np.append(special, rng.standard_normal(2**14) * 10 ** rng.uniform(-6, 2, 2**14)).astype(dtype)
    found = np.empty_like(numbers)
    njit(lambda numbers, out: tanh_into(numbers, out), **OPTIONS)(numbers, found)
    exact = np.tanh(numbers.astype(np.float64))
    np.testing.assert_allclose(found, exact, rtol=roundings * np.finfo(dtype).eps, atol=0)
    np.testing.assert_array_equal(np.signbit(found[:4]), [False, True, False, True])


@pytest.fixture
def set_threads(monkeypatch):
    """Return a function that sets the number of threads, without a minimum work per thread."""
    monkeypatch.setattr(launch, "MIN_WORK_PER_THREAD", 1)
    previous = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(previous)


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch, set_threads):
    team, parts, results = launch._find_team(), [], []

    def record_parts(kernel, job, *size_and_flags):
        parts.append(job[1])
        team(kernel, job, *size_and_flags)
        assert job[0] == job[1] + torch.get_num_threads()  # all parts were taken; then each thread found none

    monkeypatch.setattr(launch, "_find_team", lambda: record_parts)
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
    launch._find_team.cache_clear()
    monkeypatch.setattr(launch.ctypes, "CDLL", lambda name: object())
    try:
        for ours, theirs in zip(run("numba", case), expected, strict=True):
            assert torch.equal(ours, theirs)
    finally:
        launch._find_team.cache_clear()
    messages = [record.message for record in caplog.records if "thread" in record.message]
    assert messages == ["the stack runs in one thread: OpenMP is not available"]


IN_A_FORK = """
import os, signal, torch
from scans import Case, run
torch.set_num_threads(2)
case = Case(7, 3, 2, 3, batch_size=4)
expected = run("numba", case)
child = os.fork()
signal.alarm(30)
assert all(map(torch.equal, run("numba", case), expected))
assert child == 0 or os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.process
def test_scan_works_in_a_forked_process():
    """In a new process: torch refuses gradients in a fork after code compiled by the inductor has run."""
    command = [sys.executable, "-c", IN_A_FORK]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
