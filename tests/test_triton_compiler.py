"""The Triton kernels compile for an H100 with the oldest and with the installed Triton. No GPU is needed."""

import importlib.metadata
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

OLDEST = "3.6.0"  # of torch 2.11
AXES = {name: {"forward", "backward"} for name in ("depth", "scan")}
AXES["coefficients"] = {"update_forward", "update_backward", "read_forward", "read_backward"}
AXES["projection"] = {"down_kernel", "up_kernel", "weights_kernel"}

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@pytest.fixture(scope="module")
def oldest_path(tmp_path_factory) -> str:
    """Return a PYTHONPATH that starts with the oldest Triton."""
    site = str(tmp_path_factory.mktemp("site"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, f"triton=={OLDEST}"]
    subprocess.run(install, check=True)
    return f"{site}:{os.environ.get('PYTHONPATH', '')}"


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES)
def test_kernels_compile_with_the_oldest_triton(axis, oldest_path, tmp_path):
    assert len(compile_kernels(axis, "cases", OLDEST, tmp_path, oldest_path)) > 20


@pytest.mark.process
@pytest.mark.parametrize("axis", ["depth", "scan", "projection"])
def test_kernels_of_one_size_stay_in_registers(axis, tmp_path):
    """The kernels of all sizes take ten minutes."""
    check_registers(axis, "default", False, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("is_oldest", [False, True])
@pytest.mark.parametrize("axis", AXES)
def test_kernels_of_usual_sizes_stay_in_registers(axis, is_oldest, tmp_path, request):
    path = request.getfixturevalue("oldest_path") if is_oldest else None
    check_registers(axis, "usual", is_oldest, tmp_path, path)


def check_registers(axis: str, sizes: str, is_oldest: bool, cache: Path, path: str | None = None) -> None:
    """Check that no kernel spills registers, and that a warp of the depth axis needs no barriers."""
    version = OLDEST if is_oldest else importlib.metadata.version("triton")
    kernels = compile_kernels(axis, sizes, version, cache, path or os.environ.get("PYTHONPATH", ""))
    assert {kernel["kernel"] for kernel in kernels} == AXES[axis]
    allowed = 8 if is_oldest and axis == "coefficients" else 0  # bytes per thread, in the two backward kernels
    for kernel in kernels:
        assert int(kernel["stack"]) <= allowed, kernel
        assert allowed or kernel["spills"] == "0", kernel
        assert axis != "depth" or kernel["barriers"] == "0", kernel


def compile_kernels(axis: str, sizes: str, version: str, cache: Path, path: str) -> list[dict[str, str]]:
    """Return the resources of the kernels, compiled by a process that prefers the packages in `path`."""
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), axis, sizes]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-3000:]
    first, header, _, *lines = map(str.split, found.stdout.splitlines())
    assert first == ["compiled", "with", "Triton", version]
    return [dict(zip(header, line, strict=True)) for line in lines]
