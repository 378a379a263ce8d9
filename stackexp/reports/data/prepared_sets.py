"""Inspect a prepared set: its files, the lengths of its documents, and some sequences."""

import io
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from stackexp.data.shards import Corpus, TokenSet, token_dtype
from stackexp.data.tokenizer import get_end_of_text_id
from stackexp.data.units import TAIL, read_unit
from stackexp.errors import RunError
from stackexp.reports.data.inspection import SAMPLE_LENGTH, Inspection, InspectOptions, read_shards, read_verified
from stackexp.reports.data.lengths import DocumentLengths


def inspect_prepared_set(path: Path, options: InspectOptions) -> Inspection:
    """Inspect a finished set. Raises RunError if corpus.json or index.json is damaged."""
    token_set = TokenSet(path, cache=True)  # damaged shards are reported below
    shards = json.loads((path / "index.json").read_text(encoding="utf-8"))["shards"]
    inspection = Inspection(path, "prepared set", context_length=token_set.corpus.context_length)
    inspection.figures = _collect_figures(token_set.corpus, len(shards))
    tokenizer = None
    try:
        tokenizer = token_set.load_tokenizer()
    except RunError as error:
        inspection.damage.append(str(error))
    damaged = _verify_shards(inspection, token_set, shards, tokenizer, options)
    if tokenizer:
        for index in options.choose_samples(len(token_set)):
            if int(np.searchsorted(token_set.begins, index, side="right")) - 1 not in damaged:
                ids = token_set[index][:SAMPLE_LENGTH].tolist()
                inspection.samples[f"sequence {index:,}"] = tokenizer.decode(ids, skip_special_tokens=False)
    return inspection


def _collect_figures(corpus: Corpus, shards: int) -> dict[str, Any]:
    figures = {field.name: getattr(corpus, field.name) for field in fields(corpus) if field.name != "format_version"}
    names = list(dict.fromkeys([*corpus.sources[:1], *corpus.sources[-1:]]))  # the first and the last
    sources = f"{len(corpus.sources)}: {' ... '.join(names)}" if names else "0"
    figures |= {"sources": sources, "shards": shards}
    return figures | {"bytes_per_token": corpus.bytes / max(corpus.tokens, 1)}


def _verify_shards(
    inspection: Inspection,
    token_set: TokenSet,
    shards: list[dict],
    tokenizer: Tokenizer | None,
    options: InspectOptions,
) -> set[int]:
    """Verify all files, collect the lengths of the documents, and return the numbers of damaged shards.

    Documents continue from the shards of a unit into its tail. A copy without tails has only what is in the shards.
    """
    lengths = DocumentLengths(get_end_of_text_id(tokenizer)) if tokenizer else None
    damaged, tails = set(), _read_tails(inspection)
    has_tails = bool(tails)
    units = [shard["raw_data"]["basename"].rpartition("/")[0] for shard in shards]
    files = read_shards(inspection, [shard["raw_data"] for shard in shards], options.show_progress)
    for number, (data, shard) in enumerate(zip(files, shards, strict=True)):
        if data is None:
            damaged.add(number)
        elif lengths and not (has_tails and units[number] == "tails"):
            lengths.add(_extract_tokens(data, shard["samples"], token_set.corpus))
            if number + 1 == len(shards) or units[number + 1] != units[number]:
                lengths.add(tails.pop(units[number], np.empty(0)))
    if lengths and not inspection.damage:
        for tail in tails.values():  # of units without a whole sequence
            lengths.add(tail)
        lengths.close()
        inspection.lengths = lengths.histogram
        expected, found = token_set.corpus.documents, lengths.histogram.total
        if has_tails and found != expected:
            path = inspection.path / "corpus.json"
            inspection.damage.append(f"{path}: records {expected:,} documents, but the set has {found:,}")
    return damaged


def _extract_tokens(data: bytes, samples: int, corpus: Corpus) -> np.ndarray:
    """Return the token ids of a shard, [samples * T]; they are the end of its file."""
    dtype, count = token_dtype(corpus.vocab_size), samples * corpus.context_length
    return np.frombuffer(data, dtype, count, len(data) - count * dtype.itemsize)


def _read_tails(inspection: Inspection) -> dict[str, np.ndarray]:
    """Return the tail of each unit, or nothing for a copy of the set without tails."""
    folders = sorted(inspection.path.glob("unit.*"))
    if not any((folder / TAIL).exists() for folder in folders):
        return {}
    tails = {}
    for folder in folders:
        try:
            entry = {"hashes": {"sha256": read_unit(folder).hashes[TAIL]}}
        except (OSError, ValueError, TypeError, KeyError):
            inspection.damage.append(f"{folder / 'unit.json'}: missing or corrupt")
            continue
        data, problem = read_verified(folder / TAIL, entry)
        if data is None:
            inspection.damage.append(f"{folder / TAIL}: {problem}")
        else:
            tails[folder.name] = np.load(io.BytesIO(data))
    return tails
