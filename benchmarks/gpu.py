"""Measure what a GPU must decide, the most important first; ends within eight minutes and writes each row at once.

    python benchmarks/gpu.py [--out gpu.json] [--only SECTION ...] [--budget SECONDS] [--tiny]
    python -m stackexp report efficiency gpu.json

Sections: correctness (every Triton kernel against the reference), ceilings (a copy, a large matrix product), attention
(kernels of sdpa), training (the 360M models, one change after the other), projections and kernels (bytes per second),
decoding. A failure is a row with an `error`, and the next measurement starts. `--tiny` runs everything on a CPU with
small sizes.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "tests")]

import depth_steps  # noqa: E402
import scans  # noqa: E402
import stack_step  # noqa: E402

from stackexp import stack  # noqa: E402
from stackexp.benchmarking import (  # noqa: E402
    TRANSFORMER,
    BenchmarkedModel,
    alternate,
    choose_device,
    compare,
    measure_bandwidth,
    measure_peak_bytes,
    measure_peak_flops,
    measure_seconds,
    synchronize,
    write_record,
)
from stackexp.config import registry  # noqa: E402
from stackexp.config.compose import compose  # noqa: E402
from stackexp.models import attention, layers, transformer  # noqa: E402
from stackexp.training.callbacks.steps import get_peak_flops  # noqa: E402

CONFIG = "pretrain/transformer-360m"
SIZES = ["trainer.precision=bf16-mixed", "data.context_length=2048"]
TINY = ["model.num_layers=2", "model.hidden_size=48", "model.num_heads=3", "model.num_kv_heads=1"]
TINY += ["model.intermediate_size=64", "data.vocab_size=64", "data.context_length=16"]
CHECKED_MEMORIES = ("stacktrans", "single_head", "full_dim", "queue", "push_only", "authors_code")
CORRECTNESS_SECONDS, LAST_SECONDS = 60, 20
ROUNDS = 8
COMPARED_LAYERS = 6
"""Each layer of a compiled step has another state, and so a graph of its own."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to run the models; each change to the one before is measured with the Transformer."""

    name: str
    compiled: bool = True
    cudnn: bool = True  # the first kernel of sdpa; else FlashAttention-2
    one_product: bool = True  # for q, k and v, and for gate and up
    residual: str = "float32"
    batch: int = 16

    def list_overrides(self) -> list[str]:
        """Return the config overrides."""
        overrides = [f"trainer.compile={str(self.compiled).lower()}", f"model.residual_dtype={self.residual}"]
        return [*overrides, f"data.micro_batch_size={self.batch}"]


EAGER = Variant("eager", compiled=False, cudnn=False)
BEST = Variant("bfloat16 residual", residual="bfloat16")
VARIANTS = [
    (EAGER, ["stacktrans"]),
    (Variant("compiled", cudnn=False, one_product=False), []),
    (Variant("cuDNN", one_product=False), []),
    (Variant("one product"), ["stacktrans"]),
    (BEST, ["stacktrans", "full_dim", "single_head"]),
    (dataclasses.replace(BEST, name="batch 32", batch=32), []),
]


