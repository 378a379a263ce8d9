"""The loss of next tokens and its gradients, from hidden states on: all logits at once, by chunks, by liger-kernel.

    python benchmarks/cross_entropy.py [--tokens N] [--hidden_size D] [--vocab_size V] [--chunk C] [--out FILE.json]

The ways take turns (A B C A B C ...). Reported are medians over the turns of a forward and backward pass, the range,
and on a GPU the peak of allocated memory. In bfloat16 by autocast, as in training; random numbers, sizes of 360m.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from stackexp.benchmarking.efficiency import seconds
from stackexp.errors import ConfigError
from stackexp.models.cross_entropy import Head, NextTokenLoss, _liger
from stackexp.models.transformer import DecoderOutput
from stackexp.runs import environment
from stackexp.tables import table

WARM_UP = 3


class Way:
    """One way to the loss, as a model that is nothing but its output projection."""

    def __init__(self, criterion: NextTokenLoss, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        shape = (options.batch_size, options.tokens // options.batch_size)
        self.criterion, self.device = criterion, device
        self.tokens = torch.randint(options.vocab_size, shape, device=device)
        self.hidden = torch.randn(*shape, options.hidden_size, device=device, requires_grad=True)
        weight = torch.randn(options.vocab_size, options.hidden_size, device=device) / options.hidden_size**0.5
        self.output_head = Head(weight.requires_grad_())

    def step(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = None if self.criterion.needs_hidden else F.linear(self.hidden, self.output_head.weight)
            output = DecoderOutput(logits, torch.zeros(()), None, self.hidden)
            loss = self.criterion(self, output, self.tokens).total
        del logits, output
        loss.backward()
        self.hidden.grad = self.output_head.weight.grad = None


def ways(options: argparse.Namespace, device: torch.device) -> dict[str, Way]:
    """By name; compiled and liger on a GPU only, and liger if it is installed."""
    found = {"whole": NextTokenLoss("whole"), "chunked": NextTokenLoss("chunked", options.chunk)}
    if device.type == "cuda":
        found["chunked, compiled"] = NextTokenLoss("chunked", options.chunk, compiled=True)
        try:
            _liger()
            found["liger"] = NextTokenLoss("liger")
        except ConfigError as error:
            print(error)
    return {name: Way(criterion, options, device) for name, criterion in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 16384, "batch_size": 8, "hidden_size": 960, "vocab_size": 49152}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunk", type=int, default=NextTokenLoss().chunk)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = ways(options, device)
    times: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(options.steps + WARM_UP):
        for name, way in found.items():
            taken = seconds(way.step, device)
            if turn >= WARM_UP:
                times[name].append(taken)
    rows = [row(name, times, peak_memory(found[name].step, device)) for name in found]
    print(table([list(rows[0]), *([str(value) for value in row.values()] for row in rows)]))
    if options.out:
        sizes = {key: value for key, value in vars(options).items() if key != "out"}
        record = {"environment": environment(), "options": sizes, "rows": rows}
        options.out.write_text(json.dumps(record, indent=2))


def peak_memory(action: Callable[[], None], device: torch.device) -> int | None:
    """Bytes above what was allocated before; None on a CPU, where torch does not count."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    return torch.cuda.max_memory_allocated() - before


def row(name: str, times: dict[str, list[float]], memory: int | None) -> dict[str, object]:
    taken, base = times[name], statistics.median(times["whole"])
    return {
        "loss": name,
        "ms": round(1e3 * statistics.median(taken), 2),
        "of the whole": round(statistics.median(taken) / base, 3),
        "range ms": f"{1e3 * min(taken):.2f}-{1e3 * max(taken):.2f}",
        "peak MiB": "-" if memory is None else round(memory / 2**20),
    }


if __name__ == "__main__":
    main()
