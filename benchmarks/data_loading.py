"""Tokens per second of one loader process on one core from a warm cache, and the time to the first of 1,000 shards.

    python benchmarks/data_loading.py [--out FILE.json]

Targets: 2 million tokens/s at context 2048; a first batch of 1,000 shards within 3 s. Imports are reported separately,
because a program imports torch, lightning and streaming once. Each case runs in a process of its own.
"""

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np

VOCAB_SIZE, CONTEXT_LENGTH, BATCH_SIZE = 50_304, 2048, 8
SECONDS = 6.0
CASES = {  # name: (measures throughput, loader workers, document masks)
    "loader in the training process": (True, 0, False),
    "one loader process": (True, 1, False),
    "one loader process, document masks": (True, 1, True),
    "first batch of 1,000 shards": (False, 1, False),
}
COLUMNS = ("first_batch_seconds", "import_seconds", "tokens_per_second", "tokens_per_cpu_second")


def write_random_set(folder: Path, shards: int, sequences_per_shard: int) -> None:
    """Write a prepared set of random tokens."""
    from stackexp.data import units
    from stackexp.data.shards import Corpus
    from stackexp.data.tokenizer import compute_fingerprint, train_tokenizer
    from stackexp.files import write_json

    units.SHARD_BYTES = sequences_per_shard * (CONTEXT_LENGTH * 2 + 4) + 1000  # with offsets and header
    folder.mkdir(parents=True)
    writer = units.SequenceWriter(folder, CONTEXT_LENGTH, np.dtype(np.uint16))
    rng = np.random.default_rng(0)
    for _ in range(shards):
        writer.write(rng.integers(0, VOCAB_SIZE, sequences_per_shard * CONTEXT_LENGTH, dtype=np.uint16))
    writer.close()
    tokenizer = train_tokenizer(["text"], 300)
    count = shards * sequences_per_shard
    record = {"documents": 1, "bytes": 1, "dropped_tokens": 0, "bad_lines": 0, "sequences": count}
    record |= {"tokens": count * CONTEXT_LENGTH, "vocab_size": VOCAB_SIZE, "context_length": CONTEXT_LENGTH}
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "corpus.json", asdict(Corpus(tokenizer=compute_fingerprint(tokenizer), **record)))


def copy_to_cache(remote: str) -> str:
    """Return a cache folder that holds all of a remote set."""
    cache = f"{remote}-cache"
    if not os.path.exists(cache):
        shutil.copytree(remote, cache)
        Path(cache, ".remote").write_text(remote)
    return cache


def measure(case: str, remote: str, cache: str) -> dict[str, float]:
    """Measure one case on one core of this process."""
    measures_throughput, num_workers, document_mask = CASES[case]
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    start = time.perf_counter()
    from types import SimpleNamespace

    import streaming  # noqa: F401
    import torch

    from stackexp.config.data import ShardsConfig
    from stackexp.datamodules.pretraining import PretrainingData

    torch.set_num_threads(1)
    imported = time.perf_counter()
    config = ShardsConfig(
        path=cache,
        remote=remote,
        vocab_size=VOCAB_SIZE,
        context_length=CONTEXT_LENGTH,
        global_batch_tokens=CONTEXT_LENGTH * BATCH_SIZE,
        micro_batch_size=BATCH_SIZE,
        num_workers=num_workers,
        document_mask=document_mask,
    )
    data = PretrainingData(config, seed=0)
    data.setup("fit")
    data.trainer = SimpleNamespace(global_rank=0, world_size=1, num_devices=1)
    batches = repeat(data.train_dataloader())
    next(batches)
    result = {"import_seconds": imported - start, "first_batch_seconds": time.perf_counter() - imported}
    if not measures_throughput:
        return result
    for _ in range(20):
        next(batches)
    start, cpu, tokens = time.perf_counter(), cpu_seconds(), 0
    while time.perf_counter() < start + SECONDS:
        tokens += next(batches)["tokens"].numel()
    elapsed, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    return result | {"tokens_per_second": tokens / elapsed, "tokens_per_cpu_second": tokens / cpu}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its loader processes."""
    ticks = 0
    for process in multiprocessing.active_children():
        ticks += sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def repeat(loader: Iterable[dict]) -> Iterator[dict]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    from stackexp.benchmarking import write_record
    from stackexp.tables import format_table

    rows, spawn = [], multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as processes:
        write_random_set(Path(folder, "large"), 4, 4096)
        write_random_set(Path(folder, "many"), 1000, 16)
        for case, (measures_throughput, *_) in CASES.items():
            remote = f"{folder}/{'large' if measures_throughput else 'many'}"
            rows.append({"case": case, **processes.submit(measure, case, remote, copy_to_cache(remote)).result()})
    lines = [[row["case"], *(f"{row[c]:,.2f}" if c in row else "" for c in COLUMNS)] for row in rows]
    print(format_table(lines, header=["", *COLUMNS], align="<>>>>"))
    write_record(args.out, rows)


if __name__ == "__main__":
    main()
