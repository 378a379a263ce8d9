"""Compile the Triton kernels for an H100, without a GPU: `python compile_kernels.py KERNELS cases|usual|default`.

Prints the resources of each kernel. Triton's interpreter also runs programs that its compiler rejects.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stackexp import stack
from stackexp.stack.triton import coefficients, depth_step
from stackexp.tables import format_table

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
resources: dict[str, dict[str, Any]] = {}
"""Those of each compiled kernel, by its hash."""


def use_compiler_only() -> None:
    """Let launches of kernels with tensors on the CPU compile them for an H100, and return."""
    h100 = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    driver.set_active(h100)
    JITFunction.__getitem__ = lambda self, grid: lambda *args, **options: compile_kernel(self, grid, *args, **options)
    load_kernel = depth_step.load_kernel
    for module in (depth_step, coefficients):
        module.load_kernel = lambda module, name, device: load_kernel(module, name, torch.device("cuda"))


def compile_kernel(function: JITFunction, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Compile a kernel, and measure its resources if it is new."""
    layers = len(args[0]) if args and type(args[0]) is tuple else None  # since the last stored stack
    if layers in (2, 3) and sys.argv[2] != "cases":  # between the extremes, 1 and 4
        return
    kernel = function.run(*args, grid=grid, warmup=True, **options)
    sizes = {name: getattr(options.get("settings"), name, None) for name in ("heads", "head_dim")}
    if kernel.hash not in resources:
        resources[kernel.hash] = {"kernel": function.__name__} | sizes | {"layers": layers} | measure_resources(kernel)


def measure_resources(kernel: Any) -> dict[str, int]:
    """Return the resources of one program, and how many warps one SM of an H100 can hold.

    `spills` counts the loads and stores of spilled registers. `shared` and `stack` are bytes, per thread for `stack`.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [CUOBJDUMP, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack_bytes = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    programs = min(65536 // (-(-registers // 8) * 8 * 32 * warps), 64 // warps, 32, 228 * 1024 // (shared + 1024))
    found = {"warps": warps, "registers": registers, "stack": stack_bytes, "shared": shared}
    found |= {"spills": len(re.findall(r"\b(?:LDL|STL)\b", text)), "barriers": text.count("BAR.SYNC")}
    return found | {"warps_per_SM": programs * warps}


def select(sizes: str, cases: list[Any], usual: list[Any]) -> list[Any]:
    """Return the cases to compile; the default is the first of the usual ones."""
    return {"cases": cases, "usual": usual, "default": usual[:1]}[sizes]


def compile_depth_steps(sizes: str) -> None:
    """Compile the steps of all cases, or those of stacktrans, single_head and full_dim of 360m in bfloat16."""
    import depth_steps
    from test_triton_depth import CASES, GPU_CASE

    usual = [GPU_CASE._replace(num_heads=h, head_dim=d, num_layers=8) for h, d in ((4, 16), (1, 64), (4, 240))]
    with stack.use_implementation("triton"):
        for case in select(sizes, CASES["triton"], usual):
            depth_steps.compute("triton", case, depth_steps.make_inputs(case))


def compile_coefficients(sizes: str) -> None:
    """Compile the steps in coefficient form of some cases, or those of full_dim of 360m in bfloat16."""
    import depth_steps
    from test_triton_depth import CASES, GPU_CASE, ROUNDED

    usual = [GPU_CASE._replace(head_dim=240)]
    for case in select(sizes, [*CASES["coefficients"][:-1], *ROUNDED], usual):
        depth_steps.compute("coefficients", case, depth_steps.make_inputs(case))


def compile_scans(sizes: str) -> None:
    """Compile the scans of all cases, or those of the formal languages with each kind of feedback."""
    import scans
    from test_triton_scan import CASES, F32

    kinds = itertools.product([5, 40], [("gated", 128), ("tanh", 128), ("tanh", 0), (None, 0)])
    usual = [scans.Case(24, 8, 4, tokens, "stack", "global", "log", f, dtype=F32, hidden=m) for tokens, (f, m) in kinds]
    for case in select(sizes, CASES, usual):
        scans.run("triton", case, "cpu")


def compile_projections(sizes: str) -> None:
    """Compile the projections of some cases, or those of stacktrans and single_head of 360m in bfloat16."""
    from test_triton_projection import BF16, CASES, F32, ROUNDED, Case, differentiate, run_fused

    usual = [Case((256,), 960, heads, 16, h, F32, BF16) for heads in (4, 1) for h in (F32, BF16)]
    for case in select(sizes, [*CASES[:3], *ROUNDED], usual):
        differentiate(run_fused, case, case.dtype)


if __name__ == "__main__":
    use_compiler_only()
    compilers = {"depth": compile_depth_steps, "coefficients": compile_coefficients}
    compilers |= {"scan": compile_scans, "projection": compile_projections}
    compilers[sys.argv[1]](sys.argv[2])
    rows = list(resources.values())
    print("compiled with Triton", triton.__version__)
    print(format_table([[str(value) for value in row.values()] for row in rows], header=list(rows[0])))
