"""Inspect a prepared set: its files, the lengths of its documents, and some sequences."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from stackexp.data.shards import Corpus, TokenSet
from stackexp.data.tokenizer import get_end_of_text_id
from stackexp.data.units import TAIL, read_unit
from stackexp.errors import RunError
from stackexp.reports.data.inspection import SAMPLE_LENGTH, Inspection, InspectOptions
from stackexp.reports.data.lengths import DocumentLengths


def inspect_prepared_set(path: Path, options: InspectOptions) -> Inspection:
    """Inspect a finished set. Raises RunError if corpus.json or index.json is damaged."""
    token_set = TokenSet(path, cache=True)  # damaged shards are reported below
    entries = [shard["raw_data"] for shard in json.loads((path / "index.json").read_text(encoding="utf-8"))["shards"]]
    inspection = Inspection(path, "prepared set", context_length=token_set.corpus.context_length)
    inspection.figures = _collect_figures(token_set.corpus, len(entries))
    is_whole = inspection.verify_shards(entries, options.show_progress)
    tails = _read_tails(inspection)
    try:
        tokenizer = token_set.load_tokenizer()
    except RunError as error:
        inspection.damage.append(str(error))
        return inspection
    if not inspection.damage:
        units = [entry["basename"].rpartition("/")[0] for entry in entries]
        _measure_documents(inspection, token_set, tokenizer, units, tails)
    for index in options.choose_samples(len(token_set)):
        if is_whole[int(np.searchsorted(token_set.begins, index, side="right")) - 1]:
            ids = token_set[index][:SAMPLE_LENGTH].tolist()
            inspection.samples[f"sequence {index:,}"] = tokenizer.decode(ids, skip_special_tokens=False)
    return inspection


def _collect_figures(corpus: Corpus, shards: int) -> dict[str, Any]:
    figures = {field.name: getattr(corpus, field.name) for field in fields(corpus) if field.name != "format_version"}
    names = list(dict.fromkeys([*corpus.sources[:1], *corpus.sources[-1:]]))  # the first and the last
    sources = f"{len(corpus.sources)}: {' ... '.join(names)}" if names else "0"
    figures |= {"sources": sources, "shards": shards}
    return figures | {"bytes_per_token": corpus.bytes / max(corpus.tokens, 1)}


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
        if inspection.verify_file(folder / TAIL, entry):
            tails[folder.name] = np.load(folder / TAIL)
    return tails


def _measure_documents(
    inspection: Inspection, token_set: TokenSet, tokenizer: Tokenizer, units: list[str], tails: dict[str, np.ndarray]
) -> None:
    """Collect the lengths of the documents; `units` has the unit of each shard.

    Documents continue from the shards of a unit into its tail. A copy without tails has only what is in the shards.
    """
    lengths, has_tails = DocumentLengths(get_end_of_text_id(tokenizer)), bool(tails)
    for number, unit in enumerate(units):
        if not (has_tails and unit == "tails"):
            lengths.add(token_set.map_shard(number).ravel())
            if units[number + 1 : number + 2] != [unit]:
                lengths.add(tails.pop(unit, np.empty(0)))
    for tail in tails.values():  # of units without a whole sequence
        lengths.add(tail)
    inspection.lengths = lengths.close()
    expected, found = token_set.corpus.documents, inspection.lengths.total
    if has_tails and found != expected:
        path = inspection.path / "corpus.json"
        inspection.damage.append(f"{path}: records {expected:,} documents, but the set has {found:,}")
