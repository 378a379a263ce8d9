"""Choose how OpenMP threads wait, before torch is imported."""

import os
import sys
import time
from pathlib import Path

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # set by the user, they are kept
CPU_TIMES = Path("/proc/stat")
SAMPLE_SECONDS = 0.1


def choose_wait_policy() -> None:
    """Make OpenMP threads sleep at barriers if other processes keep CPUs busy; otherwise they spin.

    Spinning is faster if every thread has its own CPU. On a shared CPU, a spinning thread takes CPU time from the
    thread that it waits for (docs/performance.md). Does nothing if /proc/stat is missing.
    """
    if any(name in os.environ for name in CHOICES):
        return
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    requested = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list has a number for each nesting level
    threads = min(available, int(requested)) if requested.isdecimal() and int(requested) else available
    if threads > 1 and count_idle_cpus() < threads - 0.5:
        os.environ["GOMP_SPINCOUNT"] = "0"
        print("note: other processes keep CPUs busy; threads sleep while they wait (GOMP_SPINCOUNT=0)", file=sys.stderr)


def count_idle_cpus() -> float:
    """Return how many CPUs are idle on average over SAMPLE_SECONDS; infinity if that cannot be measured."""
    first = _read_idle_seconds()
    time.sleep(SAMPLE_SECONDS)
    last = _read_idle_seconds()
    return float("inf") if first is None or last is None else (last - first) / SAMPLE_SECONDS


def _read_idle_seconds() -> float | None:
    """Return the idle time of all CPUs together since the machine started."""
    try:
        idle, waiting = CPU_TIMES.read_text().split("\n")[0].split()[4:6]
        return (int(idle) + int(waiting)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
