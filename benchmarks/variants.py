"""What each memory costs, as multiples of the plain Transformer measured beside it, in one process.

    python benchmarks/variants.py --config quickstart --steps 10 [--out FILE.json] [KEY=VALUE ...]

The variants take turns (A B C A B C ...), so that what else the machine does falls on all of them. Reported are
medians over the turns: a training step (forward, backward, AdamW), a forward pass without gradients (prefill), one
token with a cache (decode) and, on a GPU, the peak of allocated memory while training. Random tokens.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.models.cross_entropy import NextTokenLoss
from stackexp.models.transformer import Cache
from stackexp.reports.tables import table
from stackexp.runs import environment

VARIANTS = {
    "transformer": "null",
    "stacktrans": "stacktrans",
    "queue": "queue",
    "push_only": "push_only",
    "single_head": "single_head",
    "full_dim": "full_dim",
    "authors_code": "authors_code",
}


class Variant:
    """One model with its optimizer; each method is one thing to time."""

    def __init__(self, configs: list[str], overrides: list[str], memory: str, device: torch.device):
        self.config = compose(configs, [*overrides, f"model.memory={memory}"])
        torch.manual_seed(0)
        with device:
            self.model = registry.build("model", self.config.model)
        if self.config.trainer.compile:
            self.model.compile()
        self.optimizer = registry.build("optimizer", self.config.optimizer, self.model)
        self.criterion = NextTokenLoss.of(self.config.trainer)
        self.device = device
        shape = (self.config.data.micro_batch_size, self.config.data.context_length)
        self.tokens = torch.randint(self.config.model.vocab_size, shape, device=device)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled="bf16" in self.config.trainer.precision)

    def train(self) -> None:
        self.model.train()
        with self.autocast:
            output = self.model(self.tokens, hidden=self.criterion.of_hidden)
            losses = self.criterion(self.model, output, self.tokens)
        (losses.total + self.model.entropy_weight * output.entropy).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def prefill(self) -> None:
        self.model.eval()
        with self.autocast:
            self.model(self.tokens)

    @torch.no_grad()
    def prepare_decode(self) -> Cache:
        self.model.eval()
        cache = Cache()
        with self.autocast:
            self.model(self.tokens[:, :-1], cache)
        return cache

    @torch.no_grad()
    def decode(self, cache: Cache) -> None:
        with self.autocast:
            self.model(self.tokens[:, -1:], cache)


def seconds(action: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_memory(action: Callable[[], None], device: torch.device) -> int | None:
    """Bytes above what was allocated before; None on a CPU, where torch does not count."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    return torch.cuda.max_memory_allocated() - before


def measure(variants: dict[str, Variant], steps: int, device: torch.device) -> dict[str, dict[str, list[float]]]:
    """Seconds of each turn, by variant and by what was timed; the first two turns warm up and are thrown away."""
    times = {name: {"train": [], "prefill": [], "decode": [], "memory": []} for name in variants}
    for turn in range(steps + 2):
        for name, variant in variants.items():
            cache = variant.prepare_decode()
            taken = {
                "train": seconds(variant.train, device),
                "prefill": seconds(variant.prefill, device),
                "decode": seconds(lambda v=variant, c=cache: v.decode(c), device),
                "memory": peak_memory(variant.train, device),
            }
            if turn >= 2:
                for what, value in taken.items():
                    times[name][what].append(value)
    return times


def report(variants: dict[str, Variant], times: dict[str, dict[str, list[float]]]) -> list[dict[str, object]]:
    """One row a variant: medians in ms, and multiples of the Transformer's."""
    rows = []
    for name, variant in variants.items():
        row: dict[str, object] = {"model": name, "parameters": variant.model.num_parameters()}
        for what, taken in times[name].items():
            if taken[0] is None:
                continue
            middle, base = statistics.median(taken), statistics.median(times["transformer"][what])
            row |= {what: middle, f"{what}_ratio": middle / base, f"{what}_range": [min(taken), max(taken)]}
        row["train_tokens_per_second"] = variant.tokens.numel() / row["train"]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=Path)
    options, overrides = parser.parse_known_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = ["transformer", *(name for name in options.only if name != "transformer")]
    configs = options.config or ["quickstart"]
    variants = {name: Variant(configs, overrides, VARIANTS[name], device) for name in names}
    rows = report(variants, measure(variants, options.steps, device))
    ratios = [what for what in ("train", "prefill", "decode", "memory") if f"{what}_ratio" in rows[0]]
    cells = [
        [r["model"], f"{r['train_tokens_per_second']:,.0f}", *(f"{r[f'{w}_ratio']:.3f}" for w in ratios)] for r in rows
    ]
    header = ["model", "tokens/s", *(f"{what} x" for what in ratios)]
    print(table([header, *cells], align="<" + ">" * (len(header) - 1), rules=(1,)))
    if options.out:
        record = {"environment": environment(), "configs": configs, "overrides": overrides, "rows": rows}
        options.out.write_text(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
