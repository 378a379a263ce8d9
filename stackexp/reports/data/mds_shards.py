"""Inspect MDS shards that another program wrote: their index, files, documents and some samples."""

import json
from pathlib import Path

import numpy as np

from stackexp.data.tokenizer import get_end_of_text_id
from stackexp.errors import RunError, first_line
from stackexp.reports.data.inspection import SAMPLE_LENGTH, Inspection, InspectOptions, read_shards
from stackexp.reports.data.lengths import DocumentLengths, LengthHistogram

MAX_VOCAB_SIZE = 1 << 20  # larger values show that bytes were read with the wrong integer type


def inspect_mds_shards(path: Path, options: InspectOptions) -> Inspection:
    """Inspect a folder of MDS shards with the column `tokens` or `text`. Raises RunError if its index is damaged."""
    try:
        shards = json.loads((path / "index.json").read_text(encoding="utf-8"))["shards"]
        columns = shards[0]["column_names"]
        count = sum(shard["samples"] for shard in shards)
        entries = [_choose_entry(path, shard) for shard in shards]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        raise RunError(f"{path}/index.json: missing or corrupt; copy the folder again") from e
    inspection = Inspection(path, "MDS shards")
    inspection.figures = {"samples": count, "shards": len(shards), "columns": columns}
    unhashed = sum(not entry.get("hashes") for entry in entries)
    if unhashed:
        inspection.notes.append(f"not verified: {unhashed} shards have no hash in the index; only sizes were compared")
    for _ in read_shards(inspection, entries, options.show_progress):
        pass
    compressed = [shard for shard, entry in zip(shards, entries, strict=True) if entry is not shard["raw_data"]]
    if compressed:  # their samples are not read
        inspection.figures["compression"] = str(compressed[0].get("compression"))
    elif not inspection.damage and (column := next((name for name in ("tokens", "text") if name in columns), None)):
        _read_samples(inspection, column, options)
    return inspection


def _choose_entry(path: Path, shard: dict) -> dict:
    """Return the index entry of the shard's file, raw or compressed. Raises KeyError if it is incomplete."""
    raw = shard["raw_data"]
    entry = shard["zip_data"] if shard.get("zip_data") and not (path / raw["basename"]).is_file() else raw
    _ = entry["basename"], entry["bytes"]
    return entry


def _read_samples(inspection: Inspection, column: str, options: InspectOptions) -> None:
    """Count the documents of all samples, and keep some samples as text."""
    from streaming import LocalDataset  # takes seconds to import

    known = options.tokenizer
    documents = DocumentLengths(get_end_of_text_id(known.tokenizer)) if known and column == "tokens" else None
    histogram, total, dtype = LengthHistogram(), 0, None
    try:
        dataset = LocalDataset(str(inspection.path))
        chosen = set(options.choose_samples(len(dataset)))
        for index in range(len(dataset)):
            value = dataset[index][column]
            if column == "text":
                size, sample = len(value.encode()), value[:SAMPLE_LENGTH]
            else:
                dtype = dtype or _find_dtype(value)
                ids = np.frombuffer(value, dtype) if isinstance(value, bytes) else np.ravel(value)
                size, sample = len(ids), options.decode(ids[:SAMPLE_LENGTH]) if index in chosen else ""
                if documents:
                    documents.add(ids)
            if index in chosen:
                inspection.samples[f"sample {index:,}"] = sample
            total += size
            histogram.add(np.array([size]))
    except (OSError, ValueError, KeyError) as e:
        inspection.damage.append(f"{inspection.path}: cannot be read as MDS shards ({first_line(e)})")
        return
    if documents:
        documents.close()
        histogram = documents.histogram
    inspection.lengths, inspection.unit = histogram, "tokens" if column == "tokens" else "bytes"
    inspection.figures |= {inspection.unit: total, "documents": histogram.total}
    if documents is None:
        inspection.notes.append("each sample is counted as a document")


def _find_dtype(value: object) -> np.dtype:
    """Return the type of token ids; for bytes the widest integer type whose values are possible ids."""
    if not isinstance(value, bytes):
        return np.asarray(value).dtype
    for dtype in map(np.dtype, ("<i8", "<i4", "<u2")):
        if len(value) % dtype.itemsize == 0:
            ids = np.frombuffer(value, dtype)
            if not len(ids) or (ids.min() >= 0 and ids.max() < MAX_VOCAB_SIZE):
                return dtype
    raise ValueError("the column `tokens` has bytes that are no token ids")
