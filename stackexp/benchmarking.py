"""The cost of a memory in a whole model, in multiples of the plain Transformer, by paired measurements.

Subjects alternate in one process, so that changes of the machine's speed affect all. The measurements are a training
step (forward, backward, AdamW), a forward pass without gradients (prefill), one token after it (decode), as `generate`
runs it, and on CUDA the peak memory. Tokens are random, because no measurement depends on their values.
"""

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from stackexp import stack
from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.models.cross_entropy import NextTokenLoss
from stackexp.models.generation import Decoder
from stackexp.models.transformer import Cache
from stackexp.modules.base import TRUE_PRECISIONS, compile_model
from stackexp.runs import describe_environment
from stackexp.training.callbacks.steps import get_peak_flops

WARMUP_ROUNDS = 3  # kernels are compiled, allocators filled
PEAK_ROUNDS = 10
DECODE_WARMUP, DECODE_TOKENS = 5, 20  # on CUDA, the second token captures a graph
Subject = TypeVar("Subject")
Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)


class Ratio(NamedTuple):
    """The median of the ratios of neighboring measurements, with their quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def build_parser(description: str, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark script, with --out, and --rounds unless the script has none."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    return parser


def choose_device() -> torch.device:
    """Return the GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def alternate(
    subjects: Sequence[Subject], measure: Callable[[Subject], Result], rounds: int, warmup: int = WARMUP_ROUNDS
) -> list[list[Result]]:
    """Return the results of each subject, one per round after the warmup.

    The order reverses from round to round (A B, B A), so that no subject always comes first.
    """
    results: list[list[Result]] = [[] for _ in subjects]
    for number in range(warmup + rounds):
        order = range(len(subjects)) if number % 2 == 0 else reversed(range(len(subjects)))
        for i in order:
            result = measure(subjects[i])
            if number >= warmup:
                results[i].append(result)
    return results


