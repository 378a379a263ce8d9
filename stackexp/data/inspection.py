"""Inspect datasets for `data inspect`: their figures, damaged files, document lengths and some samples."""

import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stackexp.data.evaluation_sets import find_sets
from stackexp.data.shards import TokenSet
from stackexp.data.sources import TOKEN_SUFFIXES
from stackexp.data.token_files import BLOCK_TOKENS, TokenFile, find_end_of_text, read_record
from stackexp.data.tokenizer import KnownTokenizer, get_end_of_text_id
from stackexp.errors import RunError
from stackexp.files import compute_sha256
from stackexp.tables import format_table
from stackexp.terminal import open_bar

BAR_DELAY_SECONDS = 1.0  # small datasets have no progress bar
SAMPLE_LENGTH = 256  # token ids
SHOWN_IDS = 64  # ids shown of a sample without a tokenizer
SHOWN_LINES, SHOWN_COLUMNS = 12, 160


def measure_documents(blocks: Iterable[np.ndarray], end: int) -> dict[str, Any]:
    """Return the number of documents, and mean, median, 90th percentile and maximum of their lengths, in tokens.

    The blocks [N] are a stream of token ids. Each document ends with the id `end`, which counts as part of it. The last
    document may have no end.
    """
    counts: Counter[int] = Counter()
    unfinished = 0  # tokens of the document that has not ended yet
    for tokens in blocks:
        ends = np.flatnonzero(tokens == end)
        counts.update(np.diff(ends, prepend=-1 - unfinished).tolist())
        unfinished = len(tokens) - 1 - int(ends[-1]) if len(ends) else unfinished + len(tokens)
    if unfinished:
        counts[unfinished] += 1
    lengths = np.array(sorted(counts))
    cumulative = np.cumsum([counts[length] for length in lengths])
    median, ninth_decile = lengths[np.searchsorted(cumulative, cumulative[-1] * np.array([0.5, 0.9]))].tolist()
    return {
        "documents": counts.total(),
        "mean_length": sum(length * count for length, count in counts.items()) / counts.total(),
        "median_length": median,
        "90th_percentile_length": ninth_decile,
        "longest": max(counts),
    }


@dataclass(frozen=True)
class InspectOptions:
    """The number and seed of the samples to show, and the tokenizer of ids that come without one."""

    samples: int = 3
    seed: int = 0
    tokenizer: KnownTokenizer | None = None

    def choose_samples(self, count: int) -> list[int]:
        """Return the sorted random indices of the samples among `count` items."""
        rng = np.random.default_rng(self.seed)
        return sorted(rng.choice(count, min(self.samples, count), replace=False).tolist())

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of token ids [N], or the ids themselves without a tokenizer."""
        if self.tokenizer:
            return self.tokenizer.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return " ".join(map(str, ids[:SHOWN_IDS].tolist()))


@dataclass
class Inspection:
    """The contents of a dataset and the state of its files."""

    path: Path
    kind: str = "cannot be read"
    figures: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)  # location -> text
    checked: int = 0  # files that match their recorded size and hash
    notes: list[str] = field(default_factory=list)  # what could not be verified or counted
    damage: list[str] = field(default_factory=list)  # one line per file

    def verify_file(self, path: Path, sha256: str, size: int | None = None) -> bool:
        """Return True if a file has the recorded hash and size in bytes (None: any); record the damage otherwise."""
        try:
            found = path.stat().st_size
            if size not in (None, found):
                damage = f"{'cut short' if found < size else 'too long'}: {found:,} bytes, expected {size:,}"
            elif compute_sha256(path) != sha256:
                damage = "corrupt: the SHA-256 differs from the record"
            else:
                self.checked += 1
                return True
        except OSError as error:
            damage = "missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        self.damage.append(f"{path}: {damage}")
        return False

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON output."""
        found = {"path": str(self.path), "kind": self.kind, **self.figures, "checked": self.checked}
        return found | {"damage": self.damage, "samples": self.samples}

    def format(self) -> str:
        """Return the output for the terminal."""
        figures = self.figures | {"verified files": self.checked}
        parts = [format_table([[name.replace("_", " "), _format_figure(value)] for name, value in figures.items()])]
        for location, text in self.samples.items():
            lines = ("".join(c if c.isprintable() else " " for c in line) for line in text.splitlines()[:SHOWN_LINES])
            parts += ["", f"{location}:", *(f"  | {line[:SHOWN_COLUMNS]}" for line in lines)]
        parts += ["", *self.notes, *(f"DAMAGED {line}" for line in self.damage)]
        if self.damage and self.kind == "prepared set":
            files = f"the folders of damaged units and {self.path / 'corpus.json'}"
            parts.append(f"to repair it, delete {files}, and run the same data prepare command again")
        return f"{self.path}: {self.kind}\n" + textwrap.indent("\n".join(parts), "  ")