class Measurements:
    """The rows of one run, its device and its time limit."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out, self.budget, self.tiny = args.out, args.budget, args.tiny
        self.device = torch.device("cpu") if args.tiny else choose_device()
        self.rounds = 1 if args.tiny else ROUNDS
        self.start = time.monotonic()
        self.rows: list[dict[str, Any]] = []

    @property
    def seconds_left(self) -> float:
        """The seconds until the run must end."""
        return self.budget - (time.monotonic() - self.start)

    def add(self, section: str, name: str, **values: Any) -> None:
        """Print a row and write all rows."""
        at = round(time.monotonic() - self.start, 1)
        self.rows.append({"section": section, "name": name, "at": at, **values})
        write_record(self.out, self.rows)
        shown = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
        print(f"[{at:6.1f} s] {section:12} {name:32} {shown}", flush=True)

    @contextlib.contextmanager
    def attempt(self, section: str, name: str, **values: Any) -> Iterator[None]:
        """Add a row with the error if the body fails: one failure must not end the run."""
        try:
            yield
        except Exception as error:
            message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self.add(section, name, **values, error=message)

    def measure(self, action: Callable[[], object], warmup: int = 2) -> float:
        """Return the median seconds of an action."""
        return statistics.median([measure_seconds(action) for _ in range(warmup + self.rounds)][warmup:])


def check_kernels(run: Measurements) -> None:
    """Compare every Triton kernel with the reference, for at most CORRECTNESS_SECONDS."""
    kernels = {
        "depth": (depth_steps, "triton"),
        "coefficients": (depth_steps, "coefficients"),
        "scan": (scans, "triton"),
    }
    checks: list[tuple[str, Callable[[], None]]] = []
    for kernel, (module, name) in kernels.items():
        arguments = ("eager", "cpu") if run.tiny else (name, "cuda")
        for case in module.cases():
            checks.append((f"{kernel} {case.name}", functools.partial(module.check, arguments[0], case, arguments[1])))
    random.Random(0).shuffle(checks)  # if the time is short, it serves every kernel
    models = itertools.product(CHECKED_MEMORIES, ("float32", "bfloat16"))
    checks = [
        (f"model {name}, {dtype}", functools.partial(check_model, run, name, getattr(torch, dtype)))
        for name, dtype in models
    ] + checks
    passed, start = 0, time.monotonic()
    for name, check in checks[:8] if run.tiny else checks:
        if time.monotonic() - start > CORRECTNESS_SECONDS:
            break
        with run.attempt("correctness", name):
            check()
            passed += 1
    run.add("correctness", "all", passed=passed, of=len(checks))


def check_model(run: Measurements, memory: str, dtype: torch.dtype) -> None:
    """Compare hidden states and all gradients of a small model with those of the reference.

    With bfloat16, products round to it, as in training with `bf16-mixed`: then the fused projections run, too.
    """
    overrides = [*TINY, f"model.memory={memory}", "trainer.precision=32-true"]
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    config = compose([CONFIG], overrides)
    torch.manual_seed(0)
    with run.device:
        model = registry.build("model", config.model)
    tokens, results = torch.randint(config.model.vocab_size, (3, 70), device=run.device), []
    for implementation in ("auto", "reference"):
        is_rounded = dtype != torch.float32
        with stack.use_implementation(implementation), torch.autocast(run.device.type, dtype, enabled=is_rounded):
            output = model(tokens, return_hidden=True)
            gradients = torch.autograd.grad(
                output.hidden.logsumexp(-1).mean() + output.entropy, list(model.parameters())
            )
        results.append((output.hidden, *gradients))
    for got, wanted in zip(*results, strict=True):
        difference = (got - wanted).norm().item()
        if not difference <= tolerance * wanted.norm().item() + 1e-6:  # the gradient of a gate is a sum that cancels
            raise AssertionError(f"difference {difference:.1e} of {wanted.norm().item():.1e}")


def measure_ceilings(run: Measurements) -> None:
    """Measure the bandwidth of a copy and the FLOP/s of a large matrix product."""
    run.add("ceilings", "copy", terabytes_per_second=measure_bandwidth(run.device) / 1e12)
    flops = 1e9 if run.tiny else measure_peak_flops(run.device, torch.bfloat16)
    run.add("ceilings", "matrix product", teraflops_per_second=flops / 1e12)


def measure_attention(run: Measurements) -> None:
    """Measure the kernels of sdpa at the sizes of the 360M model, with grouped and with repeated keys."""
    batch, length, heads, kv_heads, size = (1, 16, 3, 1, 8) if run.tiny else (16, 2048, 15, 5, 64)
    flops = 4 * length**2 / 2 * size * heads * batch
    shapes = [(batch, length, n, size) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, device=run.device, dtype=torch.bfloat16).transpose(1, 2) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    kernels = [SDPBackend.MATH] if run.tiny else [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    for kernel, repeats in itertools.product(kernels, (False, True)):
        name = f"{kernel.name}{', repeated keys' if repeats else ''}"

        def forward(repeats: bool = repeats) -> torch.Tensor:
            keys = [x.repeat_interleave(heads // kv_heads, 1) if repeats else x for x in (k, v)]
            return F.scaled_dot_product_attention(q, *keys, is_causal=True, enable_gqa=not repeats)

        with run.attempt("attention", name), sdpa_kernel(kernel):
            gradient = torch.randn_like(forward())
            once = run.measure(forward)
            both = run.measure(lambda f=forward, g=gradient: torch.autograd.grad(f(), leaves, g))
            rates = {"forward": flops / once / 1e12, "backward": 2.5 * flops / max(both - once, 1e-9) / 1e12}
            run.add("attention", name, **{f"{which}_teraflops_per_second": rate for which, rate in rates.items()})


@contextlib.contextmanager
def apply_variant(variant: Variant) -> Iterator[None]:
    """Run with the kernels of a variant. Graphs contain them, so the graphs of the last variant are forgotten."""
    kernels, apply_linears = list(attention.CUDA_KERNELS), attention.apply_linears
    transformer._compile_part.cache_clear()
    torch._dynamo.reset()
    try:
        if not variant.cudnn:
            attention.CUDA_KERNELS.sort(key=lambda kernel: kernel == SDPBackend.CUDNN_ATTENTION)
        if not variant.one_product:
            attention.apply_linears = layers.apply_linears = lambda x, *linears: tuple(linear(x) for linear in linears)
        attention.choose_cuda_kernel.cache_clear()
        yield
    finally:
        attention.CUDA_KERNELS[:] = kernels
        attention.apply_linears = layers.apply_linears = apply_linears


def measure_training(run: Measurements) -> None:
    """Measure a training step, a pass without gradients and the peak memory of each variant.

    The Transformer's ratios are over its first variant, per token; the memories' are over the Transformer of the same
    variant, with which they alternate.
    """
    first: dict[str, float] = {}
    for variant, memories in VARIANTS:
        overrides = [*SIZES, *variant.list_overrides(), *(TINY if run.tiny else [])]
        batch = 2 if run.tiny else variant.batch
        overrides += [
            f"data.micro_batch_size={batch}",
            f"data.global_batch_tokens={batch * (16 if run.tiny else 2048)}",
        ]
        base = None
        for model in [TRANSFORMER, *memories]:
            names = {"model": model, "variant": variant.name}
            with apply_variant(variant), run.attempt("training", f"{model}, {variant.name}", **names):
                if run.seconds_left < 2 * LAST_SECONDS:
                    raise TimeoutError("no time left")
                started = time.monotonic()
                subject = BenchmarkedModel(model, [CONFIG], overrides, run.device)
                synchronize()
                names["first_step_seconds"] = time.monotonic() - started
                if model == TRANSFORMER:
                    base = subject
                results = measure_pair(run, subject, base)
                first = first or {key: statistics.median(t) / subject.tokens.numel() for key, t in results[0].items()}
                run.add("training", f"{model}, {variant.name}", **names, **summarize(run, subject, results, first))
            if run.device.type == "cuda":
                torch.cuda.empty_cache()


def time_pass(run_pass: Callable[[BenchmarkedModel], None], subject: BenchmarkedModel) -> float:
    """Return the seconds of a pass."""
    return measure_seconds(lambda: run_pass(subject))


def measure_pair(
    run: Measurements, subject: BenchmarkedModel, base: BenchmarkedModel | None
) -> list[dict[str, list[float]]]:
    """Return the seconds of each pass of the subject and, if it is another model, of its base."""
    if base is None:
        raise RuntimeError("the Transformer of this variant failed")
    subjects = [subject] if subject is base else [subject, base]
    results: list[dict[str, list[float]]] = [{} for _ in subjects]
    for quantity, run_pass in {"train": BenchmarkedModel.train, "prefill": BenchmarkedModel.prefill}.items():
        times = alternate(subjects, functools.partial(time_pass, run_pass), run.rounds, warmup=2)
        for result, of_subject in zip(results, times, strict=True):
            result[quantity] = of_subject
    for result, one in zip(results, subjects, strict=True):
        if (peak := measure_peak_bytes(one.train)) is not None:
            result["memory"] = [float(one._resident_bytes + peak)]
    return results


def summarize(
    run: Measurements, subject: BenchmarkedModel, results: list[dict[str, list[float]]], first: dict[str, float]
) -> dict[str, Any]:
    """Return medians, ratios with quartiles, tokens per second, and MFU on a GPU with a known peak."""
    own, base = results[0], results[-1]
    row: dict[str, Any] = {"parameters": subject.model.num_parameters()}
    row["flops_per_token"] = subject.model.flops_per_token(subject.config.data.context_length)
    for key, values in own.items():
        of_first = [first[key] * subject.tokens.numel()] * len(values)
        ratio = compare(values, base[key] if base is not own else of_first)
        row |= {key: statistics.median(values), f"{key}_ratio": ratio.median, f"{key}_spread": [ratio.low, ratio.high]}
    row["tokens_per_second"] = subject.tokens.numel() / row["train"]
    peak = get_peak_flops(run.device)
    return row | ({"mfu": row["flops_per_token"] * row["tokens_per_second"] / peak} if peak else {})


def measure_kernels(run: Measurements) -> None:
    """Measure the stack steps of all layers next to a copy of as many bytes, then compiled eager steps of few layers.

    If the compiled steps are within 5 %, the Triton kernels are not worth their code.
    """
    cases = [(memory, 32, ["auto"]) for memory in ("stacktrans", "single_head", "full_dim")]
    for memory, num_layers, implementations in [*cases, ("stacktrans", COMPARED_LAYERS, ["auto", "compiled"])]:
        with run.attempt("kernels", f"{memory}, {num_layers} layers"):
            overrides = [*SIZES, f"model.memory={memory}", f"data.micro_batch_size={2 if run.tiny else 16}"]
            overrides += [*(TINY if run.tiny else []), f"model.num_layers={2 if run.tiny else num_layers}"]
            for row in stack_step.measure(compose([CONFIG], overrides), run.rounds, run.device, implementations):
                name = f"{memory}, {num_layers} layers, {row.pop('pass')}, {row.pop('implementation')}"
                run.add("kernels", name, terabytes_per_second=row["gigabytes_per_second"] / 1e3, **row)


def measure_projections(run: Measurements) -> None:
    """Measure the kernels around a stack step at the sizes of the 360M model."""
    tokens, hidden, heads, size = (64, 48, 2, 8) if run.tiny else (16 * 2048, 960, 4, 16)
    if run.tiny:  # operations of about the same shape, because the kernels need CUDA
        products = SimpleNamespace(
            compute_down=lambda h, weight, *_: h @ weight.T,
            compute_up=lambda h, read, weight, gate: gate * h + read.flatten(1) @ weight,
            compute_weight_grads=lambda h, to_new_h, to_x, read: (to_x.flatten(1).T @ h, to_new_h.T @ read.flatten(1)),
        )
    else:
        products = importlib.import_module("stackexp.stack.triton.projection")
    dtype = torch.float32 if run.tiny else torch.bfloat16

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=run.device, dtype=dtype)

    down, up, actions, gate = draw(heads * size, hidden), draw(hidden, heads * size), draw(heads, 3, size), draw(1)
    read, to_x = draw(tokens, heads, size), draw(tokens, heads, size)
    for h in (draw(tokens, hidden, dtype=torch.float32), draw(tokens, hidden)):
        kept, of_h, dtype_name = h.to(dtype, copy=True), h.nbytes, str(h.dtype).removeprefix("torch.")
        of_copy = kept.nbytes if h.dtype != dtype else 0  # a float32 h is copied for the backward pass
        kernels = {
            "W_down h": (lambda h=h: products.compute_down(h, down, heads, actions, True), of_h + of_copy),
            "g h + W_up R": (lambda h=h: products.compute_up(h, read, up.T, gate), 2 * of_h),
            "weight gradients": (
                lambda h=h, kept=kept: products.compute_weight_grads(kept, h, to_x, read),
                of_h + kept.nbytes,
            ),
        }
        for name, (kernel, num_bytes) in kernels.items():
            with run.attempt("projections", f"{name}, h {dtype_name}"):
                seconds = run.measure(kernel)
                rate = num_bytes / seconds / 1e12
                run.add("projections", f"{name}, h {dtype_name}", milliseconds=1e3 * seconds, terabytes_per_second=rate)


def measure_decoding(run: Measurements) -> None:
    """Measure a token after 16 sequences of 2,048 (median of 20), next to the time of a copy of as many bytes."""
    batch, length = (2, 16) if run.tiny else (16, 2048)
    overrides = [*SIZES, f"data.micro_batch_size={batch}", f"data.global_batch_tokens={batch * length}"]
    bandwidth, seconds = measure_bandwidth(run.device), None
    for model in (TRANSFORMER, "stacktrans"):
        with run.attempt("decoding", model):
            subject = BenchmarkedModel(model, [CONFIG], [*overrides, *(TINY if run.tiny else [])], run.device)
            own = subject.measure_decode()
            seconds = seconds or own
            bound = subject.count_decode_bytes() / bandwidth
            run.add("decoding", model, milliseconds=1e3 * own, bound=1e3 * bound, ratio=own / seconds)


SECTIONS: dict[str, Callable[[Measurements], None]] = {
    "correctness": check_kernels,
    "ceilings": measure_ceilings,
    "attention": measure_attention,
    "training": measure_training,
    "projections": measure_projections,
    "decoding": measure_decoding,
    "kernels": measure_kernels,
}


def main() -> None:
    """Run the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), metavar="FILE.json")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--budget", type=float, default=460, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU, to test this script")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        parser.error("needs a GPU; --tiny runs small sizes on a CPU")
    run = Measurements(args)
    for name in args.only:
        with run.attempt(name, "section"):
            if run.seconds_left < LAST_SECONDS:
                raise TimeoutError("no time left")
            SECTIONS[name](run)


if __name__ == "__main__":
    main()
