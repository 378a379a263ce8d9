"""The cost of each memory in a whole model, in multiples of the plain Transformer, by paired measurements.

    python benchmarks/efficiency.py [--config NAME] [--rounds 100] [--only MEMORY,...] [--out FILE] [KEY=VALUE ...]

Models alternate with the Transformer in one process, so that changes of the machine's speed affect all. The
measurements are a training step (forward, backward, AdamW), a forward pass without gradients (prefill), one token after
it (decode), and on CUDA the peak memory. Tokens are random, because no measurement depends on their values. Without
--config, the model of the quickstart is measured. `report efficiency FILE.json` compares the record with the paper.
"""

import contextlib
import gc
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from measuring import (
    alternate,
    build_parser,
    choose_device,
    compare,
    measure_peak_bytes,
    measure_peak_flops,
    measure_seconds,
    write_record,
)

from stackexp import stack
from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.errors import ConfigError, suggest_name
from stackexp.models.cross_entropy import NextTokenLoss
from stackexp.models.transformer import Cache
from stackexp.reports.efficiency import build_report
from stackexp.reports.report import format_report
from stackexp.training.callbacks.steps import get_peak_flops
from stackexp.verbs.parser import split_names

MEMORIES = (
    *("stacktrans", "queue", "push_only", "single_head", "full_dim", "authors_code"),
    *("stacktrans-normalized", "adapter"),
    *("attention_residual", "dense_former", "hyper_connections", "mhc"),
    *("residual_scale", "residual_stack", "residual_streams", "value_skip"),
)
TRANSFORMER = "transformer"
ALSO_BY_REFERENCE = ("stacktrans", "full_dim")
"""Memories that are also measured with the reference implementation, to show the gain."""
GRAPHS_PER_MODEL = 8
"""torch.compile makes about 4 for each model. All models share the code of Transformer.forward and so its limit."""


class Case(NamedTuple):
    """A model, TRANSFORMER or a choice of `model.memory`, and the implementation of its stack."""

    model: str
    implementation: str = "auto"


class BenchmarkedModel:
    """One model with its optimizer, and a method for each measured pass. Weights are drawn from seed 0."""

    def __init__(self, case: Case, configs: list[str], overrides: list[str], device: torch.device):
        self.case, self.device = case, device
        memory = "null" if case.model == TRANSFORMER else case.model
        self.config = compose(configs, [*overrides, f"model.memory={memory}"])
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated()
        with device:
            self.model = registry.build("model", self.config.model)
        if self.config.trainer.compile and case.implementation == "auto":
            self.model.compile(dynamic=False)
        self.optimizer = registry.build("optimizer", self.config.optimizer, self.model)
        self.criterion = NextTokenLoss.from_config(self.config.trainer)
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled="bf16" in self.config.trainer.precision)
        shape = (self.config.data.micro_batch_size, self.config.data.context_length)
        self.tokens = torch.randint(self.config.model.vocab_size, shape, device=device)
        self.train()  # allocates gradients and the optimizer's state
        self._resident_bytes = torch.cuda.memory_allocated() - before

    @contextlib.contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        self.model.train(training)
        with stack.use_implementation(self.case.implementation), self._autocast, torch.set_grad_enabled(training):
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

    def fill_cache(self) -> Cache:
        """Return a cache of all tokens except the last."""
        cache = Cache()
        with self._mode(training=False):
            self.model(self.tokens[:, :-1], cache)
        return cache

    def decode(self, cache: Cache) -> None:
        """Run one token after those in the cache."""
        with self._mode(training=False):
            self.model(self.tokens[:, -1:], cache)

    def measure(self) -> dict[str, float]:
        """Return the seconds of each pass, and on CUDA the peak bytes of a training step of this model alone."""
        result = {"train": measure_seconds(self.train), "prefill": measure_seconds(self.prefill)}
        cache = self.fill_cache()
        result["decode"] = measure_seconds(lambda: self.decode(cache))
        if (allocated := measure_peak_bytes(self.train)) is not None:
            result["memory"] = self._resident_bytes + allocated
        return result


