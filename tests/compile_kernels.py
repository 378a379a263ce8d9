"""Compile the Triton kernels for an H100, without a GPU: `python compile_kernels.py KERNELS cases|usual`.

Triton's interpreter also runs programs that its compiler rejects.
"""

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stackexp import stack
from stackexp.stack.triton import coefficients, depth_step


def use_compiler_only() -> None:
    """Let launches of kernels with tensors on the CPU compile them for an H100, and return."""
    h100 = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    driver.set_active(h100)
    JITFunction.__getitem__ = lambda self, grid: functools.partial(self.run, grid=grid, warmup=True)
    for module in (depth_step, coefficients):
        module._load_kernel = functools.partial(_load_for_cuda, module._load_kernel)


def _load_for_cuda(load_kernel: Callable, name: str, device: torch.device) -> JITFunction:
    return load_kernel(name, torch.device("cuda"))


def compile_depth_steps(sizes: str) -> None:
    """Compile the steps of all cases, or those of 360m in bfloat16."""
    import depth_steps
    from test_triton_depth import CASES, GPU_CASE

    with stack.use_implementation("triton"):
        for case in CASES if sizes == "cases" else [GPU_CASE]:
            depth_steps.compute("triton", case, depth_steps.make_inputs(case))


def compile_coefficients(sizes: str) -> None:
    """Compile the steps in coefficient form of some cases, or those of full_dim of 360m in bfloat16."""
    import depth_steps
    from test_coefficients import CASES, GPU_CASE, ROUNDED

    for case in [*CASES[:-1], *ROUNDED] if sizes == "cases" else [GPU_CASE]:
        depth_steps.compute("coefficients", case, depth_steps.make_inputs(case))


def compile_scans(sizes: str) -> None:
    """Compile the scans of all cases, or those of the formal languages with each kind of feedback."""
    import scans
    from test_triton_scan import CASES

    usual = scans.Case(24, 8, 4, 5, read_mask="log", dtype=torch.float32)
    kinds = [(None, 0), ("tanh", 0), ("tanh", 128), ("gated", 128)]
    for case in CASES if sizes == "cases" else [usual._replace(feedback=f, hidden=units) for f, units in kinds]:
        scans.run("triton", case, "cpu")


def compile_projections(sizes: str) -> None:
    """Compile the projections of some cases, or those of stacktrans and single_head of 360m in bfloat16."""
    from test_triton_projection import BF16, CASES, F32, ROUNDED, Case, differentiate, run_fused

    usual = [Case((256,), 960, heads, 16, h, F32, BF16) for heads in (4, 1) for h in (F32, BF16)]
    for case in [*CASES[:3], *ROUNDED] if sizes == "cases" else usual:
        differentiate(run_fused, case, case.dtype)


if __name__ == "__main__":
    use_compiler_only()
    compilers = {"depth": compile_depth_steps, "coefficients": compile_coefficients}
    compilers |= {"scan": compile_scans, "projection": compile_projections}
    compilers[sys.argv[1]](sys.argv[2])
    print("compiled with Triton", triton.__version__)
