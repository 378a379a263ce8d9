"""Evaluation sets that are not token files: text and MDS shards, converted once to token files in the cache.

A cached file is named after a hash of its source and its tokenizer, so it is never stale. It is written atomically
under a lock, so that only one of several processes converts.
"""

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from stackexp.data.readers import BadLine, Piece, read_pieces
from stackexp.data.sources import find_sources
from stackexp.data.token_files import TokenFile, write_token_file
from stackexp.data.tokenizer import (
    UNKNOWN_TOKENIZER,
    compute_fingerprint,
    get_end_of_text_id,
    get_vocab_size,
    tokenize_pieces,
)
from stackexp.data.verification import check_basename
from stackexp.errors import RunError, first_line
from stackexp.files import get_cache_root, hold_lock, read_json, sha256_of

log = logging.getLogger(__name__)

RETOKENIZE_TEXT = "tokenize its text with the model's tokenizer"
SAMPLES_PER_READ = 1024  # of an MDS set
SAFE_ENCODINGS = {"bytes", "str", "json", "int", "str_int", "str_float", "str_decimal", "pil", "jpeg", "png"}
SAFE_ENCODINGS |= {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
SAFE_ENCODINGS |= {"ndarray", "float16", "float32", "float64"}
"""Encodings of MDS columns whose decoders cannot run code; pkl can."""

Arrays = Iterator[np.ndarray]


def convert_text(path: Path, tokenizer: Tokenizer | None) -> TokenFile:
    """Return the token ids of a text or JSON Lines file, or of a folder of such files, tokenized like `data prepare`.

    End-of-text ends a document. Lines without a document are skipped with a warning. Raises RunError if a file is
    damaged or if there is no text.
    """
    return _convert_pieces(path, _hash_sources(path), lambda: _read_pieces(path), tokenizer)


def _hash_sources(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of the files in a folder."""
    if path.is_file():
        return sha256_of(path)
    names = [[source.name, sha256_of(Path(source.path))] for source in find_sources(path)]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def convert_mds(folder: Path, vocab_size: int, tokenizer: Tokenizer | None) -> TokenFile:
    """Return the token ids of a folder of MDS shards: the samples' column `tokens`, or their tokenized column `text`.

    Raises RunError if there is neither column, or if ids are outside the vocabulary.
    """
    column = _find_column(folder)
    digest = _hash_shards(folder)
    if column == "text":
        pieces = lambda: (Piece(sample["text"], True) for sample in _read_samples(folder))  # noqa: E731
        return _convert_pieces(folder, digest, pieces, tokenizer)
    fields = {"vocab_size": vocab_size, "source_sha256": digest, "tokenizer": UNKNOWN_TOKENIZER}
    return _convert(folder, [digest, vocab_size], lambda: _read_ids(folder, vocab_size), fields)


def _convert_pieces(
    path: Path, digest: str, pieces: Callable[[], Iterator[Piece]], tokenizer: Tokenizer | None
) -> TokenFile:
    if tokenizer is None:
        raise RunError(f"{path}: is text, but the model's tokenizer is unknown; set data.path to its training data")
    fingerprint = compute_fingerprint(tokenizer)
    fields = {
        "vocab_size": get_vocab_size(tokenizer),
        "tokenizer": fingerprint,
        "source_sha256": digest,
        "end_of_text": get_end_of_text_id(tokenizer),
    }
    return _convert(path, [digest, fingerprint], lambda: _tokenize(path, pieces(), tokenizer), fields)


def _convert(path: Path, key: list, tokens: Callable[[], Arrays], fields: dict[str, Any]) -> TokenFile:
    """Return the cached file for `key`, written from `tokens()` with the record `fields` if it is not complete."""
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    target = get_cache_root() / "sets" / f"{path.name.split('.')[0]}-{name}.npy"
    try:
        if (file := _open_complete(target)) is None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with hold_lock(target.with_suffix(".lock"), f"the conversion of {path}"):
                if (file := _open_complete(target)) is None:
                    write_token_file(target, tokens(), source=str(path), **fields)
                    file = TokenFile(target)
    except OSError as error:
        message = f"cannot write {target} ({error.strerror})"
        raise RunError(f"{message}; free space or set STACKEXP_CACHE to another folder") from error
    return file


def _open_complete(path: Path) -> TokenFile | None:
    """Open a token file that has a record and the recorded length."""
    try:
        file = TokenFile(path)
    except RunError:
        return None
    return file if file.record else None


def _read_pieces(path: Path) -> Iterator[Piece]:
    bad: list[BadLine] = []
    for source in find_sources(path):
        for piece in read_pieces(source):
            if isinstance(piece, BadLine):
                bad.append(piece)
            else:
                yield piece
    if bad:
        log.warning("%s: skipped %d lines without a document; the first: %s", path, len(bad), bad[0])


def _tokenize(path: Path, pieces: Iterator[Piece], tokenizer: Tokenizer) -> Arrays:
    is_empty = True
    for tokens in tokenize_pieces(pieces, tokenizer):
        yield tokens.ids
        is_empty = False
    if is_empty:
        raise RunError(f"{path}: contains no text; check the path")


# MDS shards that stackexp did not write


def _read_index(folder: Path) -> list[dict]:
    try:
        return read_json(folder / "index.json")["shards"]
    except (OSError, RunError, KeyError, TypeError) as error:
        raise RunError(f"{folder}/index.json: missing or corrupt; copy the folder again") from error


def _find_column(folder: Path) -> str:
    """Return "tokens" or "text". Raises RunError if there is neither column or the shards are compressed."""
    shards = _read_index(folder)
    columns = set.intersection(*(set(shard.get("column_names", ())) for shard in shards)) if shards else set()
    encodings = {str(encoding) for shard in shards for encoding in shard.get("column_encodings", ())}
    if unsafe := sorted(e for e in encodings if e.partition(":")[0] not in SAFE_ENCODINGS):
        raise RunError(f"{folder}: column encoding {unsafe[0]!r} may run code; write the shards again without it")
    if any(shard.get("zip_data") for shard in shards):
        raise RunError(f"{folder}: compressed shards; write them again with compression=None")
    for column in ("tokens", "text"):
        if column in columns:
            return column
    raise RunError(f"{folder}: MDS shards with the columns {sorted(columns)}; expected `tokens` or `text`")


def _hash_shards(folder: Path) -> str:
    """Return the SHA-256 over the index and all shards."""
    digest = hashlib.sha256((folder / "index.json").read_bytes())
    for shard in _read_index(folder):
        path = check_basename(folder, shard["raw_data"]["basename"])
        if not path.is_file() or path.stat().st_size != shard["raw_data"]["bytes"]:
            raise RunError(f"{path}: missing or not as long as index.json records; copy it again")
        digest.update(sha256_of(path).encode())
    return digest.hexdigest()


def _read_samples(folder: Path) -> Iterator[dict]:
    from streaming import LocalDataset  # the import takes seconds

    try:
        dataset = LocalDataset(str(folder))
        yield from (dataset[i] for i in range(len(dataset)))
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{folder}: cannot be read as MDS shards ({first_line(error)})") from error


def _read_ids(folder: Path, vocab_size: int) -> Arrays:
    samples, dtype, count = _read_samples(folder), None, 0
    while batch := list(itertools.islice(samples, SAMPLES_PER_READ)):
        values = [sample["tokens"] for sample in batch]
        dtype = dtype or _guess_dtype(folder, values, vocab_size)
        ids = np.concatenate([np.frombuffer(v, dtype) if isinstance(v, bytes) else np.ravel(v) for v in values])
        if ids.dtype.kind not in "ui":
            raise RunError(f"{folder}: `tokens` have the type {ids.dtype.name}; expected integer token ids")
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            outlier = ids.min() if ids.min() < 0 else ids.max()
            raise RunError(f"{folder}: token id {outlier:,}, but data.vocab_size is {vocab_size:,}; {RETOKENIZE_TEXT}")
        count += len(ids)
        yield ids
    if not count:
        raise RunError(f"{folder}: contains no tokens; check the path")


def _guess_dtype(folder: Path, values: list, vocab_size: int) -> np.dtype:
    """Return the widest integer type in which samples stored as bytes are ids of the vocabulary."""
    raw = [value for value in values if isinstance(value, bytes)]
    for dtype in map(np.dtype, ("<i8", "<i4", "<u2")):
        if all(len(value) % dtype.itemsize == 0 for value in raw):
            arrays = [np.frombuffer(value, dtype) for value in raw]
            if all(not len(a) or (a.min() >= 0 and a.max() < vocab_size) for a in arrays):
                return dtype
    raise RunError(f"{folder}: `tokens` are not integers below data.vocab_size {vocab_size:,}; {RETOKENIZE_TEXT}")
