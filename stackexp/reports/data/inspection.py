"""The result of inspecting a dataset, and the verification of its files."""

import hashlib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from stackexp.data.tokenizer import KnownTokenizer
from stackexp.reports.data.lengths import LengthHistogram
from stackexp.tables import format_table

SAMPLE_LENGTH = 256  # token ids, or characters of text
SHOWN_IDS = 64  # of a sample without a tokenizer
SHOWN_LINES, SHOWN_COLUMNS = 12, 160


@dataclass
class Inspection:
    """The contents of a dataset and the state of its files."""

    path: Path
    kind: str
    figures: dict[str, Any] = field(default_factory=dict)
    lengths: LengthHistogram | None = None
    unit: str = "tokens"  # of the lengths
    context_length: int | None = None
    samples: dict[str, str] = field(default_factory=dict)  # location -> text
    checked: int = 0  # files that match their recorded size and hash
    notes: list[str] = field(default_factory=list)  # what could not be verified or counted
    damage: list[str] = field(default_factory=list)  # one line per file

    @property
    def has_lengths(self) -> bool:
        """Return True if the lengths of documents are known."""
        return self.lengths is not None and self.lengths.total > 0

    def as_dict(self) -> dict:
        """Return the JSON output."""
        found = {"path": str(self.path), "kind": self.kind, **self.figures, "checked": self.checked}
        if self.lengths and self.has_lengths:
            found["lengths"] = self.lengths.summarize(self.unit)
        return found | {"damage": self.damage, "samples": self.samples}

    def format(self) -> str:
        """Return the output for the terminal."""
        figures = self.figures | {"verified files": self.checked}
        parts = [format_table([[name.replace("_", " "), _format_figure(value)] for name, value in figures.items()])]
        if self.lengths and self.has_lengths:
            parts += ["", self.lengths.format(self.unit)]
        for location, text in self.samples.items():
            lines = text.splitlines()[:SHOWN_LINES]
            parts += ["", f"{location}:", *(f"  | {_replace_unprintable(line)[:SHOWN_COLUMNS]}" for line in lines)]
        parts += ["", *self.notes, *(f"DAMAGED {line}" for line in self.damage)]
        if self.damage and self.kind == "prepared set":
            path = self.path / "corpus.json"
            parts.append(f"to repair it, delete {path} and run the same data prepare command again")
        return f"{self.path}: {self.kind}\n" + textwrap.indent("\n".join(parts), "  ")


def _format_figure(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2f}" if isinstance(value, float) else ", ".join(value) if isinstance(value, list) else str(value)


def _replace_unprintable(line: str) -> str:
    return "".join(character if character.isprintable() else " " for character in line)


@dataclass(frozen=True)
class InspectOptions:
    """The number and seed of the samples to show, and the tokenizer of ids that come without one."""

    samples: int = 3
    seed: int = 0
    tokenizer: KnownTokenizer | None = None
    show_progress: bool = False

    def choose_samples(self, count: int) -> list[int]:
        """Return the sorted random indices of the samples among `count` items."""
        rng = np.random.default_rng(self.seed)
        return sorted(rng.choice(count, min(self.samples, count), replace=False).tolist())

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of token ids [N], or the ids themselves without a tokenizer."""
        if self.tokenizer:
            return self.tokenizer.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return " ".join(map(str, ids[:SHOWN_IDS].tolist()))


def read_shards(inspection: Inspection, entries: list[dict], show_progress: bool) -> Iterator[bytes | None]:
    """Yield the contents of the file of each index entry, or None if it is damaged, which is recorded."""
    for entry in tqdm(entries, desc="verifying shards", unit="shard", disable=not show_progress):
        path = inspection.path / entry["basename"]
        data, problem = read_verified(path, entry)
        if problem:
            inspection.damage.append(f"{path}: {problem}")
        else:
            inspection.checked += 1
        yield data


def read_verified(path: Path, entry: dict) -> tuple[bytes | None, str]:
    """Return the contents of a file and "", or None and how it differs from its index entry.

    The entry may give `bytes` and `hashes`; only these are verified.
    """
    try:
        size = path.stat().st_size
        if size != (expected := entry.get("bytes", size)):
            return None, f"{'cut short' if size < expected else 'too long'}: {size:,} bytes, expected {expected:,}"
        data = path.read_bytes()
    except OSError as e:
        return None, "missing" if isinstance(e, FileNotFoundError) else f"cannot be read ({e.strerror})"
    for algorithm, expected in (entry.get("hashes") or {}).items():
        if _compute_hash(data, algorithm) != expected:
            return None, f"corrupt: the {algorithm.upper()} differs from the record"
    return data, ""


def _compute_hash(data: bytes, algorithm: str) -> str:
    """Return a hash of hashlib, or one of the other algorithms of mosaicml-streaming."""
    if algorithm in hashlib.algorithms_available:
        return hashlib.new(algorithm, data).hexdigest()
    from streaming.base.hashing import get_hash

    return get_hash(algorithm, data)
