"""Sets to validate on that are no token files yet: read once, into token files in the cache.

A file of the cache is named after the content it was made of and the tokenizer, so it is never stale. It appears whole
or not at all; of two processes that need it one waits.
"""

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from stackexp.data.locking import locked
from stackexp.data.readers import BadLine, Piece, read_pieces
from stackexp.data.sources import find_sources
from stackexp.data.stdlib import get_cache_root
from stackexp.data.token_files import TokenFile, sha256_of, write_token_file
from stackexp.data.tokenizer import compute_fingerprint, get_end_of_text_id, get_vocab_size, tokenize_pieces
from stackexp.errors import RunError, first_line

log = logging.getLogger(__name__)

UNKNOWN = "unknown"  # the tokenizer in the record of ids that came without one
Ids = Iterator[np.ndarray]
RE_ENCODE = "re-encode its text with the model's tokenizer"
SAMPLES = 1024  # of an MDS set read at a time


def text_tokens(path: Path, tokenizer: Tokenizer | None) -> TokenFile:
    """The documents of a file of text or JSON lines as `data prepare` tokenises them: each ends with end-of-text.

    Raises RunError if the file is damaged or holds no text; lines that hold no document are left out with a warning.
    """
    return _cached_text(path, sha256_of(path), lambda: _pieces(path), tokenizer)


def mds_tokens(folder: Path, size: int, tokenizer: Tokenizer | None) -> TokenFile:
    """A folder of MDS shards, its samples one after the other: their `tokens`, or their `text` tokenised.

    `size` of the vocabulary. Raises RunError if neither column is there, or ids lie outside the vocabulary.
    """
    column = _column(folder)
    digest = _digest(folder)
    if column == "text":
        return _cached_text(folder, digest, lambda: (Piece(s["text"], True) for s in _samples(folder)), tokenizer)
    source = {"source_sha256": digest, "tokenizer": UNKNOWN}
    return _cached(folder, [digest, size], lambda: _ids(folder, size), size, source)


def _cached_text(
    path: Path, digest: str, pieces: Callable[[], Iterator[Piece]], tokenizer: Tokenizer | None
) -> TokenFile:
    if tokenizer is None:
        raise RunError(f"{path}: text, but the model's tokenizer is not known; set data.path to what it was trained on")
    whose = compute_fingerprint(tokenizer)
    source = {"tokenizer": whose, "source_sha256": digest, "end_of_text": get_end_of_text_id(tokenizer)}
    ids = lambda: _tokenised(path, pieces(), tokenizer)  # noqa: E731
    return _cached(path, [digest, whose], ids, get_vocab_size(tokenizer), source)


def _cached(path: Path, key: list, tokens: Callable[[], Ids], size: int, source: dict) -> TokenFile:
    """The file of the cache under `key`, made of `tokens()` if it is not there or not whole."""
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    target = get_cache_root() / "sets" / f"{path.name.split('.')[0]}-{name}.npy"
    try:
        if (found := _whole(target)) is None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with locked(target.with_suffix(".lock"), f"the reading of {path}"):
                if (found := _whole(target)) is None:
                    write_token_file(target, tokens(), vocab_size=size, source=str(path), **source)
                    found = TokenFile(target)
    except OSError as e:
        where = f"{target} ({e.strerror})"
        raise RunError(f"cannot write {where}; free space or set STACKEXP_CACHE to another folder") from e
    return found


def _whole(path: Path) -> TokenFile | None:
    """The token file if it is there with its record, and as long as that says."""
    try:
        file = TokenFile(path)
    except RunError:
        return None
    return file if file.record else None


def _pieces(path: Path) -> Iterator[Piece]:
    bad: list[BadLine] = []
    [source] = find_sources(path)
    for piece in read_pieces(source):
        if isinstance(piece, BadLine):
            bad.append(piece)
        else:
            yield piece
    if bad:
        log.warning("%s: %d lines hold no document and are left out; the first: %s", path, len(bad), bad[0])


def _tokenised(path: Path, pieces: Iterator[Piece], tokenizer: Tokenizer) -> Ids:
    empty = True
    for tokens in tokenize_pieces(pieces, tokenizer):
        yield tokens.ids
        empty = False
    if empty:
        raise RunError(f"{path}: no text in it")


# Other people's MDS shards


def _index(folder: Path) -> list[dict]:
    try:
        return json.loads((folder / "index.json").read_text(encoding="utf-8"))["shards"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise RunError(f"{folder}/index.json: missing or corrupt; copy the folder again") from e


def _column(folder: Path) -> str:
    """Which column is read. Raises RunError if there is none that is known, or the shards are compressed."""
    shards = _index(folder)
    columns = set.intersection(*(set(shard.get("column_names", ())) for shard in shards)) if shards else set()
    if any(shard.get("zip_data") for shard in shards):
        raise RunError(f"{folder}: compressed shards; write them again with compression=None")
    for column in ("tokens", "text"):
        if column in columns:
            return column
    raise RunError(f"{folder}: MDS shards with the columns {sorted(columns)}; expected `tokens` or `text`")


def _digest(folder: Path) -> str:
    """sha256 of the index and of every shard."""
    digest = hashlib.sha256((folder / "index.json").read_bytes())
    for shard in _index(folder):
        path = folder / shard["raw_data"]["basename"]
        if not path.is_file() or path.stat().st_size != shard["raw_data"]["bytes"]:
            raise RunError(f"{path}: missing or not as long as index.json records; copy it again")
        digest.update(sha256_of(path).encode())
    return digest.hexdigest()


def _samples(folder: Path) -> Iterator[dict]:
    from streaming import LocalDataset  # takes seconds

    try:
        dataset = LocalDataset(str(folder))
        yield from (dataset[i] for i in range(len(dataset)))
    except (OSError, ValueError, KeyError) as e:
        raise RunError(f"{folder}: cannot be read as MDS shards ({first_line(e)})") from e


def _ids(folder: Path, size: int) -> Ids:
    samples, dtype, count = _samples(folder), None, 0
    while batch := list(itertools.islice(samples, SAMPLES)):
        values = [sample["tokens"] for sample in batch]
        dtype = dtype or _dtype(folder, values, size)
        ids = np.concatenate([np.frombuffer(v, dtype) if isinstance(v, bytes) else np.ravel(v) for v in values])
        if ids.dtype.kind not in "ui":
            raise RunError(f"{folder}: `tokens` are {ids.dtype.name}, no token ids")
        if len(ids) and not 0 <= ids.min() <= ids.max() < size:
            outside = ids.min() if ids.min() < 0 else ids.max()
            raise RunError(f"{folder}: token id {outside:,}, but data.vocab_size is {size:,}; {RE_ENCODE}")
        count += len(ids)
        yield ids
    if not count:
        raise RunError(f"{folder}: no tokens in it")


def _dtype(folder: Path, values: list, size: int) -> np.dtype:
    """Of ids stored as plain bytes: the widest integer in which all of the first samples are ids of the vocabulary."""
    raw = [value for value in values if isinstance(value, bytes)]
    for dtype in map(np.dtype, ("<i8", "<i4", "<u2")):
        if all(len(v) % dtype.itemsize == 0 for v in raw):
            arrays = [np.frombuffer(v, dtype) for v in raw]
            if all(not len(a) or (a.min() >= 0 and a.max() < size) for a in arrays):
                return dtype
    raise RunError(f"{folder}: `tokens` are no integers below data.vocab_size {size:,}; {RE_ENCODE}")
