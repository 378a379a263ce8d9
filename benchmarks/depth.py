"""What the stack of the depth axis costs with each implementation, as multiples of the Transformer without it.

    python benchmarks/depth.py [--layers 12] [--tokens 256] [--threads 2] [--rounds 10] [--json FILE] [KEY=VALUE ...]

Widths of 360m. One backbone, to which the memories of each variant are attached in turn (A B C A B C ...), so that what
else the machine does falls on all of them. Timed are the passes of one training step (forward and backward, loss over
the vocabulary, no optimizer), a forward pass without gradients (prefill) and one token with a cache (decode).

Each is told twice: `x` is the model with its memories over the model without, medians of the rounds; `added` is 1 + the
memories of all layers alone, one after the other without the layers, over the Transformer, of the shortest times. On a
busy machine the difference of two long times is mostly noise; the second is not such a difference. Times are of the
thread's processor, with one thread, or else of the clock.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from stackexp import stack
from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.models.memories.base import Memory
from stackexp.models.transformer import Cache
from stackexp.runs import environment
from stackexp.tables import table

IMPLEMENTATIONS = ("reference", "eager", "numba")
PASSES = ("train", "prefill", "decode")


class Bench:
    """A Transformer of float32, the memories to attach to it, and the passes to time."""

    def __init__(self, memories: list[str], layers: int, tokens: int, overrides: list[str]):
        sizes = [f"model.num_layers={layers}", f"data.context_length={tokens}", f"data.global_batch_tokens={tokens}"]
        sizes += ["data.micro_batch_size=1", *overrides]
        configs = {name: compose(["quickstart"], [f"model={name}", *sizes]) for name in ("transformer-360m",)}
        configs |= {
            n: compose(["quickstart"], ["model=transformer-360m", f"model.memory={n}", *sizes]) for n in memories
        }
        torch.manual_seed(0)
        self.model = registry.build("model", configs["transformer-360m"].model)
        self.memories: dict[str, list[Memory | None]] = {"transformer": [None] * layers}
        for name in memories:
            model = configs[name].model
            self.memories[name] = [registry.build("memory", model.memory, model=model, layer=i) for i in range(layers)]
            for memory in self.memories[name]:
                memory.init_weights()
        self.tokens = torch.randint(configs["transformer-360m"].model.vocab_size, (1, tokens))
        self.h = torch.randn(1, tokens, configs["transformer-360m"].model.hidden_size)

    def attach(self, name: str, training: bool) -> None:
        for layer, memory in zip(self.model.layers, self.memories[name], strict=True):
            layer.memory = memory
        self.model.train(training)

    def train(self) -> None:
        output = self.model(self.tokens)
        loss = F.cross_entropy(output.logits[0, :-1], self.tokens[0, 1:]) + self.model.entropy_weight * output.entropy
        loss.backward()
        self.model.zero_grad()

    @torch.no_grad()
    def prefill(self) -> None:
        self.model(self.tokens)

    @torch.no_grad()
    def decode(self, cache: Cache) -> None:
        self.model(self.tokens[:, -1:], cache)

    @torch.no_grad()
    def cache(self) -> Cache:
        cache = Cache()
        self.model(self.tokens[:, :-1], cache)
        return cache

    def alone(self, name: str, what: str) -> None:
        """The memories of all layers, one after the other, and back."""
        h = self.h[:, :1] if what == "decode" else self.h
        with torch.set_grad_enabled(what == "train"):
            h = self._through(self.memories[name], h.clone().requires_grad_(what == "train"))
        if what == "train":
            h.sum().backward()
            self.model.zero_grad()

    def _through(self, memories: list[Memory], h: Tensor) -> Tensor:
        state, entropy = memories[0].empty_state(h), 0.0
        for memory in memories:
            h, state, trace = memory(h, state)
            entropy = entropy + trace["entropy"]
        return h + entropy


def seconds(action: Callable[..., None], *args: object) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    action(*args)
    return clock() - began


def measure(bench: Bench, rows: list[tuple[str, str]], rounds: int) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Seconds of each round, for every (memory, implementation) and pass; the first round is thrown away."""
    times = {row: {what: [] for what in (*PASSES, *(f"{p} alone" for p in PASSES))} for row in rows}
    for turn in range(rounds + 1):
        for what in PASSES:
            for row in rows:
                memory, name = row
                bench.attach(memory, what == "train")
                with stack.use_implementation(name or "auto"):
                    args = [bench.cache()] if what == "decode" else []
                    taken = {what: seconds(getattr(bench, what), *args)}
                    if name:
                        taken[f"{what} alone"] = seconds(bench.alone, memory, what)
                for key, value in taken.items():
                    if turn:
                        times[row][key].append(value)
    return times


def report(times: dict[tuple[str, str], dict[str, list[float]]]) -> list[dict[str, object]]:
    """One row for each: medians in seconds, `x` and `added` (see above)."""
    base, rows = times["transformer", ""], []
    for (memory, name), taken in times.items():
        row: dict[str, object] = {"memory": memory, "implementation": name}
        for what in PASSES:
            row[what] = statistics.median(taken[what])
            row[f"{what}_ratio"] = row[what] / statistics.median(base[what])
            if name:
                row[f"{what}_added"] = 1 + min(taken[f"{what} alone"]) / min(base[what])
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memories", nargs="+", default=["stacktrans", "full_dim"])
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=["eager", "numba"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options, overrides = parser.parse_known_args()
    torch.set_num_threads(options.threads)
    bench = Bench(options.memories, options.layers, options.tokens, overrides)
    rows = [("transformer", ""), *((m, name) for m in options.memories for name in options.implementations)]
    results = report(measure(bench, rows, options.rounds))
    header = ["memory", "implementation", *(f"{what} {how}" for what in PASSES for how in ("ms", "x", "added"))]
    cells = []
    for row in results:
        figures = [f"{row[key]:.3f}" if key in row else "" for w in PASSES for key in (f"{w}_ratio", f"{w}_added")]
        cells.append([row["memory"], row["implementation"]])
        for i, what in enumerate(PASSES):
            cells[-1] += [f"{1e3 * row[what]:.0f}", *figures[2 * i : 2 * i + 2]]
    print(table([header, *cells], align="<<" + ">" * (len(header) - 2), rules=(1,)))
    if options.json:
        record = {
            "environment": environment(),
            "options": {k: str(v) for k, v in vars(options).items()},
            "rows": results,
        }
        options.json.write_text(json.dumps(record | {"overrides": overrides}, indent=1))


if __name__ == "__main__":
    main()
