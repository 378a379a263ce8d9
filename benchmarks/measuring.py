"""Measurements that alternate between subjects, and the record of a benchmark, for the scripts in this folder."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from stackexp.runs import describe_environment

WARMUP_ROUNDS = 3  # kernels are compiled, allocators filled
PEAK_ROUNDS = 10
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


def build_parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """Return the parser of a benchmark script, with --rounds and --out."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
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
    if len(ratios) < 2:
        return Ratio(ratios[0], ratios[0], ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
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


def write_record(path: Path | None, rows: Any, **details: Any) -> dict[str, Any]:
    """Return rows with environment (hardware, versions, commit, command), and write them as JSON if there is a path."""
    record = {"environment": describe_environment(), **details, "rows": rows}
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record
