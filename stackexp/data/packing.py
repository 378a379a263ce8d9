"""Documents -> tokens -> sequences: one unit of work, and the merge of the units into a prepared set.

A set is made of units. Each holds whole sequences of its own documents in `unit.00000/`; the tokens left over at
its end, fewer than context_length, are kept beside them and packed together in `tails/` at the merge.
"""

import itertools
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from stackexp.data.readers import BadLine, Piece
from stackexp.data.shards import Corpus, ShardWriter, dtype_of, in_folder, sync, write_json, write_set
from stackexp.data.tokenizer import end_of_text, fingerprint, vocab_size
from stackexp.errors import RunError

BAD_LINES = "bad_lines.log"  # in every unit and of all of them: file:line: why
BATCH_PIECES, BATCH_CHARACTERS = 1024, 1 << 21  # limits of what is tokenised at once


@dataclass
class Unit:
    """What unit.json records of a finished unit."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    bad_lines: int = 0
    shards: list[dict] = field(default_factory=list)


def unit_name(number: int) -> str:
    return f"unit.{number:05}"


def read_unit(folder: Path) -> Unit:
    return Unit(**json.loads((folder / "unit.json").read_text(encoding="utf-8")))


def write_unit(folder: Path, pieces: Iterable[Piece | BadLine], tokenizer: Tokenizer, context_length: int) -> Unit:
    """Tokenise documents into `folder`: shards, tail.npy, bad_lines.log and unit.json.

    Raises RunError for a token id outside the tokenizer's own vocabulary.
    """
    unit, size, end = Unit(), vocab_size(tokenizer), end_of_text(tokenizer)
    writer = ShardWriter(folder, context_length, dtype_of(size))
    for batch in _batches(_without_bad_lines(pieces, unit, folder / BAD_LINES)):
        encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
        ids: list[int] = []
        for piece, encoding in zip(batch, encodings, strict=True):
            ids += encoding.ids
            if piece.ends:
                ids.append(end)
        tokens = np.array(ids, np.int64)
        if tokens.max(initial=0) >= size:
            raise RunError(f"the tokenizer gave token id {tokens.max()}, outside its vocabulary of {size}; replace it")
        writer.write(tokens.astype(writer.dtype))
        unit.documents += sum(piece.ends for piece in batch)
        unit.bytes += sum(len(piece.text.encode()) for piece in batch)
        unit.tokens += len(tokens)
    with open(folder / "tail.npy", "wb") as file:
        np.save(file, writer.close())
        sync(file)
    unit.shards = writer.shards
    write_json(folder / "unit.json", asdict(unit))
    return unit


def merge(folder: Path, count: int, tokenizer: Tokenizer, context_length: int, sources: list[str]) -> Corpus:
    """Make the `count` units in `folder` one prepared set; drops the last < context_length tokens of all tails.

    Raises RunError if they hold less than one sequence.
    """
    units = [read_unit(folder / unit_name(n)) for n in range(count)]
    (folder / "tails").mkdir(exist_ok=True)
    writer = ShardWriter(folder / "tails", context_length, dtype_of(vocab_size(tokenizer)))
    for n in range(count):
        writer.write(np.load(folder / unit_name(n) / "tail.npy"))
    dropped = len(writer.close())
    shards = [entry for n, unit in enumerate(units) for entry in in_folder(unit.shards, unit_name(n))]
    shards += in_folder(writer.shards, "tails")
    tokens = sum(u.tokens for u in units)
    corpus = Corpus(
        tokenizer=fingerprint(tokenizer),
        vocab_size=vocab_size(tokenizer),
        context_length=context_length,
        documents=sum(u.documents for u in units),
        tokens=tokens,
        bytes=sum(u.bytes for u in units),
        sequences=(tokens - dropped) // context_length,
        dropped_tokens=dropped,
        bad_lines=sum(u.bad_lines for u in units),
        sources=sources,
    )
    if not corpus.sequences:
        raise RunError(
            f"{tokens} tokens in {corpus.documents} documents ({corpus.bad_lines} bad lines) do not fill one sequence "
            f"of {context_length}; add text or lower the context length"
        )
    assert sum(s["samples"] for s in shards) == corpus.sequences
    with open(folder / BAD_LINES, "wb") as log:
        for n in range(count):
            with open(folder / unit_name(n) / BAD_LINES, "rb") as part:
                shutil.copyfileobj(part, log)
    write_set(folder, corpus, shards, tokenizer)
    return corpus


def write_documents(folder: Path, texts: Iterable[str], tokenizer: Tokenizer, context_length: int) -> Corpus:
    """A prepared set of few documents, at once: one unit, its tail dropped. `folder` must not exist."""
    (folder / unit_name(0)).mkdir(parents=True)
    pieces = (Piece(text, True) for text in texts)
    write_unit(folder / unit_name(0), pieces, tokenizer, context_length)
    return merge(folder, 1, tokenizer, context_length, [])


def _without_bad_lines(pieces: Iterable[Piece | BadLine], unit: Unit, path: Path) -> Iterator[Piece]:
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as log:
        for piece in pieces:
            if isinstance(piece, BadLine):
                log.write(f"{piece}\n")
                unit.bad_lines += 1
            else:
                yield piece


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Groups of pieces of at most BATCH_PIECES pieces and about BATCH_CHARACTERS characters."""
    while first := list(itertools.islice(pieces, 1)):
        batch, characters = first, len(first[0].text)
        while len(batch) < BATCH_PIECES and characters < BATCH_CHARACTERS:
            piece = next(pieces, None)
            if piece is None:
                break
            batch.append(piece)
            characters += len(piece.text)
        yield batch
