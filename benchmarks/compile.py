"""Count the graphs of `trainer.compile` and the seconds until the first step has ended.

    python benchmarks/compile.py [--layers 8 32] [--memories null stacktrans] [--out FILE.json] [KEY=VALUE ...]

The width is that of the 360M model, with few tokens, so that nearly all time goes into compilation. Each model trains
`--steps` steps eagerly and compiled; the last column is the largest difference between their losses.
"""

import time
from typing import Any

import torch
from torch._dynamo.utils import counters

from stackexp.benchmarking import build_parser, choose_device, synchronize, write_record
from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.tables import format_table

CONFIG = "pretrain/transformer-360m"
SIZES = ["data.context_length=64", "data.micro_batch_size=2", "data.global_batch_tokens=128", "data.vocab_size=4096"]
SIZES += ["trainer.cross_entropy_chunk=64", "trainer.precision=32-true"]


def train(overrides: list[str], steps: int) -> tuple[list[float], float]:
    """Return the loss of each step, and the seconds until the first step has ended."""
    device = choose_device()
    torch.manual_seed(0)
    module = LanguageModeling(compose([CONFIG], overrides)).to(device)
    optimizer = registry.build("optimizer", module.config.optimizer, module.model)
    shape = (module.config.data.micro_batch_size, module.config.data.context_length)
    batch = {
        "tokens": torch.randint(module.config.model.vocab_size, shape, device=device),
        "index": torch.arange(shape[0]),
    }
    losses, first, start = [], 0.0, time.perf_counter()
    for number in range(steps):
        loss = module.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        first = first if number else time.perf_counter() - start
        losses.append(loss.item())
    return losses, first


def measure(memory: str, layers: int, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Return the row of a model."""
    torch.compiler.reset()
    counters.clear()
    options = [*SIZES, f"model.memory={memory}", f"model.num_layers={layers}", *overrides]
    eager, eager_seconds = train([*options, "trainer.compile=false"], steps)
    compiled, seconds = train([*options, "trainer.compile=true"], steps)
    row = {"memory": memory, "layers": layers, "graphs": counters["stats"]["unique_graphs"]}
    row |= {"breaks": sum(counters["graph_break"].values()), "seconds": seconds, "eager_seconds": eager_seconds}
    return row | {"difference": max(abs(a - b) for a, b in zip(eager, compiled, strict=True))}


def main() -> None:
    """Run the benchmark."""
    parser = build_parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--memories", nargs="+", default=["null", "stacktrans"])
    parser.add_argument("--steps", type=int, default=3)
    args, overrides = parser.parse_known_args()
    rows = [measure(memory, layers, args.steps, overrides) for memory in args.memories for layers in args.layers]
    header = ["memory", "layers", "graphs", "breaks", "s to first step", "eager", "largest difference of losses"]
    cells = [
        [*map(str, list(row.values())[:4]), f"{row['seconds']:.1f}", f"{row['eager_seconds']:.1f}"] for row in rows
    ]
    lines = [[*line, f"{row['difference']:.1e}"] for line, row in zip(cells, rows, strict=True)]
    print(format_table(lines, header=header, align="<>>>>>>"))
    write_record(args.out, rows, overrides=overrides)


if __name__ == "__main__":
    main()
