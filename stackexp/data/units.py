"""Units of work: the folders `unit.00000`, `unit.00001` ... from which a prepared set is merged.

A unit holds the sequences of its own documents as shards. The tokens at its end that fill no sequence are in tail.npy;
the merge packs the tails of all units together.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from stackexp.data.readers import BadLine, Piece, TokenBlock
from stackexp.data.shards import ShardWriter, token_dtype
from stackexp.data.sources import Source
from stackexp.data.tokenizer import compute_fingerprint, get_vocab_size, tokenize_pieces
from stackexp.files import sha256_of, sync_file, write_json

BAD_LINES = "bad_lines.log"  # lines "file:line: reason", in each unit and in the merged set
TAIL = "tail.npy"


@dataclass
class Unit:
    """The contents of unit.json, which is written last."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    bad_lines: int = 0
    shards: list[dict] = field(default_factory=list)  # entries for index.json
    hashes: dict[str, str] = field(default_factory=dict)  # SHA-256 of the other files
    tokenizer: str = ""  # fingerprint; not recorded by early versions
    sources: list[list] = field(default_factory=list)  # name, size, modification time (ns)


def unit_name(number: int) -> str:
    """Return the folder name of a unit."""
    return f"unit.{number:05}"


def read_unit(folder: Path) -> Unit:
    """Read unit.json. Raises OSError, ValueError or TypeError if it is missing or corrupt."""
    return Unit(**json.loads((folder / "unit.json").read_text(encoding="utf-8")))


def write_unit(
    folder: Path,
    items: Iterable[Piece | TokenBlock | BadLine],
    tokenizer: Tokenizer,
    context_length: int,
    sources: Iterable[Source] = (),
) -> Unit:
    """Tokenize documents and write them to `folder`, which exists, as a unit."""
    unit = Unit(tokenizer=compute_fingerprint(tokenizer), sources=[source.record for source in sources])
    writer = ShardWriter(folder, context_length, token_dtype(get_vocab_size(tokenizer)))
    for block in tokenize_pieces(_log_bad_lines(items, unit, folder / BAD_LINES), tokenizer):
        writer.write(block.ids.astype(writer.dtype, copy=False))
        unit.documents += block.documents
        unit.bytes += block.bytes
        unit.tokens += len(block.ids)
    with open(folder / TAIL, "wb") as file:
        np.save(file, writer.close())
        sync_file(file)
    unit.shards = writer.shards
    unit.hashes = {name: sha256_of(folder / name) for name in (TAIL, BAD_LINES)}
    write_json(folder / "unit.json", asdict(unit), indent=1)
    return unit


def _log_bad_lines(
    items: Iterable[Piece | TokenBlock | BadLine], unit: Unit, path: Path
) -> Iterator[Piece | TokenBlock]:
    """Yield all items but bad lines, which are counted and written to the log."""
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as log:
        for item in items:
            if isinstance(item, BadLine):
                log.write(f"{item}\n")
                unit.bad_lines += 1
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
        if not path.exists() or sha256_of(path) != expected:
            return name
    return None


def renumber_units(folder: Path, units: list[list[Source]]) -> None:
    """Rename the finished units in `folder` to their numbers in `units`, and delete units of other sources."""
    targets = {json.dumps([s.record for s in unit]): folder / unit_name(n) for n, unit in enumerate(units)}
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
