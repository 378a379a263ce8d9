"""The scan of a stack over the tokens: Python loops (`reference`: all slots, `eager`: occupied slots) against kernels.

    python benchmarks/scan.py [--rounds 5] [--threads 1] [--out FILE.json]          # CPU: numba
    python benchmarks/scan.py --device cuda [--rounds 10] [--out FILE.json]         # CUDA: Triton

Forward and backward passes, and one forward pass without gradients; medians of alternating rounds in milliseconds. On a
CPU with one thread this is CPU time, which other programs do not disturb. Target: 5 times a Python loop in training.
On CUDA also the peak memory of a pass, and how far read and gradient of x differ from eager's.
"""

import statistics
import sys
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from stackexp import stack
from stackexp.benchmarking import build_parser, choose_clock, measure_peak_bytes, time_alternating, write_record
from stackexp.tables import format_table

GATED_UNITS = 128


class Case(NamedTuple):
    """Sizes of a scan."""

    batch: int  # B
    tokens: int  # T
    slots: int  # S
    heads: int  # H
    head_dim: int  # d_s
    has_gradients: bool = True


CPU_CASES = {
    "training": Case(128, 40, 24, 4, 8),
    "one token": Case(32, 1, 24, 4, 8),
    "evaluation": Case(16, 500, 512, 4, 8, has_gradients=False),
}
CUDA_CASES = {
    "training": Case(128, 40, 24, 4, 8),
    "one token": Case(32, 1, 24, 4, 8),
    "long strings": Case(64, 500, 512, 4, 8),
    "language model": Case(8, 2048, 24, 4, 16),
}
FEEDBACK = ("none", "tanh", "gated")
READS = ("top", "global")


class Scan:
    """One scan on random inputs; `run` makes a pass with an implementation."""

    def __init__(self, case: Case, read: str, feedback: str, device: str):
        self.case, self.read = case, read
        generator = torch.Generator().manual_seed(0)
        width = case.heads * case.head_dim
        units = GATED_UNITS if feedback == "gated" else width
        shapes = [(case.batch, case.tokens, case.heads, n) for n in (case.head_dim, 3)] + [(case.heads, case.head_dim)]
        shapes += [(units, case.heads, n) for n in (case.head_dim, 3)] if feedback != "none" else []
        shapes += [(2 * units, width), (case.batch, case.tokens, 2 * units)] if feedback == "gated" else []
        tensors = [torch.randn(shape, generator=generator) for shape in shapes]
        tensors[3:] = [0.1 * weight for weight in tensors[3:]]
        self.inputs = [tensor.to(device).requires_grad_(case.has_gradients) for tensor in tensors]
        self.options = {"num_slots": case.slots, "read": read, "read_mask": "log" if device == "cuda" else "multiply"}
        self.options["feedback_activation"] = "gated" if feedback == "gated" else "tanh"

    def run(self, implementation: str) -> tuple[Tensor, Tensor | None]:
        """Return the reads and the gradient of x."""
        x, logits, query, *maps = self.inputs
        query = query if self.read == "global" else None
        with stack.use_implementation(implementation):
            state = stack.empty((self.case.batch, self.case.heads), self.case.slots, self.case.head_dim, x)
            output, _ = stack.scan(state, x, logits, query, tuple(maps) or None, **self.options)
        if not self.case.has_gradients:
            return output.read, None
        loss = output.read.square().sum() + output.entropy.mean()
        return output.read.detach(), torch.autograd.grad(loss, x)[0]


def measure(scan: Scan, implementations: list[str], rounds: int) -> dict[str, float]:
    """Return median milliseconds, on CUDA also MiB and relative differences between kernels and eager."""
    actions = {name: partial(scan.run, name) for name in implementations}
    times = time_alternating(actions, rounds, warmup=1, clock=choose_clock(scan.inputs[0].device))
    row = {f"{name}_ms": 1e3 * statistics.median(times[name]) for name in implementations}
    if scan.inputs[0].is_cuda:
        row |= {f"{name}_mib": measure_peak_bytes(action) / 2**20 for name, action in actions.items()}
        for what, ours, theirs in zip(("read", "gradient"), scan.run("triton"), scan.run("eager"), strict=True):
            if theirs is not None:
                row[f"{what}_difference"] = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    return row


def main() -> None:
    """Run the benchmark."""
    parser = build_parser(__doc__, rounds=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cases", nargs="+", metavar="B,T,S,H,D", help="sizes instead of the usual ones")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("scan.py: no CUDA device found; run without --device cuda")
    torch.set_num_threads(args.threads)
    kernels = "triton" if args.device == "cuda" else "numba"
    cases = CUDA_CASES if args.device == "cuda" else CPU_CASES
    if args.cases:
        cases = {name: Case(*map(int, name.split(","))) for name in args.cases}
    rows, lines = [], []
    for name, case in cases.items():
        loops = ["eager"] if args.device == "cuda" or not case.has_gradients else ["reference", "eager"]
        for feedback in FEEDBACK:
            for read in READS:
                row = measure(Scan(case, read, feedback, args.device), [*loops, kernels], args.rounds)
                rows.append({"case": name, "sizes": case._asdict(), "feedback": feedback, "read": read, **row})
                write_record(args.out, rows)  # at once: a later failure loses nothing
                cells = [f"{row[f'{n}_ms']:.2f}" if f"{n}_ms" in row else "" for n in ("reference", "eager", kernels)]
                speedup = row[f"{loops[0]}_ms"] / row[f"{kernels}_ms"]
                lines.append([f"{name}, {read}, feedback {feedback}", *cells, f"{speedup:.1f}"])
    header = ["milliseconds", "reference", "eager", kernels, "speedup"]
    print(format_table(lines, header=header, align="<>>>>"))


if __name__ == "__main__":
    main()
