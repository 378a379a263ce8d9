"""Real text for the tests of `data prepare`, and what it makes of it."""

import json
import os
from pathlib import Path

STDLIB = Path(os.__file__).parent
TEXTS = [(STDLIB / name).read_text() for name in ("ast.py", "bisect.py", "heapq.py", "keyword.py", "queue.py")]


def json_lines(texts: list[str]) -> bytes:
    return b"".join(
        json.dumps({"id": str(i), "text": t, "source": "test"}).encode() + b"\n" for i, t in enumerate(texts)
    )


def write_many(folder: Path, count: int) -> Path:
    """Files of 9 kB, two documents each."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join((STDLIB / name).read_text() for name in ("argparse.py", "inspect.py", "typing.py", "turtle.py"))
    for n in range(count):
        (folder / f"{n:03}.jsonl").write_bytes(json_lines([text[n * 700 : n * 700 + 4000], text[n * 900 :][:5000]]))
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    """Everything in the folder but what records how it came about."""
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "plan.json" and p.name[0] != "."]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths if p.parent.name != "jobs"}
