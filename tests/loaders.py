"""Loaders of training data, without a trainer, in one process or in several."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed, multiprocessing

from stackexp.config.data import ShardsConfig
from stackexp.data import shards
from stackexp.data.packing import write_documents
from stackexp.data.tokenizer import train_tokenizer
from stackexp.datamodules.pretraining import PretrainingData

T, V, STEP = 16, 300, 8  # STEP sequences per optimizer step
TOKENIZER = train_tokenizer([f"line {n} of {n * n} lines\n" for n in range(200)], V)


def write(folder: Path, first: int, documents: int) -> Path:
    """A prepared set of `documents` documents numbered from `first`, in shards of eight sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_BYTES", 8 * T * 2)
        texts = (f"line {n} of {n * n} lines\n" * 3 for n in range(first, first + documents))
        write_documents(folder, texts, TOKENIZER, T)
    return folder


def config_of(**changes: Any) -> ShardsConfig:
    settings = {"vocab_size": V, "context_length": T, "global_batch_tokens": STEP * T, "download_retries": 2}
    return ShardsConfig(**settings | {"micro_batch_size": 4, "num_workers": 0} | changes)


def loader_of(config: ShardsConfig, rank: int = 0, world_size: int = 1):
    data = PretrainingData(config, seed=5)
    data.setup("fit")
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size, num_devices=world_size)
    return data.train_dataloader()


def samples(loader: Iterable, epochs: int = 1) -> list[tuple[int, int, int]]:
    """Number, source and hash of every sample, in order."""
    return [sample for _ in range(epochs) for batch in loader for sample in samples_of(batch)]


def samples_of(batch: dict) -> Iterator[tuple[int, int, int]]:
    return zip(batch["index"].tolist(), batch["source"].tolist(), batch["hash"].tolist(), strict=True)


def steps(samples: list) -> list[list]:
    """Each step's samples, in no order."""
    return [sorted(samples[i : i + STEP]) for i in range(0, len(samples), STEP)]


def _rank(rank: int, size: int, config: ShardsConfig, meeting: str, queue, count: int, state: dict | None) -> None:
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank))
        try:
            loader = loader_of(config, rank, size)
            if state:
                loader.load_state_dict(state)
            taken, per_step = defaultdict(list), STEP // size // config.micro_batch_size
            number = 0
            while number < count * per_step:
                for batch in loader:
                    taken[number // per_step] += samples_of(batch)
                    number += 1
                    if number == count * per_step:
                        break
            queue.put((rank, dict(taken), loader.state_dict()))
        except Exception as error:
            queue.put((rank, f"{type(error).__name__}: {error}", None))
    distributed.barrier()
    distributed.destroy_process_group()


def run_ranks(
    size: int, config: ShardsConfig, meeting: Path, count: int, state: dict | None = None
) -> tuple[list, dict]:
    """`count` steps of `size` processes: each step's samples, in no order, and the loader's state after them."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, size, config, str(meeting), queue, count, state))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    results = sorted((queue.get(timeout=200) for _ in ranks), key=lambda result: result[0])
    for process in ranks:
        process.join()
    for _, taken, _ in results:
        assert not isinstance(taken, str), taken
    return [sorted(sample for _, taken, _ in results for sample in taken[n]) for n in range(count)], results[0][2]
