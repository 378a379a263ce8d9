"""Compile the kernels to C functions, and cache them on disk.

numba compiles a cached function again if its own file changes or the values in its closure do, but not if a function
that it calls changes. So the closure holds a digest of all source files.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numba import carray, cfunc, types
from numba.core.ccallback import CFunc
from numba.np.unsafe.ndarray import to_fixed_tuple

from stackexp.stack.numba.arguments import BackwardTensors, ForwardTensors, Sizes
from stackexp.stack.numba.backward_kernel import BackwardScan, allocate_backward, scan_backward
from stackexp.stack.numba.forward_kernel import ForwardScan, allocate_forward, scan_forward
from stackexp.stack.numba.vectors import OPTIONS, keep_alive, take_next, to_pointers

SOURCES = tuple(
    f"numba/{name}.py" for name in ("arguments", "equations", "vectors", "forward_kernel", "backward_kernel")
)
SOURCES += ("reference.py", "numba/kernel_cache.py")

# A job is a C array: the next part, the number of parts, Sizes, and the addresses of the tensors.
NUM_SIZES = len(Sizes._fields)
NUM_FORWARD, NUM_BACKWARD = len(ForwardTensors._fields), len(BackwardTensors._fields)


def digest_sources(folder: Path = Path(__file__).parents[1]) -> int:
    """Return a digest of all source files of the kernels."""
    digests = (hashlib.sha256((folder / name).read_bytes()).digest() for name in SOURCES)
    return int.from_bytes(hashlib.sha256(b"".join(digests)).digest()[:7], "big")


def compile_kernel(function: Callable) -> CFunc:
    """Compile a function of a job, cached next to this file or in the user's cache if either is writable."""
    signature = types.intp(types.CPointer(types.intp))
    try:
        return cfunc(signature, cache=True, **OPTIONS)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return cfunc(signature, **OPTIONS)(function)


@functools.cache
def forward(dtype: type) -> CFunc:
    """Return the forward kernel, a C function of a job. Several threads may run it on one job at once.

    Each thread takes one part of the batch after the other until none is left. Returning the digest puts it into the
    closure.
    """
    like: np.ndarray = np.zeros(0, dtype)
    digest = digest_sources()

    def run_forward(job_address):
        job = carray(job_address, 2 + NUM_SIZES + NUM_FORWARD)
        sizes = Sizes(*to_fixed_tuple(job[2:], NUM_SIZES))
        tensors = to_pointers(ForwardTensors(*to_fixed_tuple(job[2 + NUM_SIZES :], NUM_FORWARD)), like)
        owners = allocate_forward(sizes, tensors, like)
        scratch, parts, part = to_pointers(owners, like), job[1], take_next(job)
        while part < parts:
            for sequence in range(sizes.batch * part // parts, sizes.batch * (part + 1) // parts):
                scan_forward(sequence, ForwardScan(sizes, tensors, scratch))
            part = take_next(job)
        keep_alive(owners)
        return digest

    return compile_kernel(run_forward)


@functools.cache
def backward(dtype: type) -> CFunc:
    """Return the backward kernel, which runs like the forward kernel."""
    like: np.ndarray = np.zeros(0, dtype)
    digest = digest_sources()

    def run_backward(job_address):
        job = carray(job_address, 2 + NUM_SIZES + NUM_BACKWARD)
        sizes = Sizes(*to_fixed_tuple(job[2:], NUM_SIZES))
        tensors = to_pointers(BackwardTensors(*to_fixed_tuple(job[2 + NUM_SIZES :], NUM_BACKWARD)), like)
        owners = allocate_backward(sizes, tensors, like)
        scratch, parts, part = to_pointers(owners, like), job[1], take_next(job)
        while part < parts:
            for sequence in range(sizes.batch * part // parts, sizes.batch * (part + 1) // parts):
                scan_backward(sequence, BackwardScan(sizes, tensors, scratch))
            part = take_next(job)
        keep_alive(owners)
        return digest

    return compile_kernel(run_backward)
