"""How fast the loader brings training data: tokens per second of one loader process on one core, from a warm cache of a
remote; and the time to the first batch of a set of 1,000 shards.

    python benchmarks/data_loading.py [--json FILE]

Asked: 2 million tokens/s at context 2048; the first batch of 1,000 shards within 3 s, imports not counted (they are
measured beside: a program imports torch, lightning and streaming once, whatever it reads).
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

VOCAB, CONTEXT, SECONDS = 50_304, 2048, 6.0
BATCH = 8


def write_set(folder: Path, shards: int, sequences_per_shard: int) -> None:
    """A prepared set of random tokens."""
    from stackexp.data import shards as format_
    from stackexp.data.tokenizer import compute_fingerprint, train_tokenizer

    format_.SHARD_BYTES = sequences_per_shard * CONTEXT * 2
    folder.mkdir(parents=True)
    writer = format_.ShardWriter(folder, CONTEXT, np.dtype(np.uint16))
    rng = np.random.default_rng(0)
    for _ in range(shards):
        writer.write(rng.integers(0, VOCAB, sequences_per_shard * CONTEXT, dtype=np.uint16))
    writer.close()
    tokenizer = train_tokenizer(["text"], 300)
    count = shards * sequences_per_shard
    record = {"documents": 1, "bytes": 1, "dropped_tokens": 0, "bad_lines": 0, "sequences": count}
    record |= {"tokens": count * CONTEXT, "vocab_size": VOCAB, "context_length": CONTEXT}
    corpus = format_.Corpus(tokenizer=compute_fingerprint(tokenizer), **record)
    format_.write_metadata(folder, corpus, writer.shards, tokenizer)


def warm(remote: str) -> str:
    """The folder of a cache that holds all of the set."""
    cache = f"{remote}-cache"
    if not os.path.exists(cache):
        shutil.copytree(remote, cache)
        Path(cache, ".remote").write_text(remote)
    return cache


def measure(what: str, remote: str, cache: str, workers: int, document_mask: bool) -> dict[str, float]:
    """In a process of its own, on one core: seconds of its imports and to the first batch, tokens per second after."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    began = time.perf_counter()
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
        vocab_size=VOCAB,
        context_length=CONTEXT,
        global_batch_tokens=CONTEXT * BATCH,
        micro_batch_size=BATCH,
        num_workers=workers,
        document_mask=document_mask,
    )
    data = PretrainingData(config, seed=0)
    data.setup("fit")
    data.trainer = SimpleNamespace(global_rank=0, world_size=1, num_devices=1)
    batches = endless(data.train_dataloader())
    next(batches)
    first = time.perf_counter()
    figures = {"import_seconds": imported - began, "first_batch_seconds": first - imported}
    if what == "first batch":
        return figures
    for _ in range(20):
        next(batches)
    begin, used, tokens = time.perf_counter(), cpu_seconds(), 0
    while time.perf_counter() < begin + SECONDS:
        tokens += next(batches)["tokens"].numel()
    elapsed, used = time.perf_counter() - begin, cpu_seconds() - used
    # by the core's time: on a busy machine, what other programs take of it does not count
    return figures | {"tokens_per_second": tokens / elapsed, "tokens_per_cpu_second": tokens / used}


def cpu_seconds() -> float:
    """Of this process and its loader processes."""
    ticks = 0
    for process in multiprocessing.active_children():
        ticks += sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def endless(loader: Iterable[dict]) -> Iterator[dict]:
    """Epoch after epoch."""
    while True:
        yield from loader


CASES = {
    "loader in the program itself": ("throughput", 0, False),
    "loader process beside it": ("throughput", 1, False),
    "loader process, document masks": ("throughput", 1, True),
    "first batch of 1,000 shards": ("first batch", 1, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        name, remote, cache = options.case
        what, workers, masks = CASES[name]
        print(json.dumps(measure(what, remote, cache, workers, masks)), flush=True)
        return
    from stackexp.tables import table

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_set(Path(folder, "large"), 4, 4096)
        write_set(Path(folder, "many"), 1000, 16)
        for name, (what, *_) in CASES.items():
            remote = f"{folder}/{'large' if what == 'throughput' else 'many'}"
            command = [sys.executable, __file__, "--case", name, remote, warm(remote)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[name] = json.loads(done.stdout.splitlines()[-1])
    columns = ["first_batch_seconds", "import_seconds", "tokens_per_second", "tokens_per_cpu_second"]
    rows = [[name, *(f"{found[c]:,.2f}" if c in found else "" for c in columns)] for name, found in results.items()]
    print(table([["", *columns], *rows], align="<>>>>", rules=(1,)))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
