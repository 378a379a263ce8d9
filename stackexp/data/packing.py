"""Merge units into a prepared set, packing the ends of their documents into sequences."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from stackexp.data.readers import Piece
from stackexp.data.shards import Corpus, ShardWriter, prefix_basenames, token_dtype, write_metadata
from stackexp.data.tokenizer import compute_fingerprint, get_vocab_size
from stackexp.data.units import BAD_LINES, TAIL, Unit, read_unit, unit_name, write_unit
from stackexp.errors import RunError


def merge_units(folder: Path, count: int, tokenizer: Tokenizer, context_length: int, sources: list[str]) -> Corpus:
    """Merge the `count` units in `folder` into one prepared set.

    The tails of all units are packed together; the last tokens that fill no sequence are dropped. Raises RunError if
    there is less than one sequence, or if a unit was made with another tokenizer.
    """
    units = [read_unit(folder / unit_name(number)) for number in range(count)]
    _check_tokenizer(folder, units, tokenizer)
    tail_shards, dropped = _pack_tails(folder, count, tokenizer, context_length)
    shards = [entry for n, unit in enumerate(units) for entry in prefix_basenames(unit.shards, unit_name(n))]
    shards += prefix_basenames(tail_shards, "tails")
    tokens = sum(unit.tokens for unit in units)
    corpus = Corpus(
        tokenizer=compute_fingerprint(tokenizer),
        vocab_size=get_vocab_size(tokenizer),
        context_length=context_length,
        documents=sum(unit.documents for unit in units),
        tokens=tokens,
        bytes=sum(unit.bytes for unit in units),
        sequences=(tokens - dropped) // context_length,
        dropped_tokens=dropped,
        bad_lines=sum(unit.bad_lines for unit in units),
        sources=sources,
    )
    if not corpus.sequences:
        raise RunError(
            f"{folder}: {tokens} tokens in {corpus.documents} documents ({corpus.bad_lines} bad lines) do not fill one "
            f"sequence of {context_length}; add text or lower the context length"
        )
    assert sum(shard["samples"] for shard in shards) == corpus.sequences
    with open(folder / BAD_LINES, "wb") as log:
        for number in range(count):
            with open(folder / unit_name(number) / BAD_LINES, "rb") as unit_log:
                shutil.copyfileobj(unit_log, log)
    write_metadata(folder, corpus, shards, tokenizer)
    return corpus


def write_documents(folder: Path, texts: Iterable[str], tokenizer: Tokenizer, context_length: int) -> Corpus:
    """Write a few documents as a prepared set of one unit. `folder` must not exist."""
    unit = folder / unit_name(0)
    unit.mkdir(parents=True)
    write_unit(unit, (Piece(text, True) for text in texts), tokenizer, context_length)
    return merge_units(folder, 1, tokenizer, context_length, [])


def _check_tokenizer(folder: Path, units: list[Unit], tokenizer: Tokenizer) -> None:
    fingerprint = compute_fingerprint(tokenizer)
    for number, unit in enumerate(units):
        if unit.tokenizer not in ("", fingerprint):
            raise RunError(
                f"{folder}/tokenizer.json: not the tokenizer of {unit_name(number)}; restore that one, or delete "
                f"{folder} and prepare it again"
            )


def _pack_tails(folder: Path, count: int, tokenizer: Tokenizer, context_length: int) -> tuple[list[dict], int]:
    """Write the tails of all units as shards in `tails/`; return their index entries and the number of tokens left."""
    tails = folder / "tails"
    shutil.rmtree(tails, ignore_errors=True)  # of a merge that was killed
    tails.mkdir()
    writer = ShardWriter(tails, context_length, token_dtype(get_vocab_size(tokenizer)))
    for number in range(count):
        writer.write(np.load(folder / unit_name(number) / TAIL))
    dropped = len(writer.close())
    return writer.shards, dropped
