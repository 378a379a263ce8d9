"""Throughput of `data prepare` beside that of the `tokenizers` library alone, on the same text in the same run.

    python benchmarks/prepare.py [--megabytes 32] [--turns 3] [--workers 2] [--vocab-size 32768] [--out FILE.json]

The two take turns. The library has the texts in memory and all it does is `encode_batch_fast`, with as many threads
as `data prepare` has processes. `data prepare` reads .jsonl.gz files and writes a prepared set: starting its
processes, decompression, JSON, shards, hashes and the merge are within its time. Text: the Python source installed
here. Beside the time by the clock stands the processors' own, which other programs on the machine disturb less.
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
from collections.abc import Iterator
from pathlib import Path

FILE_BYTES = 4_000_000  # of text in one file, which is one unit of work
DOCUMENTS = 1000  # of one call of the library


def installed() -> Iterator[Path]:
    """Python source files, the standard library's first: each once, looked for as it is asked for."""
    seen = set()
    for name in ("stdlib", "purelib"):  # one may lie in the other
        for root, folders, files in os.walk(sysconfig.get_path(name)):
            folders.sort()
            found = [path for f in sorted(files) if f.endswith(".py") and (path := Path(root, f)) not in seen]
            seen.update(found)
            yield from found


def read_texts(size: int) -> list[str]:
    """Python source files, `size` bytes in all; every one of them once."""
    texts, left = [], size
    for path in installed():
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        left -= len(texts[-1].encode())
        if left <= 0:
            return [text for text in texts if text]
    sys.exit(f"benchmarks/prepare.py: only {(size - left) / 1e6:.0f} MB of Python source here; lower --megabytes")


def write_files(texts: list[str], folder: Path) -> None:
    """The texts as Dolma has them."""
    folder.mkdir()
    lines, size, count = [], 0, 0
    for number, text in enumerate(texts):
        lines.append(json.dumps({"id": str(number), "text": text, "source": "python"}).encode() + b"\n")
        size += len(lines[-1])
        if size >= FILE_BYTES or number == len(texts) - 1:
            (folder / f"{count:04}.jsonl.gz").write_bytes(gzip.compress(b"".join(lines), 6))
            lines, size, count = [], 0, count + 1


def measure(texts: list[str], folder: Path, vocab_size: int, workers: int, turns: int) -> tuple[list[dict], int]:
    """Seconds of each turn, and the number of tokens."""
    from stackexp.data.prepare import prepare
    from stackexp.data.prepare_plan import Plan
    from stackexp.data.tokenizer import load_tokenizer, train_tokenizer

    path = folder / "tokenizer.json"
    path.write_text(train_tokenizer(texts[:: max(1, len(texts) // 500)], vocab_size).to_str(), encoding="utf-8")
    taken = []
    for turn in range(turns):
        tokenizer = load_tokenizer(path)  # its cache of words is empty
        start, processors = time.perf_counter(), processor_seconds()
        for n in range(0, len(texts), DOCUMENTS):
            tokenizer.encode_batch_fast(texts[n : n + DOCUMENTS], add_special_tokens=False)
        seconds = {"alone": time.perf_counter() - start, "alone_processors": processor_seconds() - processors}
        plan = Plan(folder / "source", tokenizer=path, unit_bytes=1)
        start, processors = time.perf_counter(), processor_seconds()
        corpus = prepare(plan, folder / f"set{turn}", workers=workers, show_progress=False)
        seconds |= {"prepare": time.perf_counter() - start, "prepare_processors": processor_seconds() - processors}
        taken.append(seconds)
        assert corpus.documents == len(texts)
    return taken, corpus.tokens


def processor_seconds() -> float:
    """Of this process and of those it started that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=32, help="of text")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="processes, and threads of the library")
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args()
    os.environ |= {"RAYON_NUM_THREADS": str(options.workers), "TOKENIZERS_PARALLELISM": "true"}  # before it is loaded
    from stackexp.runs import environment
    from stackexp.tables import table

    texts = read_texts(int(options.megabytes * 1e6))
    size = sum(len(text.encode()) for text in texts)
    with tempfile.TemporaryDirectory() as folder:
        write_files(texts, Path(folder, "source"))
        taken, tokens = measure(texts, Path(folder), options.vocab_size, options.workers, options.turns)
    ratios = [turn["alone"] / turn["prepare"] for turn in taken]
    rows = [["", "seconds", "MB/s", "tokens/s", "processor seconds"]]
    for name, label in {"alone": "tokenizers alone", "prepare": "data prepare"}.items():
        seconds = statistics.median(turn[name] for turn in taken)
        processors = statistics.median(turn[f"{name}_processors"] for turn in taken)
        speed = [f"{seconds:.2f}", f"{size / seconds / 1e6:.2f}", f"{tokens / seconds:,.0f}", f"{processors:.2f}"]
        rows.append([label, *speed])
    print(
        f"{len(texts):,} documents, {size / 1e6:.1f} MB, {tokens:,} tokens; {options.workers} cores; medians of turns"
    )
    print(table(rows, align="<>>>>", rules=(1,)))
    print(
        f"data prepare reaches {statistics.median(ratios):.0%} of the library ({min(ratios):.0%} to {max(ratios):.0%})"
    )
    work = statistics.median(turn["alone_processors"] / turn["prepare_processors"] for turn in taken)
    print(f"and {work:.0%} by the time of the processors")
    if options.out:
        figures = {"documents": len(texts), "bytes": size, "tokens": tokens, "turns": taken, "ratios": ratios}
        record = figures | {"workers": options.workers, "vocab_size": options.vocab_size, "environment": environment()}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
