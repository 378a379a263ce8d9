"""Units of work: the folders `unit.00000`, `unit.00001` ... from which a prepared set is merged.

A unit holds the sequences of its documents as shards. Its last tokens, which do not fill a sequence, are in tail.npy;
the merge packs the tails of all units together.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from stackexp.data.readers import BadLine, FilteredOut, Piece, TokenBlock
from stackexp.data.shards import Corpus, ShardWriter, choose_token_dtype, prefix_basenames, write_metadata
from stackexp.data.sources import Source
from stackexp.data.tokenizer import compute_fingerprint, get_vocab_size, tokenize_pieces
from stackexp.errors import RunError
from stackexp.files import compute_sha256, sync_file, write_json

BAD_LINES = "bad_lines.log"  # lines "file:line: reason", in each unit and in the merged set
TAIL = "tail.npy"


@dataclass
class Unit:
    """The contents of unit.json, which is written last."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    bad_lines: int = 0
    filtered_documents: int = 0
    shards: list[dict] = field(default_factory=list)  # entries for index.json
    hashes: dict[str, str] = field(default_factory=dict)  # SHA-256 of the other files
    tokenizer: str = ""  # fingerprint; not recorded by early versions
    sources: list[list] = field(default_factory=list)  # name, size, modification time (ns)


def format_unit_name(number: int) -> str:
    """Return the folder name of a unit."""
    return f"unit.{number:05}"


def read_unit(folder: Path) -> Unit:
    """Read unit.json. Raises OSError, ValueError or TypeError if it is missing or corrupt."""
    return Unit(**json.loads((folder / "unit.json").read_text(encoding="utf-8")))


def write_unit(
    folder: Path,
    items: Iterable[Piece | TokenBlock | BadLine | FilteredOut],
    tokenizer: Tokenizer,
    context_length: int,
    sources: Iterable[Source] = (),
) -> Unit:
    """Tokenize documents and write them to `folder`, which exists, as a unit."""
    unit = Unit(tokenizer=compute_fingerprint(tokenizer), sources=[source.record for source in sources])
    writer = ShardWriter(folder, context_length, choose_token_dtype(get_vocab_size(tokenizer)))
    for block in tokenize_pieces(_count_others(items, unit, folder / BAD_LINES), tokenizer):
        writer.write(block.ids.astype(writer.dtype, copy=False))
        unit.documents += block.documents
        unit.bytes += block.bytes
        unit.tokens += len(block.ids)
    with open(folder / TAIL, "wb") as file:
        np.save(file, writer.close())
        sync_file(file)
    unit.shards = writer.shards
    unit.hashes = {name: compute_sha256(folder / name) for name in (TAIL, BAD_LINES)}
    write_json(folder / "unit.json", asdict(unit), indent=1)
    return unit


def _count_others(
    items: Iterable[Piece | TokenBlock | BadLine | FilteredOut], unit: Unit, path: Path
) -> Iterator[Piece | TokenBlock]:
    """Yield the documents. Count the others; bad lines are also written to the log."""
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as log:
        for item in items:
            if isinstance(item, BadLine):
                log.write(f"{item}\n")
                unit.bad_lines += 1
            elif isinstance(item, FilteredOut):
                unit.filtered_documents += item.documents
            else:
                yield item
        sync_file(log)


def find_damaged_file(folder: Path) -> str | None:
    """Return the name of the first file of a finished unit that differs from its recorded hash, or None."""
    try:
        unit = read_unit(folder)
        hashes = {s["raw_data"]["basename"]: s["raw_data"]["hashes"]["sha256"] for s in unit.shards}
        hashes |= {name: unit.hashes[name] for name in (TAIL, BAD_LINES)}
    except (OSError, ValueError, TypeError, KeyError):
        return "unit.json"
    for name, expected in hashes.items():
        path = folder / name
        if not path.exists() or compute_sha256(path) != expected:
            return name
    return None


