"""Convert evaluation sets of text or MDS shards to token files in the cache, once.

A cached file is named after a hash of its source and its tokenizer, so it is never stale. It is written atomically
under a lock, so only one of several processes converts.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from stackexp.data.mds import find_column, hash_shards, read_column, read_ids, read_index
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
from stackexp.data.verification import verify_file
from stackexp.errors import RunError
from stackexp.files import compute_sha256, get_cache_root, hold_lock

log = logging.getLogger(__name__)


def convert_text(path: Path, tokenizer: Tokenizer | None) -> TokenFile:
    """Return the token ids of a text, JSON Lines or parquet file or a folder of these, tokenized like `data prepare`.

    End-of-text ends a document. Lines without a document are skipped with a warning. Raises RunError if a file is
    damaged or if there is no text.
    """
    sources = find_sources(path)
    names = [[source.name, compute_sha256(Path(source.path))] for source in sources]  # the suffix is the format
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()

    def read() -> Iterator[Piece]:
        bad: list[BadLine] = []
        for piece in (piece for source in sources for piece in read_pieces(source)):
            if isinstance(piece, Piece):
                yield piece
            elif isinstance(piece, BadLine):
                bad.append(piece)
        if bad:
            log.warning("%s: skipped %d lines without a document; the first: %s", path, len(bad), bad[0])

    return _convert_pieces(path, digest, read, tokenizer)


def convert_mds(folder: Path, vocab_size: int, tokenizer: Tokenizer | None) -> TokenFile:
    """Return the token ids of a folder of MDS shards: the samples' column `tokens`, or their tokenized column `text`.

    Raises RunError if there is neither column, or if ids are outside the vocabulary.
    """
    shards = read_index(folder)
    column, digest = find_column(folder, shards), hash_shards(folder, shards)
    if column == "text":
        pieces = lambda: (Piece(text, True) for text in read_column(folder, "text"))  # noqa: E731
        return _convert_pieces(folder, digest, pieces, tokenizer)
    fields = {"vocab_size": vocab_size, "source_sha256": digest, "tokenizer": UNKNOWN_TOKENIZER}
    return _convert(folder, [digest, vocab_size], lambda: read_ids(folder, vocab_size), fields)


def _convert_pieces(
    path: Path, digest: str, read: Callable[[], Iterator[Piece]], tokenizer: Tokenizer | None
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
    text_bytes = 0

    def tokenize() -> Iterator[np.ndarray]:
        nonlocal text_bytes
        for block in tokenize_pieces(read(), tokenizer):
            text_bytes += block.bytes
            yield block.ids

    return _convert(
        path, [digest, fingerprint, "with text_bytes"], tokenize, fields, lambda: {"text_bytes": text_bytes}
    )


def _convert(
    path: Path,
    key: list,
    tokens: Callable[[], Iterator[np.ndarray]],
    fields: dict[str, Any],
    counts: Callable[[], dict[str, Any]] = dict,
) -> TokenFile:
    """Return the cached file for `key`, written from `tokens()` with the record `fields` if it is not complete."""
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    target = get_cache_root() / "sets" / f"{path.name.split('.')[0]}-{name}.npy"
    try:
        if (file := _open_complete(target)) is None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with hold_lock(target.with_suffix(".lock"), f"the conversion of {path}"):
                if (file := _open_complete(target)) is None:
                    write_token_file(target, tokens(), source=str(path), counts=counts, **fields)
                    file = TokenFile(target)
    except OSError as error:
        message = f"cannot write {target} ({error.strerror})"
        raise RunError(f"{message}; free space or set STACKEXP_CACHE to another folder") from error
    return file


def _open_complete(path: Path) -> TokenFile | None:
    """Open a token file that has a record and the recorded length."""
    try:
        file = TokenFile(path)
        verify_file(path, file.record.sha256 if file.record else None)
    except RunError:
        return None
    return file if file.record else None
