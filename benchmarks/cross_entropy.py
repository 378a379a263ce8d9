"""The next-token loss and its gradients from hidden states: all logits at once, in chunks, or by liger-kernel.

    python benchmarks/cross_entropy.py [--tokens N] [--hidden_size D] [--vocab_size V] [--chunk C] [--out FILE.json]

Medians of alternating forward and backward passes, and on CUDA the peak of allocated memory. Under bfloat16 autocast as
in training, on random numbers, at the sizes of 360m.
"""

import argparse
import statistics
from pathlib import Path

import torch
from torch.nn import functional as F

from stackexp.benchmarking.harness import measure_peak_bytes, time_alternating, write_record
from stackexp.errors import ConfigError
from stackexp.models.cross_entropy import Head, NextTokenLoss
from stackexp.models.transformer import DecoderOutput
from stackexp.tables import format_table

SIZES = {"tokens": 16384, "batch_size": 8, "hidden_size": 960, "vocab_size": 49152, "chunk": 4096}


class Model:
    """A model that is nothing but its output projection, with one way to compute the loss."""

    def __init__(self, criterion: NextTokenLoss, sizes: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        shape = (sizes.batch_size, sizes.tokens // sizes.batch_size)
        self.criterion, self.device = criterion, device
        self.tokens = torch.randint(sizes.vocab_size, shape, device=device)
        self.hidden = torch.randn(*shape, sizes.hidden_size, device=device, requires_grad=True)
        weight = torch.randn(sizes.vocab_size, sizes.hidden_size, device=device) / sizes.hidden_size**0.5
        self.output_head = Head(weight.requires_grad_())

    def step(self) -> None:
        """Run forward and backward once."""
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = None if self.criterion.needs_hidden else F.linear(self.hidden, self.output_head.weight)
            output = DecoderOutput(logits, torch.zeros(()), None, self.hidden)
            loss = self.criterion(self, output, self.tokens).total
        del logits, output
        loss.backward()
        self.hidden.grad = self.output_head.weight.grad = None


def build_models(sizes: argparse.Namespace, device: torch.device) -> dict[str, Model]:
    """Return the ways to the loss; the compiled one and liger run on CUDA only."""
    criteria = {"whole": NextTokenLoss("whole"), "chunked": NextTokenLoss("chunked", sizes.chunk)}
    if device.type == "cuda":
        criteria["chunked, compiled"] = NextTokenLoss("chunked", sizes.chunk, compiled=True)
        criteria["liger"] = NextTokenLoss("liger")
    models = {name: Model(criterion, sizes, device) for name, criterion in criteria.items()}
    try:
        if "liger" in models:
            models["liger"].step()
    except ConfigError as error:  # liger-kernel is not installed
        print(error)
        del models["liger"]
    return models


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    models = build_models(args, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    times = time_alternating({name: model.step for name, model in models.items()}, args.steps)
    base, rows = statistics.median(times["whole"]), []
    for name, values in times.items():
        median, peak = statistics.median(values), measure_peak_bytes(models[name].step)
        row = {"loss": name, "ms": 1e3 * median, "ratio": median / base, "min_ms": 1e3 * min(values)}
        rows.append(row | {"max_ms": 1e3 * max(values), "peak_mib": None if peak is None else peak / 2**20})
    lines = []
    for row in rows:
        peak = "-" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        milliseconds = [f"{row[key]:.2f}" for key in ("ms", "min_ms", "max_ms")]
        lines.append([row["loss"], *milliseconds, f"{row['ratio']:.3f}", peak])
    print(format_table(lines, header=["loss", "ms", "min", "max", "over whole", "peak MiB"], align="<>>>>>"))
    write_record(args.out, rows, sizes={name: getattr(args, name) for name in SIZES})


if __name__ == "__main__":
    main()
