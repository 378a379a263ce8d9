"""Run a kernel in several threads.

The threads are those of torch, through OpenMP's `GOMP_parallel`. A second thread pool would compete with torch's
threads, which spin for a while after each matrix product.
"""

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Sequence

import torch

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
