"""The result of inspecting a dataset."""

import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stackexp.data.tokenizer import KnownTokenizer
from stackexp.data.verification import find_damage
from stackexp.progress_bar import open_bar
from stackexp.reports.data.lengths import LengthHistogram
from stackexp.tables import format_table

SAMPLE_LENGTH = 256  # token ids, or characters of text
SHOWN_IDS = 64  # ids shown of a sample without a tokenizer
SHOWN_LINES, SHOWN_COLUMNS = 12, 160


@dataclass
class Inspection:
    """The contents of a dataset and the state of its files."""

    path: Path
    kind: str
    figures: dict[str, Any] = field(default_factory=dict)
    lengths: LengthHistogram | None = None  # None if they are unknown
    unit: str = "tokens"  # of the lengths
    context_length: int | None = None
    samples: dict[str, str] = field(default_factory=dict)  # location -> text
    checked: int = 0  # files that match their recorded size and hash
    notes: list[str] = field(default_factory=list)  # what could not be verified or counted
    damage: list[str] = field(default_factory=list)  # one line per file

    def verify_shards(self, entries: list[dict], show_progress: bool) -> list[bool]:
        """Compare each file of index.json with its entry, record the damage, and return which files are intact."""
        is_whole = []
        for entry in open_bar(entries, desc="verifying shards", unit="shard", disable=not show_progress):
            is_whole.append(self.verify_file(self.path / entry["basename"], entry))
        self.checked += sum(is_whole)
        return is_whole

    def verify_file(self, path: Path, entry: dict) -> bool:
        """Compare a file with its entry, and record the damage."""
        damage = find_damage(path, entry)
        if damage:
            self.damage.append(f"{path}: {damage}")
        return not damage

    def as_dict(self) -> dict:
        """Return the JSON output."""
        found = {"path": str(self.path), "kind": self.kind, **self.figures, "checked": self.checked}
        if self.lengths:
            found["lengths"] = self.lengths.summarize(self.unit)
        return found | {"damage": self.damage, "samples": self.samples}

    def format(self) -> str:
        """Return the output for the terminal."""
        figures = self.figures | {"verified files": self.checked}
        parts = [format_table([[name.replace("_", " "), _format_figure(value)] for name, value in figures.items()])]
        if self.lengths:
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
