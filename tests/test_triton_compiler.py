"""The Triton kernels compile for an H100 with the oldest and with the installed Triton. No GPU is needed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

OLDEST = "3.6.0"  # of torch 2.11

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")]


@pytest.mark.parametrize("axis", ["depth", "scan"])
def test_kernels_compile_with_the_oldest_triton(axis, tmp_path):
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), f"triton=={OLDEST}"]
    subprocess.run(install, check=True)
    assert compile_kernels(axis, OLDEST, tmp_path, str(site)) > 20


def compile_kernels(axis: str, version: str, cache: Path, path: str) -> int:
    """Return the number of compiled kernels, from a process that prefers the packages in `path`; `cache` is empty."""
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), axis]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout == f"compiled with Triton {version}\n"
    return len([*(cache / "cache").glob("**/*.cubin")])
