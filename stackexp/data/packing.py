"""Documents -> tokens -> sequences: one unit of work, and the merge of the units into a prepared set.

A set is made of units. Each holds whole sequences of its own documents in `unit.00000/`; the tokens left over at
its end, fewer than context_length, are kept beside them and packed together in `tails/` at the merge.
"""

import json
import shutil
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from stackexp.data.readers import BadLine, Piece, TokenBlock
from stackexp.data.shards import Corpus, ShardWriter, prefix_basenames, sync, token_dtype, write_json, write_metadata
from stackexp.data.sources import Source
from stackexp.data.token_files import sha256_of
from stackexp.data.tokenizer import compute_fingerprint, get_end_of_text_id, get_vocab_size
from stackexp.errors import RunError

BAD_LINES = "bad_lines.log"  # in every unit and of all of them: file:line: why
TAIL = "tail.npy"
BATCH_PIECES, BATCH_CHARACTERS = 1024, 1 << 21  # limits of what is tokenised at once


@dataclass
class Unit:
    """What unit.json records of a finished unit."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    bad_lines: int = 0
    shards: list[dict] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)  # sha256 of the other files
    tokenizer: str = ""  # fingerprint; "": not recorded
    sources: list[list] = field(default_factory=list)  # name, size, time of change (ns) of each file


def unit_name(number: int) -> str:
    return f"unit.{number:05}"


def read_unit(folder: Path) -> Unit:
    return Unit(**json.loads((folder / "unit.json").read_text(encoding="utf-8")))


def write_unit(
    folder: Path,
    parts: Iterable[Piece | TokenBlock | BadLine],
    tokenizer: Tokenizer,
    context_length: int,
    sources: Iterable[Source] = (),
) -> Unit:
    """Write documents into `folder`: shards, tail.npy, bad_lines.log and unit.json. Text is tokenised."""
    unit = Unit(tokenizer=compute_fingerprint(tokenizer), sources=[s.record for s in sources])
    writer = ShardWriter(folder, context_length, token_dtype(get_vocab_size(tokenizer)))
    for tokens in tokenize_pieces(_without_bad_lines(parts, unit, folder / BAD_LINES), tokenizer):
        writer.write(tokens.ids.astype(writer.dtype, copy=False))
        unit.documents += tokens.documents
        unit.bytes += tokens.bytes
        unit.tokens += len(tokens.ids)
    with open(folder / TAIL, "wb") as file:
        np.save(file, writer.close())
        sync(file)
    unit.shards = writer.shards
    unit.hashes = {name: sha256_of(folder / name) for name in (TAIL, BAD_LINES)}
    write_json(folder / "unit.json", asdict(unit))
    return unit


def damaged_file(folder: Path) -> str | None:
    """The first file of a finished unit that is not as it was written, or None."""
    try:
        unit = read_unit(folder)
        hashes = {s["raw_data"]["basename"]: s["raw_data"]["hashes"]["sha256"] for s in unit.shards}
        hashes |= {name: unit.hashes[name] for name in (TAIL, BAD_LINES)}
    except (OSError, ValueError, TypeError, KeyError):
        return "unit.json"
    for name, expected in hashes.items():
        try:
            found = sha256_of(folder / name)
        except FileNotFoundError:
            found = None
        if found != expected:
            return name
    return None


def regroup(folder: Path, units: list[list[Source]]) -> None:
    """Give the finished units in `folder` the numbers that they have in `units`, and remove those of other sources."""
    places = {json.dumps([s.record for s in unit]): folder / unit_name(n) for n, unit in enumerate(units)}
    for path in folder.glob("unit.*"):
        if path != _place(path, places):  # first all out of the way
            hidden = path.with_name(f".moved.{path.name}")
            shutil.rmtree(hidden, ignore_errors=True)
            path.rename(hidden)
    for path in folder.glob(".moved.*"):  # also of an earlier call that was killed
        place = _place(path, places)
        if place and not place.exists():
            path.rename(place)
        else:
            shutil.rmtree(path)


def _place(path: Path, places: dict[str, Path]) -> Path | None:
    """Where a unit belongs. None: nowhere, its sources have changed or are not known."""
    try:
        return places.get(json.dumps(read_unit(path).sources))
    except (OSError, ValueError, TypeError):
        return None


def merge(folder: Path, count: int, tokenizer: Tokenizer, context_length: int, sources: list[str]) -> Corpus:
    """Make the `count` units in `folder` one prepared set; drops the last < context_length tokens of all tails.

    Raises RunError if they hold less than one sequence, or were made with another tokenizer.
    """
    units = [read_unit(folder / unit_name(n)) for n in range(count)]
    own = compute_fingerprint(tokenizer)
    for n, unit in enumerate(units):
        if unit.tokenizer not in ("", own):
            raise RunError(
                f"{folder}/tokenizer.json: not the tokenizer that {unit_name(n)} was made with; put that one back, or "
                f"delete {folder} and prepare it anew"
            )
    shutil.rmtree(folder / "tails", ignore_errors=True)  # of a merge that was stopped
    (folder / "tails").mkdir()
    writer = ShardWriter(folder / "tails", context_length, token_dtype(get_vocab_size(tokenizer)))
    for n in range(count):
        writer.write(np.load(folder / unit_name(n) / TAIL))
    dropped = len(writer.close())
    shards = [entry for n, unit in enumerate(units) for entry in prefix_basenames(unit.shards, unit_name(n))]
    shards += prefix_basenames(writer.shards, "tails")
    tokens = sum(u.tokens for u in units)
    corpus = Corpus(
        tokenizer=own,
        vocab_size=get_vocab_size(tokenizer),
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
    write_metadata(folder, corpus, shards, tokenizer)
    return corpus


def write_documents(folder: Path, texts: Iterable[str], tokenizer: Tokenizer, context_length: int) -> Corpus:
    """A prepared set of few documents, at once: one unit, its tail dropped. `folder` must not exist."""
    (folder / unit_name(0)).mkdir(parents=True)
    pieces = (Piece(text, True) for text in texts)
    write_unit(folder / unit_name(0), pieces, tokenizer, context_length)
    return merge(folder, 1, tokenizer, context_length, [])


def _without_bad_lines(
    parts: Iterable[Piece | TokenBlock | BadLine], unit: Unit, path: Path
) -> Iterator[Piece | TokenBlock]:
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as log:
        for part in parts:
            if isinstance(part, BadLine):
                log.write(f"{part}\n")
                unit.bad_lines += 1
            else:
                yield part
        sync(log)


def tokenize_pieces(parts: Iterator[Piece | TokenBlock], tokenizer: Tokenizer) -> Iterator[TokenBlock]:
    """The tokens of all parts in order, text in groups of at most BATCH_PIECES and about BATCH_CHARACTERS."""
    batch: list[Piece] = []
    characters = 0
    for part in parts:
        if isinstance(part, TokenBlock):
            yield part
            continue
        batch.append(part)
        characters += len(part.text)
        if len(batch) == BATCH_PIECES or characters >= BATCH_CHARACTERS:
            yield _encode(batch, tokenizer)
            batch, characters = [], 0
    if batch:
        yield _encode(batch, tokenizer)


def _encode(batch: list[Piece], tokenizer: Tokenizer) -> TokenBlock:
    end, ids = get_end_of_text_id(tokenizer), array("I")
    encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
    for piece, encoding in zip(batch, encodings, strict=True):
        ids.extend(encoding.ids)
        if piece.ends_document:
            ids.append(end)
    size = sum(len(piece.text.encode()) for piece in batch)
    return TokenBlock(np.array(ids, np.uint32), sum(piece.ends_document for piece in batch), size)
