"""Prepared sets and loaders of training data without a trainer, in one process or in several ranks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed, multiprocessing

from stackexp.config.data import ShardsConfig
from stackexp.data import units
from stackexp.data.tokenizer import train_tokenizer
from stackexp.datamodules.pretraining import PretrainingData

T, V, BATCH = 16, 300, 8  # tokens per sequence, vocabulary, sequences per optimizer step
TOKENIZER = train_tokenizer([f"line {n} of {n * n} lines\n" for n in range(200)], V)
TEXTS = [f"line {n} of {n * n} lines\n" * 3 for n in range(200)]
Sample = tuple[int, int, int]  # index, source, hash


def write_set(folder: Path, first: int, documents: int) -> Path:
    """Prepare a set of `documents` documents numbered from `first`, in shards of eight sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "SHARD_BYTES", 8 * (T * 2 + 4) + 220)  # with offsets and header
        texts = (f"line {n} of {n * n} lines\n" * 3 for n in range(first, first + documents))
        units.write_documents(folder, texts, TOKENIZER, T)
    return folder


def build_config(**changes: Any) -> ShardsConfig:
    settings = {"vocab_size": V, "context_length": T, "global_batch_tokens": BATCH * T, "download_retries": 2}
    return ShardsConfig(**settings | {"micro_batch_size": 4, "num_workers": 0} | changes)


def open_data(config: ShardsConfig, rank: int = 0, world_size: int = 1) -> PretrainingData:
    data = PretrainingData(config, seed=5)
    data.setup("fit")
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size, num_devices=world_size)
    return data


def build_loader(config: ShardsConfig, rank: int = 0, world_size: int = 1):
    return open_data(config, rank, world_size).train_dataloader()


def read_samples(loader: Iterable, epochs: int = 1) -> list[Sample]:
    """Return index, source and hash of every sample, in order."""
    return [sample for _ in range(epochs) for batch in loader for sample in list_samples(batch)]


def list_samples(batch: dict) -> Iterator[Sample]:
    return zip(batch["index"].tolist(), batch["source"].tolist(), batch["hash"].tolist(), strict=True)


def split_into_steps(samples: list[Sample]) -> list[list[Sample]]:
    """Return the samples of each step, sorted."""
    return [sorted(samples[i : i + BATCH]) for i in range(0, len(samples), BATCH)]


def run_ranks(
    world_size: int, config: ShardsConfig, rendezvous: Path, steps: int, state: dict | None = None
) -> tuple[list[list[Sample]], dict]:
    """Return the samples of each step over all ranks, sorted, and the loader's state after the last."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    arguments = (world_size, config, str(rendezvous), queue, steps, state)
    ranks = [context.Process(target=_run_rank, args=(rank, *arguments)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    results = sorted((queue.get(timeout=200) for _ in ranks), key=lambda result: result[0])
    for process in ranks:
        process.join()
    for _, samples, _ in results:
        assert not isinstance(samples, str), samples
    return [sorted(s for _, samples, _ in results for s in samples[step]) for step in range(steps)], results[0][2]


def _run_rank(
    rank: int, world_size: int, config: ShardsConfig, rendezvous: str, queue, steps: int, state: dict | None
) -> None:
    distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank))
        try:
            queue.put((rank, *_read_steps(build_loader(config, rank, world_size), config, world_size, steps, state)))
        except Exception as error:
            queue.put((rank, f"{type(error).__name__}: {error}", None))
    distributed.barrier()
    distributed.destroy_process_group()


def _read_steps(
    loader, config: ShardsConfig, world_size: int, steps: int, state: dict | None
) -> tuple[dict[int, list[Sample]], dict]:
    """Return the samples of each step and the loader's state, saved in the middle of an iteration."""
    if state:
        loader.load_state_dict(state)
    samples: dict[int, list[Sample]] = defaultdict(list)
    per_step, number = BATCH // world_size // config.micro_batch_size, 0
    while number < steps * per_step:
        for batch in loader:
            samples[number // per_step] += list_samples(batch)
            number += 1
            if number == steps * per_step:
                break
    return dict(samples), loader.state_dict()
