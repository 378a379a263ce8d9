"""Text corpora for `data prepare` tests, with helpers to prepare them and compare the results."""

import json
import os
from pathlib import Path
from typing import Any

from stackexp.data.prepare import Preparation, prepare
from stackexp.data.shards import Corpus

STDLIB = Path(os.__file__).parent
TEXTS = [(STDLIB / name).read_text() for name in ("ast.py", "bisect.py", "heapq.py", "keyword.py", "queue.py")]


def json_lines(texts: list[str]) -> bytes:
    """Return a JSON Lines file with a document per line."""
    lines = [json.dumps({"id": str(i), "text": text, "source": "test"}) for i, text in enumerate(texts)]
    return "".join(f"{line}\n" for line in lines).encode()


def write_many(folder: Path, count: int) -> Path:
    """Write files of 9 kB with two documents each."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join((STDLIB / name).read_text() for name in ("argparse.py", "inspect.py", "typing.py", "turtle.py"))
    for n in range(count):
        (folder / f"{n:03}.jsonl").write_bytes(json_lines([text[n * 700 : n * 700 + 4000], text[n * 900 :][:5000]]))
    return folder


def prepare_set(source: Path, folder: Path, **options: Any) -> Corpus | None:
    """Prepare a small set: 300 token ids unless a tokenizer is given, sequences of 64 tokens, one process."""
    names = ("tokenizer", "vocab_size", "context_length", "unit_bytes", "columns", "dtype", "packing")
    settings = {"context_length": 64} | {name: options.pop(name) for name in names if name in options}
    if "tokenizer" not in settings:
        settings.setdefault("vocab_size", 300)
    return prepare(Preparation(source, **settings), folder, **{"workers": 1} | options)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files of a set, except those that depend on how it was made."""
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "plan.json" and p.name[0] != "."]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths if p.parent.name != "jobs"}
