"""The cost of the stack over the depth on a CPU, as multiples of the Transformer without it, by implementation.

    python benchmarks/depth.py [--layers 12] [--tokens 256] [--threads 2] [--rounds 10] [--out FILE] [KEY=VALUE ...]

Widths of 360m, float32. The memories of each variant are attached to one backbone in alternation. Timed are a training
step (forward and backward with loss, no optimizer), a forward pass without gradients (prefill) and one token (decode).

`x` is the whole model over the Transformer, medians of the rounds. `added` is 1 + the memories of all layers alone over
the Transformer, of the shortest times: on a busy machine the difference of two long times is mostly noise.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from stackexp import stack
from stackexp.benchmarking.harness import alternate, choose_clock, measure_seconds, write_record
from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.models.memories import Memory
from stackexp.models.transformer import Cache
from stackexp.tables import format_table

IMPLEMENTATIONS = ("reference", "eager", "numba")
PASSES = ("train", "prefill", "decode")
BASE = ("transformer", "")
Row = tuple[str, str]
"""Memory and implementation."""


class Bench:
    """A Transformer, the memories to attach to it, and the passes to time."""

    def __init__(self, memories: list[str], layers: int, tokens: int, overrides: list[str]):
        sizes = ["model=transformer-360m", f"model.num_layers={layers}", f"data.context_length={tokens}"]
        sizes += [f"data.global_batch_tokens={tokens}", "data.micro_batch_size=1"]
        config = compose(["quickstart"], [*sizes, *overrides]).model
        torch.manual_seed(0)
        self.model = registry.build("model", config)
        self.memories: dict[str, list[Memory | None]] = {BASE[0]: [None] * layers}
        for name in memories:
            model = compose(["quickstart"], [*sizes, f"model.memory={name}", *overrides]).model
            self.memories[name] = [registry.build("memory", model.memory, model=model, layer=i) for i in range(layers)]
            for memory in self.memories[name]:
                memory.init_weights()
        self.tokens = torch.randint(config.vocab_size, (1, tokens))
        self.hidden = torch.randn(1, tokens, config.hidden_size)  # [1, T, d]

    def attach(self, name: str, training: bool) -> None:
        """Put the memories of a variant into the model."""
        for layer, memory in zip(self.model.layers, self.memories[name], strict=True):
            layer.memory = memory
        self.model.train(training)

    def prepare(self, name: str, which: str) -> Callable[[], None]:
        """Return a pass of the model with the memories `name`; what must not be timed is done already."""
        self.attach(name, which == "train")
        if which == "train":
            return self._train
        cache = Cache()
        if which == "decode":
            with torch.no_grad():
                self.model(self.tokens[:, :-1], cache)
        tokens = self.tokens[:, -1:] if which == "decode" else self.tokens
        return torch.no_grad()(lambda: self.model(tokens, cache if which == "decode" else None))

    def _train(self) -> None:
        output = self.model(self.tokens)
        loss = F.cross_entropy(output.logits[0, :-1], self.tokens[0, 1:]) + self.model.entropy_weight * output.entropy
        loss.backward()
        self.model.zero_grad()

    def run_memories(self, name: str, which: str) -> None:
        """Run the memories of all layers without the model; for `train` forward and backward."""
        hidden = self.hidden[:, :1] if which == "decode" else self.hidden
        with torch.set_grad_enabled(which == "train"):
            total = self._chain(self.memories[name], hidden.clone().requires_grad_(which == "train"))
        if which == "train":
            total.sum().backward()
            self.model.zero_grad()

    def _chain(self, memories: list[Memory], hidden: Tensor) -> Tensor:
        state, entropy = memories[0].empty_state(hidden), 0.0
        for memory in memories:
            hidden, state, stats = memory(hidden, state)
            entropy = entropy + stats["entropy"]
        return hidden + entropy


def measure(bench: Bench, rows: list[Row], rounds: int) -> dict[Row, dict[str, list[float]]]:
    """Return the seconds of each round, for every row and pass; `<pass> alone` is without the model."""
    clock = choose_clock()

    def measure_row(row: Row) -> dict[str, float]:
        memory, implementation = row
        seconds = {}
        with stack.use_implementation(implementation or "auto"):
            for which in PASSES:
                seconds[which] = measure_seconds(bench.prepare(memory, which), clock=clock)
                if implementation:
                    alone = partial(bench.run_memories, memory, which)
                    seconds[f"{which} alone"] = measure_seconds(alone, clock=clock)
        return seconds

    results = alternate(rows, measure_row, rounds, warmup=1)
    return {row: {key: [r[key] for r in taken] for key in taken[0]} for row, taken in zip(rows, results, strict=True)}


def summarize(times: dict[Row, dict[str, list[float]]]) -> list[dict[str, object]]:
    """Return one row each: medians in seconds, `x` and `added`."""
    base, rows = times[BASE], []
    for (memory, implementation), taken in times.items():
        row: dict[str, object] = {"memory": memory, "implementation": implementation}
        for which in PASSES:
            row[which] = statistics.median(taken[which])
            row[f"{which}_ratio"] = row[which] / statistics.median(base[which])
            if f"{which} alone" in taken:
                row[f"{which}_added"] = 1 + min(taken[f"{which} alone"]) / min(base[which])
        rows.append(row)
    return rows


def format_rows(rows: list[dict[str, object]]) -> str:
    """Return the table."""
    header = ["memory", "implementation", *(f"{which} {key}" for which in PASSES for key in ("ms", "x", "added"))]
    lines = []
    for row in rows:
        cells = [row["memory"], row["implementation"]]
        for which in PASSES:
            cells.append(f"{1e3 * row[which]:.0f}")
            cells += [f"{row[key]:.3f}" if key in row else "" for key in (f"{which}_ratio", f"{which}_added")]
        lines.append(cells)
    return format_table(lines, header=header, align="<<" + ">" * (len(header) - 2))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memories", nargs="+", default=["stacktrans", "full_dim"])
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=["eager", "numba"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(args.threads)
    bench = Bench(args.memories, args.layers, args.tokens, overrides)
    rows = [BASE, *((memory, name) for memory in args.memories for name in args.implementations)]
    results = summarize(measure(bench, rows, args.rounds))
    print(format_rows(results))
    options = {key: str(value) for key, value in vars(args).items()}
    write_record(args.out, results, options=options, overrides=overrides)


if __name__ == "__main__":
    main()
