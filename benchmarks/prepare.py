"""Throughput of `data prepare` against the `tokenizers` library alone, on the same text in the same run.

    python benchmarks/prepare.py [--megabytes 32] [--rounds 3] [--workers 2] [--vocab-size 32768] [--out FILE.json]

The two alternate. The library has the texts in memory and only calls `encode_batch_fast`, with as many threads as `data
prepare` has processes. `data prepare` also starts its processes, reads .jsonl.gz, parses JSON, and writes shards with
hashes. Text: the Python source installed here. With `--workers 1`, CPU time is reported too; other programs disturb it
less. More workers are not children of this process, so their CPU time is unknown.
"""

import argparse
import gzip
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from stackexp.benchmarking import build_parser, compare, write_record
from stackexp.data.prepare import Preparation, prepare
from stackexp.data.tokenizer import load_tokenizer, train_tokenizer
from stackexp.tables import format_table

DOCUMENTS = 1000  # per file, which is one unit of work, and per call of the library


def read_texts(size: int) -> list[str]:
    """Return Python source files of `size` bytes in total."""
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]  # one may contain the other
    texts, total = [], 0
    for path in sorted({path for folder in folders for path in folder.rglob("*.py")}):
        text = path.read_text(encoding="utf-8", errors="ignore")
        texts += [text] if text else []
        total += len(text.encode())
        if total >= size:
            return texts
    sys.exit(f"prepare.py: only {total / 1e6:.0f} MB of Python source found; lower --megabytes")


def write_json_lines(texts: list[str], folder: Path) -> None:
    """Write the texts in Dolma's format, DOCUMENTS to a file."""
    folder.mkdir()
    for start in range(0, len(texts), DOCUMENTS):
        batch = enumerate(texts[start : start + DOCUMENTS], start)
        lines = [json.dumps({"id": str(number), "text": text, "source": "python"}) + "\n" for number, text in batch]
        (folder / f"{start:08}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode(), 6))


def measure(texts: list[str], folder: Path, args: argparse.Namespace) -> tuple[list[dict[str, float]], int]:
    """Return wall and CPU seconds of each round, and the number of tokens."""
    path = folder / "tokenizer.json"
    sample = texts[:: max(1, len(texts) // 500)]
    path.write_text(train_tokenizer(sample, args.vocab_size).to_str(), encoding="utf-8")
    results, corpora = [], []

    def encode() -> None:
        tokenizer = load_tokenizer(path)  # with an empty cache of words
        for start in range(0, len(texts), DOCUMENTS):
            tokenizer.encode_batch_fast(texts[start : start + DOCUMENTS], add_special_tokens=False)

    def run_prepare() -> None:
        plan = Preparation(folder / "source", tokenizer=path, unit_bytes=1)
        target = folder / f"set{len(corpora)}"
        corpora.append(prepare(plan, target, workers=args.workers))

    for _ in range(args.rounds):
        alone, alone_cpu = measure_times(encode)
        full, full_cpu = measure_times(run_prepare)
        results.append({"alone": alone, "alone_cpu": alone_cpu, "prepare": full, "prepare_cpu": full_cpu})
    assert corpora[-1].documents == len(texts)
    return results, corpora[-1].tokens


def measure_times(action: Callable[[], None]) -> tuple[float, float]:
    """Return wall seconds, and CPU seconds of this process and of the children that have ended."""
    start, before = time.perf_counter(), os.times()
    action()
    return time.perf_counter() - start, sum(os.times()[:4]) - sum(before[:4])


def main() -> None:
    """Run the benchmark."""
    parser = build_parser(__doc__, rounds=3)
    parser.add_argument("--megabytes", type=float, default=32, help="size of the text")
    parser.add_argument("--workers", type=int, default=2, help="processes, and threads of the library")
    parser.add_argument("--vocab-size", type=int, default=32_768)
    args = parser.parse_args()
    os.environ |= {"RAYON_NUM_THREADS": str(args.workers), "TOKENIZERS_PARALLELISM": "true"}  # before it is loaded
    texts = read_texts(int(args.megabytes * 1e6))
    size = sum(len(text.encode()) for text in texts)
    with tempfile.TemporaryDirectory() as folder:
        write_json_lines(texts, Path(folder, "source"))
        results, tokens = measure(texts, Path(folder), args)
    lines = []
    for key, label in {"alone": "tokenizers alone", "prepare": "data prepare"}.items():
        seconds, cpu = (statistics.median(result[k] for result in results) for k in (key, f"{key}_cpu"))
        speed = [f"{size / seconds / 1e6:.2f}", f"{tokens / seconds:,.0f}", f"{cpu:.2f}" if args.workers == 1 else ""]
        lines.append([label, f"{seconds:.2f}", *speed])
    print(f"{len(texts):,} documents, {size / 1e6:.1f} MB, {tokens:,} tokens, {args.workers} workers")
    print(format_table(lines, header=["", "seconds", "MB/s", "tokens/s", "CPU seconds"], align="<>>>>"))
    for kind, suffix in {"wall time": "", "CPU time": "_cpu"}.items() if args.workers == 1 else [("wall time", "")]:
        share = compare([r[f"alone{suffix}"] for r in results], [r[f"prepare{suffix}"] for r in results])
        print(f"data prepare reaches {share} of the library by {kind}")
    write_record(args.out, results, documents=len(texts), bytes=size, tokens=tokens)


if __name__ == "__main__":
    main()
