"""The scan of a stack over the tokens on CPU: the loop in plain Python (all slots: `reference`; occupied ones: `eager`)
and the kernels of `numba`, side by side in one process.

    python benchmarks/scan.py [--rounds 5] [--threads 1] [--json FILE]

Forward and backward, B=128, T=40, S=24, H=4, d_s=8; one token, as token_major calls it, B=32; and a forward pass
without gradients, B=16, T=500, S=512. Medians of interleaved rounds, in milliseconds of CPU time (with one thread: what
other programs take of a busy machine does not count) or, with more threads, of time. Asked: 5 times as fast as the
loop in training.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from stackexp.stack import eager, reference
from stackexp.stack.numba import kernel_cache
from stackexp.stack.numba import time_scan as compiled

LOOPS = ("reference", "eager")
NAMES = {reference: "reference", eager: "eager", compiled: "numba"}
FEEDBACK = {"gated": 128, "feedback": None, "no feedback": None}  # units of its hidden layer
CASES = {  # name: (B, T, S, H, d_s), gradients, modules to compare
    "training": ((128, 40, 24, 4, 8), True, (reference, eager, compiled)),
    "one token": ((32, 1, 24, 4, 8), True, (reference, eager, compiled)),
    "evaluation": ((16, 500, 512, 4, 8), False, (eager, compiled)),
}


def make(shape: tuple[int, ...], read: str, feedback: str, gradients: bool) -> Callable[[object], None]:
    """One pass of an implementation over random numbers."""
    batch, tokens, num_slots, heads, size = shape
    torch.manual_seed(0)
    inputs = [torch.randn(batch, tokens, heads, size), torch.randn(batch, tokens, heads, 3), torch.randn(heads, size)]
    units = FEEDBACK[feedback] or heads * size
    inputs += [0.1 * torch.randn(units, heads, size), 0.1 * torch.randn(units, heads, 3)]
    if FEEDBACK[feedback]:
        inputs += [0.1 * torch.randn(2 * units, heads * size), torch.randn(batch, tokens, 2 * units)]
    x, logits, query, *maps = (tensor.requires_grad_(gradients) for tensor in inputs)
    options = {"num_slots": num_slots, "read": read, "feedback": None if feedback == "no feedback" else maps}
    options["feedback_activation"] = "gated" if feedback == "gated" else "tanh"

    def run(module) -> None:
        state = module.empty((batch, heads), num_slots, size, x)
        output, _ = module.scan(state, x, logits, query if read == "global" else None, **options)
        if gradients:
            (output.read.sum() + output.entropy.mean()).backward()

    return run


def milliseconds(run: Callable[[object], None], module, clock: Callable[[], float], repeats: int) -> float:
    began = clock()
    for _ in range(repeats):
        run(module)
    return 1e3 * (clock() - began) / repeats


def kernels_compiled() -> int:
    """How many kernels this process has compiled itself; 0: all had been kept on disk."""
    return sum(kernel(np.float32).cache_hits == 0 for kernel in (kernel_cache.forward, kernel_cache.backward))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    from stackexp.tables import table

    began = time.perf_counter()
    make((2, 2, 2, 1, 1), "top", "no feedback", True)(compiled)
    results = {"first_call_seconds": time.perf_counter() - began, "kernels_compiled": kernels_compiled()}
    rows = []
    for name, (shape, gradients, modules) in CASES.items():
        for feedback in FEEDBACK:
            for read in ("top", "global"):
                run, repeats = make(shape, read, feedback, gradients), 50 if shape[1] == 1 else 1
                times = {module: [] for module in modules}
                for _ in range(options.rounds + 1):
                    for module in modules:
                        times[module].append(milliseconds(run, module, clock, repeats))
                medians = {NAMES[m]: statistics.median(t[1:]) for m, t in times.items()}
                label = f"{name}, {feedback}, {read}"
                results[label] = medians
                figures = [f"{medians[m]:.2f}" if m in medians else "" for m in (*LOOPS, "numba")]
                faster = [f"{medians[m] / medians['numba']:.1f}" if m in medians else "" for m in LOOPS]
                rows.append([label, *figures, *faster])
    how = "the kernels were compiled" if results["kernels_compiled"] else "the kernels were kept from before"
    print(f"first call {results['first_call_seconds']:.1f} s: {how}")
    header = ["ms", *LOOPS, "numba", *(f"times faster than {name}" for name in LOOPS)]
    print(table([header, *rows], align="<>>>>>", rules=(1,)))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
