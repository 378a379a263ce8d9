"""Inspect any dataset: choose the inspection that fits the path, and draw the document lengths."""

import os
from pathlib import Path

import numpy as np

from stackexp.data.evaluation_sets import find_sets
from stackexp.data.mds import find_column, read_column, read_ids, read_index
from stackexp.data.sources import TOKEN_SUFFIXES
from stackexp.data.token_files import TokenFile, find_end_of_text, read_record
from stackexp.data.tokenizer import get_end_of_text_id
from stackexp.errors import RunError
from stackexp.progress_bar import open_bar
from stackexp.reports.data.inspection import SAMPLE_LENGTH, Inspection, InspectOptions
from stackexp.reports.data.lengths import DocumentLengths, LengthHistogram, draw_lengths
from stackexp.reports.data.prepared_sets import inspect_prepared_set

BLOCK = 1 << 22  # ids read at a time
MAX_VOCAB_SIZE = 1 << 20  # larger values show that bytes were read with the wrong integer type


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
    for dataset in datasets.values():
        try:
            inspections.append(_inspect_dataset(dataset, options))
        except RunError as error:
            if len(datasets) == 1:
                raise
            inspections.append(Inspection(dataset, "cannot be read", damage=[str(error)]))
    return inspections


def draw_figures(inspections: list[Inspection], path: Path) -> list[Path]:
    """Draw the document lengths to `path`, or for several datasets to <stem>-<dataset> each; return the files.

    A dataset in a subfolder has the name <subfolder>-<dataset>.
    """
    known = [inspection for inspection in inspections if inspection.lengths]
    common = Path(os.path.commonpath([inspection.path.parent for inspection in known])) if known else path
    files = []
    for inspection in known:
        relative = inspection.path.relative_to(common)
        name = "-".join((relative if inspection.path.is_dir() else relative.with_suffix("")).parts)
        file = path if len(known) == 1 else path.with_name(f"{path.stem}-{name}{path.suffix}")
        assert inspection.lengths is not None
        title = f"{inspection.path.name}: {inspection.lengths.total:,} documents"
        draw_lengths(
            inspection.lengths, file, title=title, unit=inspection.unit, context_length=inspection.context_length
        )
        files.append(file)
    return files


def _inspect_dataset(path: Path, options: InspectOptions) -> Inspection:
    if path.is_dir():
        is_prepared = (path / "corpus.json").exists()
        return inspect_prepared_set(path, options) if is_prepared else _inspect_mds_shards(path, options)
    if path.name.lower().endswith(TOKEN_SUFFIXES):
        return _inspect_token_file(path, options)
    return Inspection(path, "text", {"file_bytes": path.stat().st_size})


# MDS shards that another program wrote


def _inspect_mds_shards(path: Path, options: InspectOptions) -> Inspection:
    shards = read_index(path)
    inspection = Inspection(path, "MDS shards")
    columns = sorted({name for shard in shards for name in shard.columns})
    inspection.figures = {
        "samples": sum(shard.samples for shard in shards),
        "shards": len(shards),
        "columns": columns,
    }
    if unhashed := sum(not shard.entry.get("hashes") for shard in shards):
        inspection.notes.append(f"not verified: {unhashed} shards have no hash in the index; only sizes were compared")
    inspection.verify_shards([shard.entry for shard in shards], options.show_progress)
    try:
        column = find_column(path, shards)
    except RunError as error:
        inspection.notes.append(f"samples not read: {error}")
        return inspection
    if not inspection.damage:
        try:
            _read_samples(inspection, column, options)
        except RunError as error:
            inspection.damage.append(str(error))
    return inspection


def _read_samples(inspection: Inspection, column: str, options: InspectOptions) -> None:
    """Count the documents of all samples, and keep some samples as text."""
    known, path = options.tokenizer, inspection.path
    documents = DocumentLengths(get_end_of_text_id(known.tokenizer)) if known and column == "tokens" else None
    histogram, total = LengthHistogram(), 0
    chosen = set(options.choose_samples(inspection.figures["samples"]))
    values = read_column(path, "text") if column == "text" else read_ids(path, MAX_VOCAB_SIZE)
    for index, value in enumerate(values):
        size = len(value.encode() if column == "text" else value)
        if documents:
            documents.add(value)
        if index in chosen:
            part = value[:SAMPLE_LENGTH]
            inspection.samples[f"sample {index:,}"] = part if column == "text" else options.decode(part)
        total += size
        histogram.add(np.array([size]))
    if documents:
        histogram = documents.close()
    else:
        inspection.notes.append("each sample is counted as a document")
    inspection.lengths, inspection.unit = histogram or None, "tokens" if column == "tokens" else "bytes"
    inspection.figures |= {inspection.unit: total, "documents": histogram.total}


# Token files


def _inspect_token_file(path: Path, options: InspectOptions) -> Inspection:
    inspection, known = Inspection(path, "token file"), options.tokenizer
    record = read_record(path)
    try:
        tokens = TokenFile(path).tokens
    except RunError as error:
        inspection.damage.append(str(error))
        return inspection
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
    elif known and record and known.contradicts(record.tokenizer):
        inspection.damage.append(f"{path}: token ids of another tokenizer, {record.tokenizer[:16]}")
    else:
        for index in options.choose_samples(-(-len(tokens) // SAMPLE_LENGTH)):
            begin = index * SAMPLE_LENGTH
            inspection.samples[f"from token {begin:,}"] = options.decode(tokens[begin : begin + SAMPLE_LENGTH])
    return inspection


def _count_documents(inspection: Inspection, tokens: np.ndarray, end: int | None, show_progress: bool) -> int:
    """Describe the ids and the lengths of the documents, and return the largest id."""
    lengths, largest = DocumentLengths(-1 if end is None else end), 0
    for begin in open_bar(range(0, len(tokens), BLOCK), desc="reading", disable=not show_progress):
        block = np.asarray(tokens[begin : begin + BLOCK])
        lengths.add(block)
        largest = max(largest, int(block.max()))
    inspection.figures = {"tokens": len(tokens), "largest_id": largest, "end_of_text": end, "dtype": tokens.dtype.name}
    if end is None:
        inspection.notes.append("documents not counted: end-of-text is unknown; name the tokenizer with --tokenizer")
    else:
        inspection.lengths = lengths.close()
        inspection.figures["documents"] = inspection.lengths.total
    return largest