def time_alternating(
    actions: Mapping[Key, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = WARMUP_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, list[float]]:
    """Return the seconds of each action, one value per round."""
    names = list(actions)
    times = alternate(names, lambda name: measure_seconds(actions[name], clock=clock), rounds, warmup)
    return dict(zip(names, times, strict=True))


def measure_seconds(action: Callable[[], object], *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one call, between two synchronizations of the GPU if there is one."""
    synchronize()
    start = clock()
    action()
    synchronize()
    return clock() - start


def choose_clock(device: torch.device) -> Callable[[], float]:
    """Return wall time, or the CPU time of this thread if it does all the work, so other programs do not count."""
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if is_alone else time.perf_counter


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compare(values: Sequence[float], base: Sequence[float]) -> Ratio:
    """Return the ratio of paired measurements."""
    ratios = [value / other for value, other in zip(values, base, strict=True)]
    low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    return Ratio(median, low, high)


def measure_peak_bytes(action: Callable[[], object]) -> int | None:
    """Return the peak bytes that an action allocates on the GPU; None on a CPU, where torch does not count them."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    return torch.cuda.max_memory_allocated() - before


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of several large matrix products: the most that a model can reach here."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = [measure_seconds(lambda: a @ b) for _ in range(WARMUP_ROUNDS + PEAK_ROUNDS)]
    return 2 * size**3 / min(seconds)


def measure_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.ones(2**31 if device.type == "cuda" else 2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [measure_seconds(lambda: target.copy_(source)) for _ in range(WARMUP_ROUNDS + PEAK_ROUNDS)]
    return 2 * len(source) / min(seconds)


def write_record(path: Path | None, rows: Any, **details: Any) -> dict[str, Any]:
    """Return rows with environment (hardware, versions, commit, command), and write them as JSON if there is a path."""
    record = {"environment": describe_environment(), **details, "rows": rows}
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


TRANSFORMER = "transformer"
ALSO_BY_REFERENCE = ("stacktrans", "full_dim")
"""Memories that are also measured with the reference implementation, to show the gain."""


class BenchmarkedModel:
    """One model with its optimizer, and a method for each measured pass. Weights are drawn from seed 0.

    `name` is TRANSFORMER or a choice of `model.memory`; `implementation` is that of its stack.
    """

    def __init__(
        self, name: str, configs: list[str], overrides: list[str], device: torch.device, implementation: str = "auto"
    ):
        self.name, self.implementation, self.device = name, implementation, device
        memory = "null" if name == TRANSFORMER else name
        self.config = compose(configs, [*overrides, f"model.memory={memory}"])
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated()
        with device:
            self.model = registry.build("model", self.config.model)
        trainer = self.config.trainer
        self.model.to(TRUE_PRECISIONS.get(trainer.precision, torch.float32))
        self.model.checkpoint_blocks = trainer.recompute_mode
        is_compiled = compile_model(self.model, self.config.trainer.compile, device.type, has_fixed_lengths=True)
        self.optimizer = registry.build("optimizer", self.config.optimizer, self.model)
        self.criterion = NextTokenLoss.from_config(self.config.trainer, is_compiled)
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=trainer.precision == "bf16-mixed")
        self.dtype = torch.bfloat16 if trainer.precision == "bf16-mixed" else self.model.embedding.weight.dtype
        shape = (self.config.data.micro_batch_size, self.config.data.context_length)
        self.tokens = torch.randint(self.config.model.vocab_size, shape, device=device)
        self.train()  # allocates gradients and the optimizer's state
        self._resident_bytes = torch.cuda.memory_allocated() - before

    @contextlib.contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        self.model.train(training)
        with stack.use_implementation(self.implementation), self._autocast, torch.set_grad_enabled(training):
            yield

    def train(self) -> None:
        """Take one optimizer step on one micro-batch."""
        with self._mode(training=True):
            output = self.model(self.tokens, return_hidden=self.criterion.needs_hidden)
            losses = self.criterion(self.model, output, self.tokens)
        (losses.total + self.model.entropy_weight * output.entropy).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def prefill(self) -> None:
        """Run all tokens without gradients."""
        with self._mode(training=False):
            self.model(self.tokens)

    def measure_decode(self) -> float:
        """Return the seconds of a token after all others: the median of DECODE_TOKENS."""
        cache, (batch_size, length), seconds = Cache(), self.tokens.shape, []
        with self._mode(training=False), torch.compiler.set_stance("force_eager"):  # as in `generate`
            self.model(self.tokens, cache)
            decoder = Decoder(self.model, cache, batch_size, length + DECODE_WARMUP + DECODE_TOKENS)
            for _ in range(DECODE_WARMUP + DECODE_TOKENS):
                seconds.append(measure_seconds(lambda: decoder(self.tokens[:, 0])))
        return statistics.median(seconds[DECODE_WARMUP:])

    def count_decode_bytes(self) -> int:
        """Return the bytes that a token must read: all weights, and the keys and values of the others."""
        config, weights = self.config.model, self.model.num_parameters()
        if not config.tie_embeddings:
            weights -= self.model.embedding.weight.numel()  # a lookup reads one row
        keys = self.tokens.numel() * config.num_layers * config.num_kv_heads * config.hidden_size // config.num_heads
        return (weights + 2 * keys) * self.dtype.itemsize

    def measure(self) -> dict[str, float]:
        """Return the seconds of each pass, and on CUDA the peak bytes of a training step of this model alone."""
        result = {"train": measure_seconds(self.train), "prefill": measure_seconds(self.prefill)}
        result["decode"] = self.measure_decode()
        if (allocated := measure_peak_bytes(self.train)) is not None:
            result["memory"] = self._resident_bytes + allocated
        return result


def measure_efficiency(
    memories: list[str], configs: list[str], overrides: list[str], rounds: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield a row for the Transformer against itself, which shows the noise, then one for each memory.

    If a model does not fit on the GPU, its row has an `error` instead of measurements.
    """
    cases = [(TRANSFORMER, "auto")]
    for memory in memories:
        cases += [(memory, "auto"), *[(memory, "reference")] * (memory in ALSO_BY_REFERENCE)]
    base = BenchmarkedModel(TRANSFORMER, configs, overrides, device)
    flops, bandwidth = measure_peak_flops(device, base.dtype), measure_bandwidth(device)
    for name, implementation in cases:
        row: dict[str, Any] = {"model": name, "implementation": implementation}
        try:
            subject = BenchmarkedModel(name, configs, overrides, device, implementation)
            base_results, results = alternate([base, subject], BenchmarkedModel.measure, rounds)
            row |= _summarize(subject, results, base_results) | _compute_shares(subject, results, flops, bandwidth)
        except torch.OutOfMemoryError:
            row["error"] = "out of memory"
        subject = base  # to release the memory of the measured model
        gc.collect()
        torch.cuda.empty_cache()
        yield row


def _summarize(subject: BenchmarkedModel, own: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    """Return medians, and `<quantity>_ratio` and `<quantity>_spread` (quartiles) over the Transformer."""
    row: dict[str, Any] = {"parameters": subject.model.num_parameters()}
    row["flops_per_token"] = subject.model.flops_per_token(subject.config.data.context_length)
    for quantity in own[0]:
        values = [result[quantity] for result in own]
        ratio = compare(values, [result[quantity] for result in base])
        row[quantity] = statistics.median(values)
        row[f"{quantity}_ratio"], row[f"{quantity}_spread"] = ratio.median, [ratio.low, ratio.high]
    return row


def _compute_shares(
    subject: BenchmarkedModel, own: list[dict[str, float]], peak_flops: float, bandwidth: float
) -> dict[str, float]:
    """Return tokens/s, the shares of the device's FLOP/s and bytes per second, and MFU: the share of the vendor's.

    `decode_bound`: the seconds in which a copy moves as many bytes as a token of decoding must read.
    """
    tokens_per_second = subject.tokens.numel() / statistics.median(result["train"] for result in own)
    flops = subject.model.flops_per_token(subject.config.data.context_length) * tokens_per_second
    bound = subject.count_decode_bytes() / bandwidth
    shares = {"tokens_per_second": tokens_per_second, "peak_share": flops / peak_flops}
    shares |= {"decode_bound": bound, "bandwidth_share": bound / statistics.median(result["decode"] for result in own)}
    return shares | ({"mfu": flops / peak} if (peak := get_peak_flops(subject.device)) else {})
