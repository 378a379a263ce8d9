"""The scan of a stack over the tokens on CUDA: the loop in torch (`eager`) beside the Triton kernels, in one process.

    python benchmarks/cuda_scan.py [--rounds 10] [--out FILE] [--cases B,T,S,H,D ...]

A forward and backward pass, `read: global` with the log mask, without feedback, with it, and gated with 128 units:
medians of interleaved rounds in milliseconds between two synchronizations, and the most memory that a pass allocates,
in MiB. Then how far read and gradient of x are apart, in multiples of their largest number.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from stackexp import stack
from stackexp.tables import table

CASES = {
    "training": (128, 40, 24, 4, 8),
    "one token": (32, 1, 24, 4, 8),
    "long strings": (64, 500, 512, 4, 8),
    "language model": (8, 2048, 24, 4, 16),
}
IMPLEMENTATIONS = ("eager", "triton")
FEEDBACK = (None, "tanh", "gated")
UNITS = 128  # of the hidden layer of gated


def make_inputs(case: tuple[int, ...], feedback: str | None, device: str) -> list[Tensor]:
    """x, logits, query; with feedback P, Q; gated V, c."""
    batch_size, num_tokens, _, heads, size = case
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch_size, num_tokens, heads, size), (batch_size, num_tokens, heads, 3), (heads, size)]
    units = UNITS if feedback == "gated" else heads * size
    shapes += [(units, heads, size), (units, heads, 3)] if feedback else []
    shapes += [(2 * units, heads * size), (batch_size, num_tokens, 2 * units)] if feedback == "gated" else []
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    inputs[3:] = [0.1 * weights for weights in inputs[3:]]
    return [tensor.to(device).requires_grad_() for tensor in inputs]


def one_pass(implementation: str, inputs: list[Tensor], num_slots: int, feedback: str | None) -> tuple[Tensor, Tensor]:
    """The reads, and the gradient of x."""
    x, logits, query, *maps = inputs
    with stack.use_implementation(implementation):
        state = stack.empty((x.shape[0], x.shape[2]), num_slots, x.shape[3], x)
        options = {"num_slots": num_slots, "read_mask": "log", "feedback_activation": feedback or "tanh"}
        output, _ = stack.scan(state, x, logits, query, tuple(maps) or None, **options)
    loss = output.read.square().sum() + output.entropy.mean()
    return output.read.detach(), torch.autograd.grad(loss, inputs)[0]


def synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def measure(case: tuple[int, ...], feedback: str | None, rounds: int, device: str) -> dict[str, float]:
    inputs, num_slots = make_inputs(case, feedback, device), case[2]
    times, memory, results = {name: [] for name in IMPLEMENTATIONS}, {}, {}
    for _ in range(rounds + 1):
        for name in IMPLEMENTATIONS:
            synchronize(inputs[0])
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if device == "cuda" else 0
            began = time.perf_counter()
            results[name] = one_pass(name, inputs, num_slots, feedback)
            synchronize(inputs[0])
            times[name].append(1e3 * (time.perf_counter() - began))
            if device == "cuda":
                memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    row = {f"{name}_ms": statistics.median(times[name][1:]) for name in IMPLEMENTATIONS}  # the first one compiles
    row |= {f"{name}_first_ms": times[name][0] for name in IMPLEMENTATIONS}
    row |= {f"{name}_mib": size for name, size in memory.items()}
    for what, ours, theirs in zip(("read", "gradient"), results["triton"], results["eager"], strict=True):
        row[f"{what}_error"] = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", metavar="B,T,S,H,D", help="instead of those of use")
    parser.add_argument("--device", default="cuda", help="cpu, slowly, with TRITON_INTERPRET=1 in the environment")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("cuda_scan.py: there is no CUDA device; with TRITON_INTERPRET=1, --device cpu runs")
    cases = {name: tuple(map(int, name.split(","))) for name in options.cases} if options.cases else CASES
    rows, lines = [], []
    for name, case in cases.items():
        for feedback in FEEDBACK:
            row = measure(case, feedback, options.rounds, options.device)
            rows.append({"case": name, "sizes": dict(zip("BTSHD", case, strict=True)), "feedback": feedback} | row)
            if options.out:  # at once: what has been measured stays, whatever the next case does
                device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
                options.out.write_text(
                    json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1)
                )
            figures = [f"{row[f'{which}_ms']:.3f}" for which in IMPLEMENTATIONS]
            figures += [f"{row['eager_ms'] / row['triton_ms']:.1f}"]
            figures += [f"{row[f'{which}_mib']:.0f}" if f"{which}_mib" in row else "" for which in IMPLEMENTATIONS]
            figures += [f"{row[f'{what}_error']:.0e}" for what in ("read", "gradient")]
            lines.append([name + (f", feedback {feedback}" if feedback else ""), *figures])
    header = ["", *(f"{which} ms" for which in IMPLEMENTATIONS), "times faster"]
    header += [*(f"{which} MiB" for which in IMPLEMENTATIONS), "read apart", "gradient apart"]
    print(table([header, *lines], align="<>>>>>>>", rules=(1,)))


if __name__ == "__main__":
    main()
