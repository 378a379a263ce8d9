"""The cost of the stack over the depth on a CPU, as multiples of the Transformer without it, by implementation.

    python benchmarks/depth.py [--threads 2] [--rounds 10] [--out FILE] [KEY=VALUE ...]

Widths of 360m with 12 layers, 256 tokens, float32. The memories of each variant are attached to one backbone in
alternation. Timed are a training step (forward and backward with loss, no optimizer), a forward pass without gradients
(prefill) and one token (decode).

`x` is the whole model over the Transformer, medians of the rounds. `added` is 1 + the memories of all layers alone over
the Transformer, of the shortest times: on a busy machine the difference of two long times is mostly noise.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from stackexp import stack
from stackexp.benchmarking import alternate, build_parser, choose_clock, measure_seconds, write_record
from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.models.memories import Memory
from stackexp.models.transformer import Cache, Transformer
from stackexp.tables import format_table

IMPLEMENTATIONS = ("reference", "eager", "numba")
PASSES = ("train", "prefill", "decode")
SIZES = ["model=transformer-360m", "model.num_layers=12", "data.context_length=256", "data.micro_batch_size=1"]
SIZES += ["data.global_batch_tokens=${data.context_length}"]
Row = tuple[str, str]
"""Memory and implementation."""
BASE: Row = ("transformer", "")


def take_memories(model: Transformer) -> list[tuple[Memory | None, Memory | None]]:
    """Return the memories of each layer: after attention with site each_sublayer, and the other."""
    return [(layer.attention_memory, layer.memory) for layer in model.layers]


class Bench:
    """A Transformer, the memories to attach to it, and the passes to time."""

    def __init__(self, memories: list[str], overrides: list[str]):
        of_model = [text for text in overrides if not text.lstrip("-").startswith("model.memory.")]
        config = compose(["quickstart"], [*SIZES, *of_model, "model.memory=null"])
        torch.manual_seed(0)
        self.model = registry.build("model", config.model)
        self.memories = {BASE[0]: take_memories(self.model)}
        for name in memories:
            model = compose(["quickstart"], [*SIZES, f"model.memory={name}", *overrides]).model
            self.memories[name] = take_memories(registry.build("model", model))
        tokens = config.data.context_length
        self.tokens = torch.randint(config.model.vocab_size, (1, tokens))
        self.hidden = torch.randn(1, tokens, config.model.hidden_size)  # [1, T, d]

    def prepare(self, name: str, which: str) -> Callable[[], None]:
        """Return a pass of the model with the memories `name`; what must not be timed is done already."""
        for layer, memories in zip(self.model.layers, self.memories[name], strict=True):
            layer.attention_memory, layer.memory = memories
        self.model.train(which == "train")
        if which == "train":
            return self._train
        if which == "prefill":
            return torch.no_grad()(lambda: self.model(self.tokens))
        cache = Cache()
        with torch.no_grad():
            self.model(self.tokens[:, :-1], cache)
        return torch.no_grad()(lambda: self.model(self.tokens[:, -1:], cache))

    def _train(self) -> None:
        output = self.model(self.tokens)
        loss = F.cross_entropy(output.logits[0, :-1], self.tokens[0, 1:]) + self.model.entropy_weight * output.entropy
        loss.backward()
        self.model.zero_grad()

    def run_memories(self, name: str, which: str) -> None:
        """Run the memories of all layers without the model; for `train` forward and backward."""
        memories = [memory for layer in self.memories[name] for memory in layer if memory is not None]
        hidden = self.hidden[:, :1] if which == "decode" else self.hidden
        with torch.set_grad_enabled(which == "train"):
            hidden = hidden.clone().requires_grad_(which == "train")
            state, entropy = memories[0].empty_state(hidden), 0.0
            for memory in memories:
                hidden, state, stats = memory(hidden, state, hidden)  # as before attention
                entropy = entropy + stats.get("entropy", 0.0)
            if which == "train":
                (hidden + entropy).sum().backward()
                self.model.zero_grad()


def measure(bench: Bench, rows: list[Row], rounds: int) -> list[dict[str, object]]:
    """Return medians in seconds, `x` and `added` of each row, the first of which is the Transformer."""
    clock = choose_clock(bench.hidden.device)

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

    times = alternate(rows, measure_row, rounds, warmup=1)
    summary = []
    for (memory, implementation), taken in zip(rows, times, strict=True):
        result: dict[str, object] = {"memory": memory, "implementation": implementation}
        for which in PASSES:
            base = [seconds[which] for seconds in times[0]]
            result[which] = statistics.median(seconds[which] for seconds in taken)
            result[f"{which}_ratio"] = result[which] / statistics.median(base)
            if implementation:
                result[f"{which}_added"] = 1 + min(seconds[f"{which} alone"] for seconds in taken) / min(base)
        summary.append(result)
    return summary


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
    parser = build_parser(__doc__, rounds=10)
    parser.add_argument("--memories", nargs="+", default=["stacktrans", "full_dim"])
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=["eager", "numba"])
    parser.add_argument("--threads", type=int, default=1)
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(args.threads)
    rows = [BASE, *((memory, name) for memory in args.memories for name in args.implementations)]
    results = measure(Bench(args.memories, overrides), rows, args.rounds)
    print(format_rows(results))
    write_record(args.out, results, threads=args.threads, overrides=overrides)


if __name__ == "__main__":
    main()
