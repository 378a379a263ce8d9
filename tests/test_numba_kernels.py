"""Tests of the numba kernels' building blocks and of their disk cache."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from stackexp.stack.numba import kernel_cache
from stackexp.stack.numba.vectors import OPTIONS, tanh_into

PACKAGE = Path(kernel_cache.__file__).parents[1]


def test_digest_depends_on_every_source_file_of_the_kernels(tmp_path):
    shutil.copytree(PACKAGE, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    digests = {kernel_cache.digest_sources(tmp_path)}
    sources = [tmp_path / "reference.py", *(tmp_path / "numba").glob("*.py")]
    for source in sources:
        source.write_text(source.read_text() + "# changed\n")
        digests.add(kernel_cache.digest_sources(tmp_path))
    assert len(digests) == 1 + len(sources)
    kernel = kernel_cache.load_kernel(np.float32, False)
    assert kernel_cache.digest_sources() in [cell.cell_contents for cell in kernel._pyfunc.__closure__]


SCAN = """
import numpy
import torch
from stackexp.stack.numba import kernel_cache, time_scan
x = torch.zeros(1, 1, 1, 1)
time_scan.scan(time_scan.empty((1, 1), 1, 1, x), x, torch.zeros(1, 1, 1, 3), None, num_slots=1, read="top")
print(kernel_cache.load_kernel(numpy.float32, False).cache_hits)
"""


@pytest.mark.slow
def test_cached_kernel_is_compiled_again_after_a_source_change(tmp_path):
    copy = tmp_path / "stackexp"
    shutil.copytree(PACKAGE.parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def count_cache_hits():
        command = [sys.executable, "-c", SCAN]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert count_cache_hits() == "0\n"
    assert count_cache_hits() == "1\n"
    helpers = copy / "stack/numba/vectors.py"
    helpers.write_text(helpers.read_text() + "# changed\n")
    assert count_cache_hits() == "0\n"


def test_kernels_compile_without_a_writable_cache():
    code = """
from numba.core.caching import CacheImpl, NullCache
CacheImpl._locator_classes = []
from stackexp.stack.numba import kernel_cache
assert isinstance(kernel_cache.compile_kernel(lambda address: 0)._cache, NullCache)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


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
