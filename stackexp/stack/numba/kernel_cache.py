"""Compile the kernels to C functions, and cache them on disk.

numba recompiles a cached function if its own file or the values in its closure change, but not if a function that it
calls changes. So the closure holds a digest of all source files.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numba import carray, cfunc, types
from numba.core.ccallback import CFunc
from numba.np.unsafe.ndarray import to_fixed_tuple

from stackexp.stack.numba.arguments import Scan, Scratch, Sizes, Tensors
from stackexp.stack.numba.backward_kernel import scan_backward
from stackexp.stack.numba.forward_kernel import scan_forward
from stackexp.stack.numba.vectors import OPTIONS, take_next, to_pointers

# A job is a C array: the next part, the number of parts, the bytes of scratch of a part, then `Sizes` and the addresses
# of `Tensors` and of the `Scratch` of the first part.
NUM_SIZES, NUM_TENSORS, NUM_SCRATCH = len(Sizes._fields), len(Tensors._fields), len(Scratch._fields)
TENSORS = 3 + NUM_SIZES
SCRATCH = TENSORS + NUM_TENSORS


def digest_sources(folder: Path = Path(__file__).parents[1]) -> int:
    """Return a digest of this folder's source files and of the reference, whose constants the kernels contain."""
    sources = [folder / "reference.py", *sorted((folder / "numba").glob("*.py"))]
    digests = (hashlib.sha256(source.read_bytes()).digest() for source in sources)
    return int.from_bytes(hashlib.sha256(b"".join(digests)).digest()[:7], "big")


def compile_kernel(function: Callable) -> CFunc:
    """Compile a function that takes the address of a job.

    The result is cached next to this file, or in the user's cache folder, if either is writable.
    """
    signature = types.intp(types.CPointer(types.intp))
    try:
        return cfunc(signature, cache=True, **OPTIONS)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return cfunc(signature, **OPTIONS)(function)


@functools.cache
def load_kernel(dtype: type, is_backward: bool) -> CFunc:
    """Return a kernel: a C function that takes the address of a job. Several threads may run one job at once.

    Each thread takes one part of the batch after the other until none is left. The kernel returns the digest of the
    sources, which puts it into the closure.
    """
    like: np.ndarray = np.zeros(0, dtype)
    digest = digest_sources()

    def run(job_address):
        job = carray(job_address, SCRATCH + NUM_SCRATCH)
        sizes = Sizes(*to_fixed_tuple(job[3:], NUM_SIZES))
        tensors = to_pointers(Tensors(*to_fixed_tuple(job[TENSORS:], NUM_TENSORS)), 0, like)
        first_scratch = Scratch(*to_fixed_tuple(job[SCRATCH:], NUM_SCRATCH))
        parts, part = job[1], take_next(job)
        while part < parts:
            scan = Scan(sizes, tensors, to_pointers(first_scratch, part * job[2], like))
            for sequence in range(sizes.batch * part // parts, sizes.batch * (part + 1) // parts):
                if is_backward:
                    scan_backward(sequence, scan)
                else:
                    scan_forward(sequence, scan)
            part = take_next(job)
        return digest

    return compile_kernel(run)
