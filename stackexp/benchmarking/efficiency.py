"""`stackexp bench efficiency`: what a memory costs a whole model, in multiples of the plain Transformer.

Each model is measured in turns with the Transformer (A B A B ...) in one process, so that what else the machine does
falls on both, and a ratio is the median of the ratios of neighbours. Timed are a training step (forward, backward,
AdamW), a forward pass without gradients (prefill) and one token after it (decode); on CUDA the peak of memory as well.
Tokens are random: no figure depends on which they are.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stackexp import stack
from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.models.cross_entropy import NextTokenLoss
from stackexp.models.transformer import Cache
from stackexp.training.callbacks.throughput import peak_flops

TRANSFORMER = "transformer"
MEMORIES = ("stacktrans", "queue", "push_only", "single_head", "full_dim", "authors_code")
"""Choices of `model.memory`, and names of rows."""
ALSO_BY_REFERENCE = ("stacktrans", "full_dim")
"""Measured by the implementation `reference` too, so that the gain is seen."""
WHAT = ("train", "prefill", "decode", "memory")
WARM_UP = 3  # turns that do not count: kernels are compiled, allocators filled


@dataclass(frozen=True)
class Row:
    """A model and the implementation of its stack."""

    model: str
    implementation: str = "auto"

    @property
    def memory(self) -> str:
        return "null" if self.model == TRANSFORMER else self.model


class Subject:
    """One model with its optimizer; each method is one thing to time. Weights are drawn from seed 0."""

    def __init__(self, row: Row, configs: list[str], overrides: list[str], device: torch.device):
        self.row, self.device = row, device
        self.config = compose(configs, [*overrides, f"model.memory={row.memory}"])
        torch.manual_seed(0)
        before = allocated(device)
        with device:
            self.model = registry.build("model", self.config.model)
        if self.config.trainer.compile and row.implementation == "auto":  # the reference is no candidate for speed
            self.model.compile(dynamic=False)
        self.optimizer = registry.build("optimizer", self.config.optimizer, self.model)
        self.criterion = NextTokenLoss.from_config(self.config.trainer)
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled="bf16" in self.config.trainer.precision)
        shape = (self.config.data.micro_batch_size, self.config.data.context_length)
        self.tokens = torch.randint(self.config.model.vocab_size, shape, device=device)
        self.train()  # gradients were there, and the optimizer's state is now
        self.resident = allocated(device) - before

    @contextlib.contextmanager
    def _as_measured(self, training: bool) -> Iterator[None]:
        self.model.train(training)
        with stack.use_implementation(self.row.implementation), self._autocast, torch.set_grad_enabled(training):
            yield

    def train(self) -> None:
        """One optimizer step on one micro-batch."""
        with self._as_measured(training=True):
            output = self.model(self.tokens, return_hidden=self.criterion.needs_hidden)
            losses = self.criterion(self.model, output, self.tokens)
        (losses.total + self.model.entropy_weight * output.entropy).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def prefill(self) -> None:
        with self._as_measured(training=False):
            self.model(self.tokens)

    def filled(self) -> Cache:
        """The cache of all tokens but the last."""
        cache = Cache()
        with self._as_measured(training=False):
            self.model(self.tokens[:, :-1], cache)
        return cache

    def decode(self, cache: Cache) -> None:
        """One token after those in the cache."""
        with self._as_measured(training=False):
            self.model(self.tokens[:, -1:], cache)

    def peak_bytes(self) -> int:
        """Of a training step: weights, optimizer, gradients and activations, of this model alone."""
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - self.resident
        self.train()
        return torch.cuda.max_memory_allocated() - others


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def seconds(action: Callable[[], Any], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    action()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def turn(subject: Subject) -> dict[str, float]:
    """Everything once: seconds, and bytes on CUDA."""
    taken = {"train": seconds(subject.train, subject.device), "prefill": seconds(subject.prefill, subject.device)}
    cache = subject.filled()
    taken["decode"] = seconds(lambda: subject.decode(cache), subject.device)
    if subject.device.type == "cuda":
        taken["memory"] = subject.peak_bytes()
    return taken


def in_turns(subjects: list[Subject], turns: int) -> list[list[dict[str, float]]]:
    """For each subject its turns; the order changes from turn to turn (A B, B A), so neither always goes first."""
    taken: list[list[dict[str, float]]] = [[] for _ in subjects]
    for number in range(WARM_UP + turns):
        order = range(len(subjects)) if number % 2 == 0 else reversed(range(len(subjects)))
        for i in order:
            figures = turn(subjects[i])
            if number >= WARM_UP:
                taken[i].append(figures)
    return taken


def figures(subject: Subject, own: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    """A row of the record. `<what>_ratio`: median of the quotients of neighbouring turns; `_spread`: quartiles."""
    result: dict[str, Any] = {"model": subject.row.model, "implementation": subject.row.implementation}
    result["parameters"] = subject.model.num_parameters()
    for what in own[0]:
        values = [taken[what] for taken in own]
        ratios = [mine[what] / other[what] for mine, other in zip(own, base, strict=True)]
        result[what] = statistics.median(values)
        result[f"{what}_ratio"] = statistics.median(ratios)
        result[f"{what}_spread"] = quartiles(ratios)
    result["tokens_per_second"] = subject.tokens.numel() / result["train"]
    if peak := peak_flops(subject.device):
        flops = subject.model.flops_per_token(subject.config.data.context_length)
        result["mfu"] = flops * result["tokens_per_second"] / peak
    return result


def quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def measure(
    rows: list[Row], configs: list[str], overrides: list[str], turns: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """The Transformer beside itself (how far 1.000 can be trusted), then each row beside it."""
    base = Subject(Row(TRANSFORMER), configs, overrides, device)
    for row in [Row(TRANSFORMER), *rows]:
        subject = Subject(row, configs, overrides, device)
        base_turns, own = in_turns([base, subject], turns)
        yield figures(subject, own, base_turns)
        del subject
        gc.collect()


def rows_of(models: list[str]) -> list[Row]:
    """Each model by what `auto` is; ALSO_BY_REFERENCE once more."""
    return [
        Row(model, implementation)
        for model in models
        for implementation in ["auto", *["reference"] * (model in ALSO_BY_REFERENCE)]
    ]
