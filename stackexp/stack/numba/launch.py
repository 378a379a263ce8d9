"""The arguments of the scan kernels, their compilation, and their threads.

`Sizes` are plain integers; `Tensors` and `Scratch` are addresses of tensors in a fixed order. In Python, these two
hold tensors or None. In numba they hold flat arrays, and a missing tensor has the address 0. Tensors are contiguous.
Sizes: B sequences, T tokens, n occupied slots at the start and N at the end, C saved states, m feedback units, i hidden
feedback units (i = 2 m with gates, else m).

numba recompiles a cached function if its own file or the values in its closure change, but not if a function that it
calls changes. So the closure of a kernel holds a digest of all source files.

The threads are those of torch, through OpenMP's `GOMP_parallel`. A second thread pool would compete with torch's
threads, which spin for a while after each matrix product.
"""

import ctypes
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, cfunc, types
from numba.core.ccallback import CFunc
from numba.np.unsafe.ndarray import to_fixed_tuple

from stackexp.stack.numba.kernels import scan_backward, scan_forward
from stackexp.stack.numba.vectors import OPTIONS, take_next, to_pointers


class Sizes(NamedTuple):
    """The sizes and options of one scan."""

    batch: int  # B
    tokens: int  # T
    heads: int
    head_dim: int
    num_actions: int  # 3, or 2 without pop
    first_slots: int  # n
    last_slots: int  # N = min(n + T, S)
    num_slots: int  # S
    read: int  # equations.TOP, MULTIPLY, LOG or ADDITIVE
    is_queue: int
    has_mask_grad: int  # backward: whether the mask has a gradient
    activation: int  # feedback.IDENTITY, TANH or GATED
    units: int  # m
    inner: int  # i
    save_every: int  # tokens between two saved states; T: none are saved


class Tensors(NamedTuple):
    """The tensors of a scan and of its gradients. Matrix rows of the feedback maps are padded."""

    slots: Any  # [B, H, n, D]
    mask: Any  # [B, H, n]
    pushed: Any  # x [B, T, H, D]; with feedback x + P u, an output of the forward pass
    query: Any  # [H, D]; missing for `read: top`
    feedback: Any  # P and Q side by side [m, H*D + H*3]; backward: transposed; missing without feedback
    read_weight: Any  # V, transposed [H*D, i]; backward: V; missing without a hidden layer
    token_bias: Any  # c [B, T, i]
    read: Any  # [B, T, H, D], as the next five an output of the forward pass
    action: Any  # [B, T, H, 3]
    entropy: Any  # [B, T, H]
    first_read: Any  # R_{-1} [B, H, D]; missing without feedback
    saved_slots: Any  # [B, H, C, N, D]
    saved_mask: Any  # [B, H, C, N]
    x: Any = None  # [B, T, H, D]; this and the next four are only used forward, the last three are outputs
    logits: Any = None  # [B, T, H, 3 or 2]
    occupancy: Any = None  # [B, T, H]
    last_slots: Any = None  # [B, H, N, D]
    last_mask: Any = None  # [B, H, N]
    fed: Any = None  # the result of `feedback.activate` [B, T, i]; below are the tensors of the backward pass
    grad_read: Any = None  # incoming gradients, each of which may be missing
    grad_action: Any = None
    grad_entropy: Any = None
    grad_last_slots: Any = None
    grad_last_mask: Any = None
    grad_slots: Any = None  # outputs, the first two missing if not needed
    grad_mask: Any = None
    grad_x: Any = None
    grad_logits: Any = None
    grad_query: Any = None  # 0 at the start [B, H, D]: one part for each sequence
    grad_token_bias: Any = None


class Scratch(NamedTuple):
    """The scratch memory of one part of the batch, initially 0. A group is one head, or all heads with feedback."""

    slots: Any  # rows: for each head of a group two; backward: the k + 1 states of a segment, then two gradients
    mask: Any
    weights: Any  # of a read [N], as are the next two; see `equations`
    contents: Any
    grads: Any
    inner: Any  # c + V R, or its gradient [i, padded]
    fed: Any  # u or both factors of the gated feedback, or the gradient of u [i, padded]
    mixed: Any  # x and logits with feedback, or the gradient of R_{t-1} [H*D + H*3, padded]
    grad_read: Any  # of R of one head [D]


class Scan(NamedTuple):
    """The arguments of the functions of a kernel."""

    sizes: Any
    tensors: Any
    scratch: Any


MIN_WORK_PER_THREAD = 2**15  # slot element updates, about 40 us: a thread does not pay off for less
FIXED_WORK_PER_STACK = 300  # the cost of actions and softmaxes, in slot element updates


def count_parts(batch: int, work: int) -> int:
    """Return the number of parts into which threads split a batch. `work`: slot element updates of the whole batch."""
    return max(1, min(torch.get_num_threads(), batch, work // MIN_WORK_PER_THREAD))


def run_job(kernel: Callable, parts: int, arguments: Sequence[int]) -> None:
    """Run a kernel on all parts of a batch."""
    job = (ctypes.c_ssize_t * (2 + len(arguments)))(0, parts, *arguments)
    run_in_team = _find_team() if parts > 1 else None
    if run_in_team is None:
        kernel(job)
    else:
        run_in_team(kernel, job, 0, 0)  # 0: all threads; a smaller team would end the others, and restart them later


@functools.cache
def _find_team() -> Callable | None:
    """Return OpenMP's function that runs a C function in all threads.

    Return None without OpenMP, and after a fork, because threads do not survive a fork; the caller then runs all parts.
    """
    team = None if _is_forked else getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if team is None:
        reason = "the process was forked" if _is_forked else "OpenMP is not available"
        logging.getLogger(__name__).info("the stack runs in one thread: %s", reason)
    else:
        team.argtypes, team.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return team


def _mark_fork() -> None:
    global _is_forked
    _is_forked = True
    _find_team.cache_clear()


_is_forked = False
os.register_at_fork(after_in_child=_mark_fork)


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
        if "no locator available" not in str(error):  # numba has no exception type for this
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