def measure_efficiency(
    memories: list[str], configs: list[str], overrides: list[str], rounds: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield a row for the Transformer against itself, which shows the noise, then one for each memory."""
    cases = [Case(TRANSFORMER)]
    for memory in memories:
        cases += [Case(memory), *[Case(memory, "reference")] * (memory in ALSO_BY_REFERENCE)]
    with _limit_graphs(len(cases) + 1, compose(configs, overrides).trainer.compile):
        base = BenchmarkedModel(cases[0], configs, overrides, device)
        dtype = torch.bfloat16 if "bf16" in base.config.trainer.precision else torch.float32
        peak = measure_peak_flops(device, dtype)
        for case in cases:
            row = _measure_case(case, base, configs, overrides, rounds, peak)
            gc.collect()
            torch.cuda.empty_cache()
            yield row


def _limit_graphs(num_models: int, is_compiled: bool) -> contextlib.AbstractContextManager[Any]:
    """Allow GRAPHS_PER_MODEL graphs of Transformer.forward; beyond them raise, instead of running eagerly."""
    if not is_compiled:
        return contextlib.nullcontext()
    limit = GRAPHS_PER_MODEL * num_models
    return torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True)


def _measure_case(
    case: Case, base: BenchmarkedModel, configs: list[str], overrides: list[str], rounds: int, peak: float
) -> dict[str, Any]:
    """Return the row of a case; if it does not fit on the GPU, the row has an `error` instead of measurements."""
    try:
        subject = BenchmarkedModel(case, configs, overrides, base.device)
        base_results, results = alternate([base, subject], BenchmarkedModel.measure, rounds)
    except torch.OutOfMemoryError:
        return {"model": case.model, "implementation": case.implementation, "error": "out of memory"}
    return _summarize(subject, results, base_results) | _compute_shares(subject, results, peak)


def _summarize(subject: BenchmarkedModel, own: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    """Return medians, and `<quantity>_ratio` and `<quantity>_spread` (quartiles) over the Transformer."""
    row: dict[str, Any] = {"model": subject.case.model, "implementation": subject.case.implementation}
    row["parameters"] = subject.model.num_parameters()
    row["flops_per_token"] = subject.model.flops_per_token(subject.config.data.context_length)
    for quantity in own[0]:
        values = [result[quantity] for result in own]
        ratio = compare(values, [result[quantity] for result in base])
        row[quantity] = statistics.median(values)
        row[f"{quantity}_ratio"], row[f"{quantity}_spread"] = ratio.median, [ratio.low, ratio.high]
    return row


def _compute_shares(subject: BenchmarkedModel, own: list[dict[str, float]], measured_peak: float) -> dict[str, float]:
    """Return tokens/s, the model FLOP/s over those of a large matrix product, and MFU: over the vendor's figure."""
    tokens_per_second = subject.tokens.numel() / statistics.median(result["train"] for result in own)
    flops = subject.model.flops_per_token(subject.config.data.context_length) * tokens_per_second
    shares = {"tokens_per_second": tokens_per_second, "peak_share": flops / measured_peak}
    return shares | ({"mfu": flops / peak} if (peak := get_peak_flops(subject.device)) else {})


def main() -> None:
    """Run the benchmark."""
    parser = build_parser(__doc__, rounds=100)
    parser.add_argument("--config", action="append", metavar="NAME_OR_PATH", help="default: quickstart")
    parser.add_argument("--only", type=split_names, default=MEMORIES, metavar="MEMORY,...", help="default: all")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    args, overrides = parser.parse_known_args()
    configs = args.config or ["quickstart"]
    for name in args.only:
        if name not in MEMORIES:
            parser.error(f"--only: unknown memory {name!r}{suggest_name(name, MEMORIES)}; choose {', '.join(MEMORIES)}")
    for name in ("null", *args.only):
        try:
            config = compose(configs, [*overrides, f"model.memory={name}"])
        except ConfigError as error:
            parser.error(f"with model.memory={name}: {error}")
        if config.data.objective != "language_modeling":
            parser.error(f"data.kind {config.data.kind} has no text; use a config of a language model")
    rows = []
    for row in measure_efficiency(list(args.only), configs, overrides, args.rounds, choose_device()):
        rows.append(row)
        print(f"{row.get('error', 'measured')}: {row['model']} ({row['implementation']})", flush=True)
        record = write_record(args.out, rows, configs=configs, overrides=overrides)
    print(f"\n{format_report(build_report(record, args.out), 'markdown' if args.markdown else 'terminal')}")


if __name__ == "__main__":
    main()
