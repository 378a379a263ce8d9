"""What a run has trained on: a rolling hash of its samples, and data.jsonl in its folder, which records it.

A line of data.jsonl: {"step": 20, "tokens": 81920, "hash": "3f…", "sequences": {"web": 60, "code": 20}}, the hash and
counts being of everything from the first step on.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stackexp.errors import RunError

FILE = "data.jsonl"


def sample_hash(tokens: np.ndarray) -> int:
    """64 bits that stand for token ids [T], whatever type they are stored as."""
    return int.from_bytes(hashlib.blake2b(tokens.astype("<u4"), digest_size=8).digest(), "little")


def next_hash(before: str, samples: np.ndarray) -> str:
    """The hash after one more optimizer step on samples with the hashes uint64 [N]; `before` the first step: "".

    h_n = blake2b(h_{n-1}, the step's sample hashes in ascending order): the same for the same global batches in the
    same order, however they are divided into processes, micro-batches and loaders.
    """
    digest = hashlib.blake2b(bytes.fromhex(before), digest_size=16)
    digest.update(np.sort(samples).astype("<u8"))
    return digest.hexdigest()


class DataFile:
    """data.jsonl, opened to go on after `step`: what was recorded beyond it is forgotten."""

    def __init__(self, folder: Path, step: int):
        path, kept = folder / FILE, [line for line in read(folder) if line["step"] <= step]
        temporary = path.with_name(f".{FILE}")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        temporary.replace(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until the disk has it."""
        os.fsync(self._file.fileno())


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's data.jsonl, a last line cut off by a kill left out; none where there is no such file."""
    path = folder / FILE
    if path.is_file():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
            if line.endswith("\n"):
                try:
                    yield json.loads(line)
                except ValueError:
                    raise RunError(f"{path}: line {number} is damaged; delete the line") from None


def hashes(folder: Path) -> dict[int, str]:
    """A run's hashes by step."""
    return {line["step"]: line["hash"] for line in read(folder)}
