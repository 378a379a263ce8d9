"""The Triton kernels compile for an H100 with the oldest and with the installed Triton. No GPU is needed."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

OLDEST = "3.6.0"  # of torch 2.11

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")]


@pytest.mark.parametrize("axis", ["depth", "coefficients", "scan", "projection"])
def test_kernels_compile_with_the_oldest_triton(axis, tmp_path):
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), f"triton=={OLDEST}"]
    subprocess.run(install, check=True)
    assert len(compile_kernels(axis, "cases", OLDEST, tmp_path, f"{site}:{os.environ.get('PYTHONPATH', '')}")) > 20


@pytest.mark.parametrize("axis", ["depth", "coefficients", "scan", "projection"])
def test_kernels_of_usual_sizes_stay_in_registers(axis, tmp_path):
    """Triton 3.8 spills a register or two of one kernel on each axis. A warp of the depth axis needs no barriers."""
    import triton

    cubins = compile_kernels(axis, "usual", triton.__version__, tmp_path, os.environ.get("PYTHONPATH", ""))
    names = {"projection": {"down_kernel", "up_kernel", "weights_kernel"}}
    names["coefficients"] = {"update_forward", "update_backward", "read_forward", "read_backward"}
    assert {cubin.stem for cubin in cubins} == names.get(axis, {"forward", "backward"})
    for cubin in cubins:
        command = [Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", "-res-usage", "-sass", cubin]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert re.search(r"STACK:[08] .*LOCAL:0 ", found), cubin
        if axis in names:
            assert "STACK:0 " in found
        if axis == "depth":
            assert found.count("STL") + found.count("LDL") <= 2
            assert "BAR.SYNC" not in found


def compile_kernels(axis: str, sizes: str, version: str, cache: Path, path: str) -> list[Path]:
    """Return the compiled kernels, from a process that prefers the packages in `path`; `cache` is empty."""
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), axis, sizes]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout == f"compiled with Triton {version}\n"
    return [*(cache / "cache").glob("**/*.cubin")]
