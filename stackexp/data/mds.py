"""Read MDS shards that stackexp did not write: one column of their samples, with token ids or text."""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stackexp.data.token_files import check_ids
from stackexp.data.verification import check_basename, find_damage
from stackexp.errors import RunError, first_line
from stackexp.files import compute_sha256, read_json

SAFE_ENCODINGS = {"bytes", "str", "json", "int", "str_int", "str_float", "str_decimal", "pil", "jpeg", "png"}
SAFE_ENCODINGS |= {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
SAFE_ENCODINGS |= {"ndarray", "float16", "float32", "float64"}
"""Encodings of MDS columns whose decoders cannot run code; pkl can."""
TYPE_SAMPLES = 1024  # samples that determine the integer type of ids stored as bytes


@dataclass(frozen=True)
class MdsShard:
    """An entry of index.json."""

    path: Path
    entry: dict[str, Any]  # bytes and hashes of the file
    samples: int
    columns: dict[str, str]  # name -> encoding
    compression: str | None


def read_index(folder: Path) -> list[MdsShard]:
    """Return the shards of a folder. Raises RunError if index.json is missing, damaged or names other folders."""
    try:
        return [_parse_shard(folder, shard) for shard in read_json(folder / "index.json")["shards"]]
    except (OSError, RunError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{folder}/index.json: missing or corrupt; copy the folder again") from error


def _parse_shard(folder: Path, shard: dict[str, Any]) -> MdsShard:
    entry, compressed = shard["raw_data"], shard.get("zip_data")
    if compressed and not (folder / entry["basename"]).is_file():
        entry = compressed
    columns = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
    if len(columns) != len(shard["column_names"]):
        raise ValueError("a column name occurs twice")
    _ = entry["bytes"] + shard["samples"]
    compression = str(shard.get("compression")) if compressed else None
    return MdsShard(check_basename(folder, entry["basename"]), entry, shard["samples"], columns, compression)


def find_column(folder: Path, shards: list[MdsShard]) -> str:
    """Return "tokens" or "text". Raises RunError if there is neither column or the shards cannot be read safely."""
    encodings = {encoding for shard in shards for encoding in shard.columns.values()}
    if unsafe := sorted(e for e in encodings if e.partition(":")[0] not in SAFE_ENCODINGS):
        raise RunError(f"{folder}: column encoding {unsafe[0]!r} may run code; write the shards again without it")
    if any(shard.compression for shard in shards):
        raise RunError(f"{folder}: compressed shards; write them again with compression=None")
    columns = set.intersection(*(set(shard.columns) for shard in shards)) if shards else set()
    for column in ("tokens", "text"):
        if column in columns:
            return column
    raise RunError(f"{folder}: MDS shards with the columns {sorted(columns)}; expected `tokens` or `text`")


def hash_shards(folder: Path, shards: list[MdsShard]) -> str:
    """Return the SHA-256 over the index and all shards. Raises RunError if a shard differs from the index."""
    digest = hashlib.sha256((folder / "index.json").read_bytes())
    for shard in shards:
        if damage := find_damage(shard.path, shard.entry):
            raise RunError(f"{shard.path}: {damage}; copy it again")
        digest.update(compute_sha256(shard.path).encode())
    return digest.hexdigest()


def read_column(folder: Path, column: str) -> Iterator[Any]:
    """Yield the value of a column in each sample. Call `find_column` first, which refuses encodings that run code."""
    from streaming import LocalDataset  # importing it takes seconds

    try:
        dataset = LocalDataset(str(folder))
        for index in range(len(dataset)):
            yield dataset[index][column]
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{folder}: cannot be read as MDS shards ({first_line(error)}); copy them again") from error


def read_ids(folder: Path, vocab_size: int) -> Iterator[np.ndarray]:
    """Yield the token ids of each sample, [N]. Raises RunError for ids outside the vocabulary."""
    values, position = read_column(folder, "tokens"), 0
    first = list(itertools.islice(values, TYPE_SAMPLES))
    dtype = _find_dtype(folder, [value for value in first if isinstance(value, bytes)], vocab_size)
    for value in itertools.chain(first, values):
        ids = np.frombuffer(value, dtype) if isinstance(value, bytes) else np.ravel(value)
        if ids.dtype.kind not in "ui":
            raise RunError(f"{folder}: `tokens` have the type {ids.dtype.name}; write the shards again as integers")
        check_ids(ids, vocab_size, folder, position, "tokenize it with the model's tokenizer")
        position += len(ids)
        yield ids


def _find_dtype(folder: Path, values: list[bytes], vocab_size: int) -> np.dtype:
    """Return the widest integer type in which samples stored as bytes are ids of the vocabulary."""
    for dtype in map(np.dtype, ("<i8", "<i4", "<u2")):
        if all(len(value) % dtype.itemsize == 0 for value in values):
            arrays = [np.frombuffer(value, dtype) for value in values]
            if all(not len(a) or (a.min() >= 0 and a.max() < vocab_size) for a in arrays):
                return dtype
    found = f"`tokens` are not integers below the vocabulary size {vocab_size:,}"
    raise RunError(f"{folder}: {found}; tokenize it with the model's tokenizer")