def renumber_units(folder: Path, units: list[list[Source]]) -> None:
    """Rename the finished units in `folder` to their numbers in `units`, and delete units of other sources."""
    targets = {json.dumps([s.record for s in unit]): folder / format_unit_name(n) for n, unit in enumerate(units)}
    for path in folder.glob("unit.*"):
        if path != _find_target(path, targets):  # move all out of the way first
            hidden = path.with_name(f".moved.{path.name}")
            shutil.rmtree(hidden, ignore_errors=True)
            path.rename(hidden)
    for path in folder.glob(".moved.*"):  # includes those of an earlier call that was killed
        target = _find_target(path, targets)
        if target and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path)


def _find_target(path: Path, targets: dict[str, Path]) -> Path | None:
    """Return the folder where a unit belongs, or None if its sources have changed or are unknown."""
    try:
        return targets.get(json.dumps(read_unit(path).sources))
    except (OSError, ValueError, TypeError):
        return None


def merge_units(folder: Path, count: int, tokenizer: Tokenizer, context_length: int, sources: list[str]) -> Corpus:
    """Merge the `count` units in `folder` into one prepared set.

    The tails of all units are packed together; the last tokens, which do not fill a sequence, are dropped. Raises
    RunError if there is less than one sequence, or if a unit was made with another tokenizer.
    """
    units = [read_unit(folder / format_unit_name(number)) for number in range(count)]
    _check_tokenizer(folder, units, tokenizer)
    tail_shards, dropped = _pack_tails(folder, count, tokenizer, context_length)
    shards = [entry for n, unit in enumerate(units) for entry in prefix_basenames(unit.shards, format_unit_name(n))]
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
        filtered_documents=sum(unit.filtered_documents for unit in units),
        sources=sources,
    )
    if not corpus.sequences:
        if corpus.bad_lines and not corpus.documents:
            log_file = folder / format_unit_name(0) / BAD_LINES
            advice = f"{log_file} has the reasons; correct the files, --text-column or --filter"
            raise RunError(f"{folder}: no documents, but {corpus.bad_lines:,} bad lines; {advice}")
        others = f"{corpus.bad_lines} bad lines"
        if corpus.filtered_documents:
            others = f"{corpus.filtered_documents:,} more filtered out, {others}"
        raise RunError(
            f"{folder}: {tokens} tokens in {corpus.documents} documents ({others}) do not fill one sequence of "
            f"{context_length}; add text or lower the context length"
        )
    assert sum(shard["samples"] for shard in shards) == corpus.sequences
    with open(folder / BAD_LINES, "wb") as log:
        for number in range(count):
            with open(folder / format_unit_name(number) / BAD_LINES, "rb") as unit_log:
                shutil.copyfileobj(unit_log, log)
    write_metadata(folder, corpus, shards, tokenizer)
    return corpus


def write_documents(folder: Path, texts: Iterable[str], tokenizer: Tokenizer, context_length: int) -> Corpus:
    """Write a few documents as a prepared set of one unit. `folder` must not exist."""
    unit = folder / format_unit_name(0)
    unit.mkdir(parents=True)
    write_unit(unit, (Piece(text, True) for text in texts), tokenizer, context_length)
    return merge_units(folder, 1, tokenizer, context_length, [])


def _check_tokenizer(folder: Path, units: list[Unit], tokenizer: Tokenizer) -> None:
    fingerprint = compute_fingerprint(tokenizer)
    for number, unit in enumerate(units):
        if unit.tokenizer not in ("", fingerprint):
            raise RunError(
                f"{folder}/tokenizer.json: not the tokenizer of {format_unit_name(number)}; restore that one, or "
                f"delete {folder} and prepare it again"
            )


def _pack_tails(folder: Path, count: int, tokenizer: Tokenizer, context_length: int) -> tuple[list[dict], int]:
    """Write the tails of all units as shards in `tails/`; return their index entries and the number of tokens left."""
    tails = folder / "tails"
    shutil.rmtree(tails, ignore_errors=True)  # left by a killed merge
    tails.mkdir()
    writer = ShardWriter(tails, context_length, choose_token_dtype(get_vocab_size(tokenizer)))
    for number in range(count):
        writer.write(np.load(folder / format_unit_name(number) / TAIL))
    dropped = len(writer.close())
    return writer.shards, dropped
