"""The next-token loss and its gradients from hidden states: all logits at once, or in chunks.

    python benchmarks/cross_entropy.py [--tokens N] [--hidden_size D] [--vocab_size V] [--chunk C] [--out FILE.json]

Medians of alternating forward and backward passes, and on CUDA the peak of allocated memory. Under bfloat16 autocast as
in training, on random numbers, at the sizes of 360m.
"""

import statistics
from argparse import Namespace

import torch
from torch.nn import functional as F

from stackexp.benchmarking import (
    build_parser,
    choose_device,
    measure_peak_bytes,
    time_alternating,
    write_record,
)
from stackexp.models.cross_entropy import Head, NextTokenLoss
from stackexp.models.transformer import DecoderOutput
from stackexp.tables import format_table

SIZES = {"tokens": 16384, "batch_size": 8, "hidden_size": 960, "vocab_size": 49152, "chunk": 4096}


class Model:
    """A model that consists of an output projection only, with one way to compute the loss."""

    def __init__(self, criterion: NextTokenLoss, sizes: Namespace, device: torch.device) -> None:
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


def build_models(sizes: Namespace, device: torch.device) -> dict[str, Model]:
    """Build a model for each way to compute the loss; the compiled one runs on CUDA only."""
    criteria = {"whole": NextTokenLoss("whole"), "chunked": NextTokenLoss("chunked", sizes.chunk)}
    if device.type == "cuda":
        criteria["chunked, compiled"] = NextTokenLoss("chunked", sizes.chunk, compiled=True)
    return {name: Model(criterion, sizes, device) for name, criterion in criteria.items()}


def main() -> None:
    """Run the benchmark."""
    parser = build_parser(__doc__, rounds=20)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    models = build_models(args, choose_device())
    times = time_alternating({name: model.step for name, model in models.items()}, args.rounds)
    base, rows, lines = statistics.median(times["whole"]), [], []
    for name, values in times.items():
        median, peak = statistics.median(values), measure_peak_bytes(models[name].step)
        rows.append({"loss": name, "seconds": values, "ratio": median / base, "peak_bytes": peak})
        milliseconds = [f"{1e3 * seconds:.2f}" for seconds in (median, min(values), max(values))]
        lines.append([name, *milliseconds, f"{median / base:.3f}", "-" if peak is None else f"{peak / 2**20:.0f}"])
    print(format_table(lines, header=["loss", "ms", "min", "max", "over whole", "peak MiB"], align="<>>>>>"))
    write_record(args.out, rows, sizes={name: getattr(args, name) for name in SIZES})


if __name__ == "__main__":
    main()
