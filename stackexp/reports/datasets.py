"""Inspect datasets for `data inspect`: their figures, damaged files, document lengths and some samples."""

import json
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stackexp.data.evaluation_sets import find_sets
from stackexp.data.mds import find_column, read_column, read_ids, read_index
from stackexp.data.shards import TokenSet
from stackexp.data.sources import TOKEN_SUFFIXES
from stackexp.data.token_files import TokenFile, find_end_of_text, read_record
from stackexp.data.tokenizer import KnownTokenizer, get_end_of_text_id
from stackexp.data.verification import find_damage
from stackexp.errors import RunError
from stackexp.progress_bar import open_bar
from stackexp.reports.figures import new_figure, save_figure
from stackexp.tables import format_table

BLOCK = 1 << 22  # ids read at a time
MAX_VOCAB_SIZE = 1 << 20  # larger values show that bytes were read with the wrong integer type
SAMPLE_LENGTH = 256  # token ids, or characters of text
SHOWN_IDS = 64  # ids shown of a sample without a tokenizer
SHOWN_LINES, SHOWN_COLUMNS = 12, 160
BAR_WIDTH = 40  # characters


class DocumentLengths:
    """The number of documents of each length. An empty document counts as length 1.

    In a stream of token blocks, each document ends with the token `end`, which counts as part of it.
    """

    def __init__(self, end: int | None = None) -> None:
        self._end = end
        self._counts: Counter[int] = Counter()
        self._open = 0  # tokens of the document that has not ended yet

    def add_tokens(self, tokens: np.ndarray) -> None:
        """Count the documents that end in the next tokens [N] of the stream."""
        ends = np.flatnonzero(tokens == self._end)
        if len(ends):
            self.add(np.diff(ends, prepend=-1 - self._open))
            self._open = len(tokens) - 1 - int(ends[-1])
        else:
            self._open += len(tokens)

    def end_stream(self) -> None:
        """Count the last document of the stream if it has no end token."""
        if self._open:
            self.add(np.array([self._open]))
        self._open = 0

    def add(self, lengths: np.ndarray) -> None:
        """Count documents of these lengths [N]."""
        values, counts = np.unique(np.maximum(lengths, 1), return_counts=True)
        self._counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    @property
    def total(self) -> int:
        """The number of documents."""
        return self._counts.total()

    def quantile(self, share: float) -> int:
        """Return the length that `share` of the documents do not exceed."""
        lengths = sorted(self._counts)
        cumulative = np.cumsum([self._counts[length] for length in lengths])
        return lengths[int(np.searchsorted(cumulative, share * self.total))]

    def rebin(self, bins_per_octave: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return documents [N], their total lengths [N] and the bin edges [N + 1], for bins equal in log length."""
        lengths, counts = np.array(list(self._counts)), np.array(list(self._counts.values()))
        first, last = (int(np.log2(length) * bins_per_octave) for length in (lengths.min(), lengths.max()))
        edges = 2.0 ** (np.arange(first, last + 2) / bins_per_octave)
        documents, totals = (np.histogram(lengths, edges, weights=w)[0] for w in (counts, counts * lengths))
        return documents.astype(np.int64), totals, edges

    def summarize(self) -> dict[str, Any]:
        """Return median, mean and longest length, and the number of documents `from` each power of 2."""
        counts, sums, edges = self.rebin()
        figures = {"median": self.quantile(0.5), "mean": float(sums.sum()) / self.total, "longest": max(self._counts)}
        return figures | {"from": edges[:-1].tolist(), "documents": counts.tolist()}

    def format(self, unit: str) -> str:
        """Return a summary line and a table with one bar per octave."""
        figures, (counts, sums, edges) = self.summarize(), self.rebin()
        summary = (
            f"document length in {unit}: median {figures['median']:,}, mean {figures['mean']:,.0f}, "
            f"90 % up to {self.quantile(0.9):,}, longest {figures['longest']:,}"
        )
        rows = []
        for low, high, count, total in zip(edges[:-1], edges[1:], counts, sums, strict=True):
            eighths = max(round(8 * BAR_WIDTH * count / counts.max()), int(count > 0))
            bar = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
            rows.append([f"{low:,.0f} - {high - 1:,.0f}", bar, f"{count:,}", f"{total / sums.sum():.0%}"])
        header = [unit, "", "documents", "share of text"]
        return f"{summary}\n{format_table(rows, header=header, align='><>>')}"


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


@dataclass
class Inspection:
    """The contents of a dataset and the state of its files. `name` is its path below the inspected folder."""

    name: str
    path: Path
    kind: str = "cannot be read"
    figures: dict[str, Any] = field(default_factory=dict)
    lengths: DocumentLengths | None = None  # None if they are unknown
    unit: str = "tokens"  # of the lengths
    context_length: int | None = None
    samples: dict[str, str] = field(default_factory=dict)  # location -> text
    checked: int = 0  # files that match their recorded size and hash
    notes: list[str] = field(default_factory=list)  # what could not be verified or counted
    damage: list[str] = field(default_factory=list)  # one line per file

    def verify_shards(self, entries: list[dict[str, Any]], show_progress: bool) -> list[bool]:
        """Compare each file of index.json with its entry, record the damage, and return which files are intact."""
        bar = open_bar(entries, desc="verifying shards", unit="shard", disable=not show_progress)
        is_intact = [self.verify_file(self.path / entry["basename"], entry) for entry in bar]
        self.checked += sum(is_intact)
        return is_intact

    def verify_file(self, path: Path, entry: dict[str, Any]) -> bool:
        """Compare a file with its entry, and record the damage."""
        damage = find_damage(path, entry)
        if damage:
            self.damage.append(f"{path}: {damage}")
        return not damage

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON output."""
        found = {"path": str(self.path), "kind": self.kind, **self.figures, "checked": self.checked}
        if self.lengths:
            found["lengths"] = self.lengths.summarize() | {"unit": self.unit}
        return found | {"damage": self.damage, "samples": self.samples}

    def format(self) -> str:
        """Return the output for the terminal."""
        figures = self.figures | {"verified files": self.checked}
        parts = [format_table([[name.replace("_", " "), _format_figure(value)] for name, value in figures.items()])]
        if self.lengths:
            parts += ["", self.lengths.format(self.unit)]
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
    return f"{value:.2f}" if isinstance(value, float) else ", ".join(value) if isinstance(value, list) else str(value)


def inspect_path(path: Path, options: InspectOptions) -> list[Inspection]:
    """Inspect a prepared set, a token file, a folder of MDS shards, or each dataset in a folder of these.

    Raises RunError if the path is none of these. In a folder of several datasets, an unreadable one is reported as
    damaged.
    """
    if (path / "plan.json").exists() and not (path / "corpus.json").exists():
        count = len(list(path.glob("unit.*")))
        raise RunError(f"{path}: not finished, {count} units so far; run the same data prepare command to resume")
    datasets = find_sets(path.name, path)
    if path.is_file() and not path.name.lower().endswith(TOKEN_SUFFIXES):
        command = f"python -m stackexp data prepare {path} --to FOLDER"
        raise RunError(f"{path}: text, not tokens; tokenize it with: {command}")
    inspections = []
    for name, dataset in datasets.items():
        inspection = Inspection(name.removeprefix(f"{path.name}/"), dataset)
        try:
            _inspect_dataset(inspection, options)
        except RunError as error:
            if len(datasets) == 1:
                raise
            inspection.damage.append(str(error))
        inspections.append(inspection)
    return inspections


def _inspect_dataset(inspection: Inspection, options: InspectOptions) -> None:
    path = inspection.path
    if (path / "corpus.json").exists():
        _inspect_prepared_set(inspection, options)
    elif path.is_dir():
        _inspect_mds_shards(inspection, options)
    elif path.name.lower().endswith(TOKEN_SUFFIXES):
        _inspect_token_file(inspection, options)
    else:
        inspection.kind, inspection.figures = "text", {"file_bytes": path.stat().st_size}


# Prepared sets


def _inspect_prepared_set(inspection: Inspection, options: InspectOptions) -> None:
    """Inspect a finished set. Raises RunError if corpus.json or index.json is damaged."""
    path = inspection.path
    token_set = TokenSet(path, cache=True)  # damaged shards are reported below
    entries = [shard["raw_data"] for shard in json.loads((path / "index.json").read_text(encoding="utf-8"))["shards"]]
    corpus = token_set.corpus
    inspection.kind, inspection.context_length = "prepared set", corpus.context_length
    ends = dict.fromkeys([*corpus.sources[:1], *corpus.sources[-1:]])
    inspection.figures = {key: value for key, value in asdict(corpus).items() if key != "format_version"}
    sources = f"{len(corpus.sources)}: {' ... '.join(ends)}" if ends else "0"
    inspection.figures |= {"sources": sources, "shards": len(entries)}
    inspection.figures["bytes_per_token"] = corpus.bytes / max(corpus.tokens, 1)
    is_intact = inspection.verify_shards(entries, options.show_progress)
    try:
        tokenizer = token_set.load_tokenizer()
    except RunError as error:
        inspection.damage.append(str(error))
        return
    if not inspection.damage:
        inspection.lengths = _measure_documents(token_set, len(entries), get_end_of_text_id(tokenizer))
    for index in options.choose_samples(len(token_set)):
        if is_intact[int(np.searchsorted(token_set.begins, index, side="right")) - 1]:
            ids = token_set[index][:SAMPLE_LENGTH].tolist()
            inspection.samples[f"sequence {index:,}"] = tokenizer.decode(ids, skip_special_tokens=False)


def _measure_documents(token_set: TokenSet, num_shards: int, end: int) -> DocumentLengths:
    """Return the lengths of the documents in the sequences.

    The last document of each unit is counted as two, because its end is among the sequences of the tails.
    """
    lengths = DocumentLengths(end)
    for number in range(num_shards):
        lengths.add_tokens(token_set.map_shard(number).ravel())
    lengths.end_stream()
    return lengths


# MDS shards that another program wrote


def _inspect_mds_shards(inspection: Inspection, options: InspectOptions) -> None:
    path = inspection.path
    shards = read_index(path)
    columns = sorted({name for shard in shards for name in shard.columns})
    inspection.kind, samples = "MDS shards", sum(shard.samples for shard in shards)
    inspection.figures = {"samples": samples, "shards": len(shards), "columns": columns}
    if unhashed := sum(not shard.entry.get("hashes") for shard in shards):
        inspection.notes.append(f"not verified: {unhashed} shards have no hash in the index; only sizes were compared")
    inspection.verify_shards([shard.entry for shard in shards], options.show_progress)
    try:
        column = find_column(path, shards)
    except RunError as error:
        inspection.notes.append(f"samples not read: {error}")
        return
    if not inspection.damage:
        try:
            _read_samples(inspection, column, options)
        except RunError as error:
            inspection.damage.append(str(error))


def _read_samples(inspection: Inspection, column: str, options: InspectOptions) -> None:
    """Count the documents of all samples, and keep some samples as text."""
    known, path, is_text = options.tokenizer, inspection.path, column == "text"
    has_ends = known is not None and not is_text
    lengths = DocumentLengths(get_end_of_text_id(known.tokenizer) if known and has_ends else None)
    inspection.unit, total = "bytes" if is_text else "tokens", 0
    chosen = set(options.choose_samples(inspection.figures["samples"]))
    for index, value in enumerate(read_column(path, "text") if is_text else read_ids(path, MAX_VOCAB_SIZE)):
        size = len(value.encode() if is_text else value)
        total += size
        if has_ends:
            lengths.add_tokens(value)
        else:
            lengths.add(np.array([size]))
        if index in chosen:
            part = value[:SAMPLE_LENGTH]
            inspection.samples[f"sample {index:,}"] = part if is_text else options.decode(part)
    lengths.end_stream()
    if not has_ends:
        inspection.notes.append("each sample is counted as a document")
    inspection.lengths = lengths if lengths.total else None
    inspection.figures |= {inspection.unit: total, "documents": lengths.total}


# Token files


def _inspect_token_file(inspection: Inspection, options: InspectOptions) -> None:
    path, known = inspection.path, options.tokenizer
    inspection.kind, record = "token file", read_record(path)
    try:
        tokens = TokenFile(path).tokens
    except RunError as error:
        inspection.damage.append(str(error))
        return
    if record is None:
        inspection.notes.append(f"not verified: there is no record, {path.name}.json")
    elif inspection.verify_file(path, {"hashes": {"sha256": record.sha256}}):
        inspection.checked = 1
    if record and record.end_of_text is not None:
        end: int | None = record.end_of_text
    else:
        end = get_end_of_text_id(known.tokenizer) if known else find_end_of_text(tokens)
    largest = _count_documents(inspection, tokens, end, options.show_progress)
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


def _count_documents(inspection: Inspection, tokens: np.ndarray, end: int | None, show_progress: bool) -> int:
    """Describe the ids and the lengths of the documents, and return the largest id."""
    lengths, largest = DocumentLengths(end), 0
    for begin in open_bar(range(0, len(tokens), BLOCK), desc="reading", disable=not show_progress):
        block = np.asarray(tokens[begin : begin + BLOCK])
        largest = max(largest, int(block.max()))
        if end is not None:
            lengths.add_tokens(block)
    inspection.figures = {"tokens": len(tokens), "largest_id": largest, "end_of_text": end, "dtype": tokens.dtype.name}
    if end is None:
        inspection.notes.append("documents not counted: end-of-text is unknown; name the tokenizer with --tokenizer")
    else:
        lengths.end_stream()
        inspection.lengths = lengths
        inspection.figures["documents"] = lengths.total
    return largest


# Figures


def draw_figures(inspections: list[Inspection], path: Path) -> list[Path]:
    """Draw the document lengths to `path`, or for several datasets to <stem>-<name> each; return the files."""
    known = [inspection for inspection in inspections if inspection.lengths]
    path.parent.mkdir(parents=True, exist_ok=True)
    files = []
    for inspection in known:
        name = inspection.name.replace("/", "-")
        files.append(path if len(known) == 1 else path.with_name(f"{path.stem}-{name}{path.suffix}"))
        save_figure(_draw_lengths(inspection), files[-1])
    return files


def _draw_lengths(inspection: Inspection) -> Any:
    """Draw the shares of documents and of text over document length."""
    from matplotlib.ticker import PercentFormatter

    assert inspection.lengths is not None
    counts, sums, edges = inspection.lengths.rebin(2)
    figure, axes = new_figure(7, 4)
    axes.stairs(counts / counts.sum(), edges, fill=True, color="C0", alpha=0.55, label="documents")
    axes.stairs(sums / sums.sum(), edges, color="C1", linewidth=1.8, label=inspection.unit)
    median = inspection.lengths.quantile(0.5)
    axes.axvline(median, color="C0", linestyle=":", label=f"median document, {median:,}")
    if inspection.context_length:
        label = f"sequence, {inspection.context_length:,}"
        axes.axvline(inspection.context_length, color="0.3", linestyle="--", label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.tick_params(axis="x", labelrotation=45)
    axes.set(xlabel=f"document length ({inspection.unit})", ylabel="share per half octave", ylim=(0, None))
    axes.set_title(f"{inspection.path.name}: {inspection.lengths.total:,} documents")
    axes.legend(frameon=False)
    return figure
