"""What numba makes of the scan's kernels: how long their arrays live, and when what it compiled is of use."""

import ast
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit
from numba.core import compiler, ir, postproc

from stackexp.stack.numba import kernels
from stackexp.stack.numba.vectors import OPTIONS, tanh_into

PACKAGE = Path(kernels.__file__).parents[1]


def made_arrays(function):
    """Names that the function gives to what np.zeros makes."""
    names = set()
    for node in ast.walk(ast.parse(inspect.getsource(function))):
        if isinstance(node, ast.Assign):
            (target,), value = node.targets, node.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=True) if several else [(target, value)]
            names |= {name.id for name, value in pairs if ast.unparse(value).startswith("np.zeros(")}
    return names


@pytest.mark.parametrize("kernel", [kernels._forward, kernels._backward], ids=["forward", "backward"])
def test_scratch_arrays_live_until_the_kernel_ends(kernel):
    """A view holds no reference: an array that is used no more in the loop over sequences is freed before that."""
    function = compiler.run_frontend(kernel.py_func)
    postproc.PostProcessor(function).run(emit_dels=True)
    arrays = made_arrays(kernel.py_func)
    assert {"rows", "row_masks", "weights"} < arrays
    deaths = [(s.value, at) for at, block in function.blocks.items() for s in block.find_insts(ir.Del)]
    (end,) = (at for at, block in function.blocks.items() if isinstance(block.terminator, ir.Return))
    assert {death for death in deaths if death[0] in arrays} == {(name, end) for name in arrays}


def test_what_is_kept_on_disk_depends_on_every_file_of_the_kernels(tmp_path):
    for name in kernels.SOURCES:
        shutil.copy(PACKAGE / "stack" / name, tmp_path)
        for node in ast.walk(ast.parse((PACKAGE / "stack" / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("stackexp"):
                assert f"{node.module.rpartition('.')[2]}.py" in kernels.SOURCES
    found = {kernels.digest(tmp_path)}
    for name in kernels.SOURCES:
        (tmp_path / name).write_text((tmp_path / name).read_text() + "# another\n")
        found.add(kernels.digest(tmp_path))
    assert len(found) == 1 + len(kernels.SOURCES)
    for kernel in (kernels.forward, kernels.backward):
        assert kernels.digest() in [cell.cell_contents for cell in kernel(np.float32)._pyfunc.__closure__]


SCAN = """
import numpy
import torch
from stackexp.stack.numba import scan as compiled
from stackexp.stack.numba import kernels
x = torch.zeros(1, 1, 1, 1)
compiled.scan(compiled.empty((1, 1), 1, 1, x), x, torch.zeros(1, 1, 1, 3), None, num_slots=1, read="top")
print(kernels.forward(numpy.float32).cache_hits)
"""


@pytest.mark.slow
def test_a_change_of_a_file_that_kernels_call_compiles_anew(tmp_path):
    copy = tmp_path / "stackexp"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def hits():
        command = [sys.executable, "-c", SCAN]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert hits() == "0\n"
    assert hits() == "1\n"
    helpers = copy / "stack/numba_vectors.py"
    helpers.write_text(helpers.read_text() + "# another\n")
    assert hits() == "0\n"


def test_where_no_cache_may_be_written_kernels_are_still_made():
    code = """
from numba.core.caching import CacheImpl, NullCache
CacheImpl._locator_classes = []
from stackexp.stack.numba import kernels
assert isinstance(kernels._kept(lambda address: 0)._cache, NullCache)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("dtype", "roundings"), [(np.float32, 2), (np.float64, 10)])
def test_tanh_is_as_exact_near_zero(dtype, roundings):
    """In relation to the value, not to 1."""
    rng = np.random.default_rng(0)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 100, -100, 1e-30]
    numbers = np.append(special, rng.standard_normal(2**14) * 10 ** rng.uniform(-6, 2, 2**14)).astype(dtype)
    found = np.empty_like(numbers)
    njit(lambda numbers, out: tanh_into(numbers, out), **OPTIONS)(numbers, found)
    exact = np.tanh(numbers.astype(np.float64))
    np.testing.assert_allclose(found, exact, rtol=roundings * np.finfo(dtype).eps, atol=0)
    np.testing.assert_array_equal(np.signbit(found[:4]), [False, True, False, True])