def _format_figure(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def inspect_path(path: Path, options: InspectOptions) -> list[Inspection]:
    """Inspect a prepared set, a token file, or each dataset in a folder of these.

    Raises RunError if the path is none of these. In a folder of several datasets, an unreadable one is reported as
    damaged.
    """
    if (path / "plan.json").exists() and not (path / "corpus.json").exists():
        count = len(list(path.glob("unit.*")))
        raise RunError(f"{path}: not finished, {count} units so far; run the same data prepare command to resume")
    datasets = find_sets(path.name, path)
    if path.is_file() and not path.name.lower().endswith(TOKEN_SUFFIXES):
        command = f"python -m stackexp data prepare {shlex.quote(str(path))} --to FOLDER --vocab-size 4096"
        raise RunError(f"{path}: text, not tokens; tokenize it with: {command}")
    inspections = [Inspection(dataset) for dataset in datasets.values()]
    for inspection in inspections:
        try:
            if inspection.path.is_dir():
                _inspect_prepared_set(inspection, options)
            elif inspection.path.name.lower().endswith(TOKEN_SUFFIXES):
                _inspect_token_file(inspection, options)
            else:
                inspection.kind, inspection.figures = "text", {"file_bytes": inspection.path.stat().st_size}
        except RunError as error:
            if len(datasets) == 1:
                raise
            inspection.damage.append(str(error))
    return inspections


# Prepared sets


def _inspect_prepared_set(inspection: Inspection, options: InspectOptions) -> None:
    """Inspect a finished set. Raises RunError if corpus.json or index.json is damaged.

    The last document of each unit is counted as two, because its end is among the sequences of the tails.
    """
    path = inspection.path
    token_set = TokenSet(path, cache=True)  # damaged shards are reported below
    corpus, entries = token_set.corpus, token_set.entries
    ends = dict.fromkeys([*corpus.sources[:1], *corpus.sources[-1:]])
    inspection.kind = "prepared set"
    uncounted = () if corpus.cut_by_concatenation else ("cut_documents", "cut_by_concatenation")
    hidden = ("format_version", *uncounted)
    inspection.figures = {key: value for key, value in asdict(corpus).items() if key not in hidden}
    sources = f"{len(corpus.sources)}: {' ... '.join(ends)}" if ends else "0"
    inspection.figures |= {"sources": sources, "shards": len(entries)}
    inspection.figures["bytes_per_token"] = corpus.bytes / max(corpus.tokens, 1)
    bar = open_bar(entries, desc="verifying shards", unit="shard", delay=BAR_DELAY_SECONDS)
    is_intact = [
        inspection.verify_file(path / entry["basename"], entry["hashes"]["sha256"], entry["bytes"]) for entry in bar
    ]
    try:
        tokenizer = token_set.load_tokenizer()
    except RunError as error:
        inspection.damage.append(str(error))
        return
    if not inspection.damage:
        blocks = (token_set.map_shard(number).ravel() for number in range(len(entries)))
        figures = measure_documents(blocks, get_end_of_text_id(tokenizer))
        inspection.figures |= figures | {"documents": corpus.documents}
    for index in options.choose_samples(len(token_set)):
        if is_intact[int(np.searchsorted(token_set.begins, index, side="right")) - 1]:
            ids = token_set[index][:SAMPLE_LENGTH].tolist()
            inspection.samples[f"sequence {index:,}"] = tokenizer.decode(ids, skip_special_tokens=False)


# Token files


def _inspect_token_file(inspection: Inspection, options: InspectOptions) -> None:
    path, known = inspection.path, options.tokenizer
    inspection.kind, record = "token file", read_record(path)
    try:
        file = TokenFile(path)
    except RunError as error:
        inspection.damage.append(str(error))
        return
    if record is None:
        inspection.notes.append(f"not verified: there is no record, {path.name}.json")
    else:
        inspection.verify_file(path, record.sha256)
    tokens, is_raw = file.tokens, not file.tokens.offset and file.document_ends is None
    largest, end = int(tokens.max()), record.end_of_text if record else None
    if end is None and (known or is_raw):  # OLMo's files are raw
        end = get_end_of_text_id(known.tokenizer) if known else find_end_of_text(tokens)
    inspection.figures = {"tokens": len(tokens), "largest_id": largest, "end_of_text": end, "dtype": tokens.dtype.name}
    if end is None:
        inspection.notes.append("documents not counted: end-of-text is unknown; name the tokenizer with --tokenizer")
    elif not inspection.damage:
        total = -(-len(tokens) // BLOCK_TOKENS)
        blocks = file.read_blocks(largest + 1, end=end)
        bar = open_bar(blocks, desc="reading", total=total, delay=BAR_DELAY_SECONDS)
        inspection.figures |= measure_documents(bar, end)
    if record:
        names = ("tokenizer", "vocab_size", "source")
        inspection.figures |= {name: getattr(record, name) for name in names}
        if record.text_bytes:
            inspection.figures |= {"bytes": record.text_bytes, "bytes_per_token": record.text_bytes / record.tokens}
    if known and known.vocab_size <= largest:
        inspection.damage.append(f"{path}: token id {largest:,} is outside the vocabulary of {known.vocab_size:,}")
    elif known and record and known.differs_from(record.tokenizer):
        inspection.damage.append(f"{path}: token ids of another tokenizer, {record.tokenizer[:16]}")
    else:
        for index in options.choose_samples(-(-len(tokens) // SAMPLE_LENGTH)):
            begin = index * SAMPLE_LENGTH
            inspection.samples[f"from token {begin:,}"] = options.decode(tokens[begin : begin + SAMPLE_LENGTH])
