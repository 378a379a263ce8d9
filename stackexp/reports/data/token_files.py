"""Inspect a token file: its record, the lengths of its documents, and some ids or their text."""

from pathlib import Path

import numpy as np
from tqdm import tqdm

from stackexp.data.token_files import FileRecord, TokenFile, find_end_of_text, read_record
from stackexp.data.tokenizer import get_end_of_text_id
from stackexp.errors import RunError
from stackexp.files import sha256_of
from stackexp.reports.data.inspection import SAMPLE_LENGTH, Inspection, InspectOptions
from stackexp.reports.data.lengths import DocumentLengths

BLOCK = 1 << 22  # ids read at a time


def inspect_token_file(path: Path, options: InspectOptions) -> Inspection:
    """Inspect a .npy or .bin file of token ids. Raises RunError if its record is corrupt."""
    inspection = Inspection(path, "token file")
    record = read_record(path)
    try:
        tokens = TokenFile(path).tokens
    except RunError as error:
        inspection.damage.append(str(error))
        return inspection
    if record is None:
        inspection.notes.append(f"not verified: there is no record, {path.name}.json")
    elif sha256_of(path) != record.sha256:
        inspection.damage.append(f"{path}: corrupt: the SHA-256 differs from the record")
    else:
        inspection.checked = 1
    largest = _count_documents(inspection, tokens, _find_end(record, tokens, options), options)
    if record:
        names = ("tokenizer", "vocab_size", "source")
        inspection.figures |= {name: getattr(record, name) for name in names}
        if record.text_bytes:
            inspection.figures |= {"bytes": record.text_bytes, "bytes_per_token": record.text_bytes / record.tokens}
    known = options.tokenizer
    if known and known.vocab_size <= largest:
        inspection.damage.append(f"{path}: token id {largest:,} is outside the vocabulary of {known.vocab_size:,}")
    elif known and record and known.contradicts(record.tokenizer):
        inspection.damage.append(f"{path}: token ids of another tokenizer, {record.tokenizer[:16]}")
    else:
        for index in options.choose_samples(-(-len(tokens) // SAMPLE_LENGTH)):
            begin = index * SAMPLE_LENGTH
            inspection.samples[f"from token {begin:,}"] = options.decode(tokens[begin : begin + SAMPLE_LENGTH])
    return inspection


def _find_end(record: FileRecord | None, tokens: np.ndarray, options: InspectOptions) -> int | None:
    """Return the id that ends a document, if it is known."""
    if record and record.end_of_text is not None:
        return record.end_of_text
    return get_end_of_text_id(options.tokenizer.tokenizer) if options.tokenizer else find_end_of_text(tokens)


def _count_documents(inspection: Inspection, tokens: np.ndarray, end: int | None, options: InspectOptions) -> int:
    """Describe the ids and the lengths of the documents, and return the largest id."""
    lengths, largest = DocumentLengths(-1 if end is None else end), 0
    for begin in tqdm(range(0, len(tokens), BLOCK), desc="reading", disable=not options.show_progress):
        block = np.asarray(tokens[begin : begin + BLOCK])
        lengths.add(block)
        largest = max(largest, int(block.max()))
    lengths.close()
    figures = {"tokens": len(tokens), "largest_id": largest, "end_of_text": end, "dtype": tokens.dtype.name}
    if end is None:
        inspection.notes.append("documents not counted: end-of-text is unknown; name the tokenizer with --tokenizer")
    else:
        inspection.lengths = lengths.histogram
        figures["documents"] = lengths.histogram.total
    inspection.figures = figures
    return largest
