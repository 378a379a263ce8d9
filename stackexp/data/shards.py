"""The files of a prepared set: MDS shards of token sequences, index.json, tokenizer.json and corpus.json.

Each sample is one sequence of exactly `context_length` tokens in the column `tokens`: uint16, or uint32 for more than
65,536 token ids. The shards have the MDS format of mosaicml-streaming; see `stackexp.data.units`. They are read here,
because importing that library takes seconds.

A file is verified against its recorded SHA-256 on first use. A verified file leaves an empty mark in the cache, named
after its path, size, times and hash. It is hashed again only if one of these changes. The first use costs about 1
second per GB.
"""

import contextlib
import hashlib
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from stackexp.data.path_checks import explain_missing_dataset
from stackexp.data.tokenizer import compute_fingerprint, load_tokenizer
from stackexp.errors import RunError
from stackexp.files import build_record, compute_sha256, get_cache_root

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
SHARD_BYTES = 1 << 25
VOCAB_PADDING = 128  # vocabularies are often rounded up to a multiple of this


@dataclass
class Corpus:
    """The contents of corpus.json; tokens = sequences * context_length + dropped_tokens."""

    tokenizer: str  # fingerprint
    vocab_size: int
    context_length: int
    documents: int
    tokens: int  # including one end-of-text token per document
    bytes: int  # UTF-8 size of the text; 0 if that of any source is unknown
    sequences: int
    dropped_tokens: int  # too few at the end to fill a sequence
    bad_lines: int
    filtered_documents: int = 0  # do not satisfy the filters
    # Counted by best-fit packing only: documents in more than one sequence, and those that concatenation would cut
    cut_documents: int = 0
    cut_by_concatenation: int = 0
    sources: list[str] = field(default_factory=list)
    format_version: int = FORMAT_VERSION


class DamagedFileError(RunError):
    """Raised if the contents of a data file differ from its record."""


def verify_file(path: Path, sha256: str | None) -> None:
    """Raise DamagedFileError if the file does not have the hash `sha256`; None (no record) passes.

    Raises FileNotFoundError if the file is missing.
    """
    if sha256 is None:
        return
    status = path.stat()
    key = f"{path.resolve()}\n{status.st_size} {status.st_mtime_ns} {status.st_ino}\n{sha256}"
    mark = get_cache_root() / "verified" / hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    if mark.exists():
        return
    if compute_sha256(path) != sha256:
        raise DamagedFileError(
            f"{path}: damaged, its SHA-256 is not the recorded one; copy or fetch it again, or repair its folder as "
            "`data inspect` says"
        )
    with contextlib.suppress(OSError):  # without a cache, every process hashes the file
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def choose_token_dtype(vocab_size: int) -> np.dtype:
    """Return the type in which token ids are stored."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def describe_columns(dtype: np.dtype, context_length: int) -> dict[str, Any]:
    """Return the fields of MDS that all shards of a prepared set share."""
    return {
        "column_encodings": [f"ndarray:{dtype.name}:{context_length}"],
        "column_names": ["tokens"],
        "column_sizes": [context_length * dtype.itemsize],
        "compression": None,
        "format": "mds",
        "hashes": ["sha256"],
        "size_limit": SHARD_BYTES,
        "version": 2,
    }


class TokenSet:
    """A prepared set opened for reading: `token_set[i]` is sequence i, token ids [T], read from disk on demand.

    `options` completes the `data prepare` command in the error for a missing set. With `cache`, the folder is the cache
    of a remote set and may lack shards, which are downloaded later.

    Raises:
        RunError: The folder is missing, incomplete or of another format, or shards are missing or cut short.
    """

    def __init__(self, folder: str | Path, options: str = "--vocab-size N", cache: bool = False) -> None:
        self.folder = Path(folder)
        self.corpus = self._read_corpus(options)
        try:
            shards = json.loads((self.folder / "index.json").read_text(encoding="utf-8"))["shards"]
            self.entries = [shard["raw_data"] for shard in shards]  # name, size and hash of each file
            self.files = [
                (_check_basename(self.folder, entry["basename"]), shard["samples"])
                for entry, shard in zip(self.entries, shards, strict=True)
            ]
            self._hashes = [entry["hashes"]["sha256"] for entry in self.entries]
            if not all(map(self._has_format, shards)):
                raise ValueError("a shard of another format")
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise RunError(f"{self.folder}/index.json: missing or corrupt; prepare the set again") from e
        for (path, _), entry in zip(self.files, self.entries, strict=True):
            if not cache and not (path.is_file() and path.stat().st_size == entry["bytes"]):
                raise RunError(f"{path}: missing or not as long as index.json records; prepare the set again")
        self.begins = np.cumsum([0] + [samples for _, samples in self.files])
        if self.begins[-1] != self.corpus.sequences:
            raise RunError(f"{self.folder}: index.json and corpus.json disagree; prepare the set again")
        self._maps: dict[int, np.ndarray] = {}

    def _has_format(self, shard: dict[str, Any]) -> bool:
        """Return True if an entry of index.json describes sequences of this corpus, in a file that can hold them."""
        columns = describe_columns(choose_token_dtype(self.corpus.vocab_size), self.corpus.context_length)
        expected = columns | {"size_limit": shard["size_limit"], "zip_data": None}
        described = {key: value for key, value in shard.items() if key not in ("raw_data", "samples")}
        samples, size = shard["samples"], shard["raw_data"]["bytes"]
        has_room = type(samples) is type(size) is int and 0 <= columns["column_sizes"][0] * samples <= size
        return described == expected and has_room

    def _read_corpus(self, options: str) -> Corpus:
        path = self.folder / "corpus.json"
        if not path.is_file():
            raise RunError(explain_missing_dataset(self.folder, options))
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            version = record["format_version"]
            if version != FORMAT_VERSION:
                raise RunError(f"{path}: format {version}, expected {FORMAT_VERSION}; prepare the set again")
            return build_record(Corpus, record)
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise RunError(f"{path}: corrupt; prepare the set again") from e

    def check_vocab_size(self, limit: int) -> None:
        """Raise RunError if the set has more token ids than data.vocab_size, `limit`; warn if it has far fewer."""
        size = self.corpus.vocab_size
        message = f"{self.folder}: its tokenizer has {size} tokens, but data.vocab_size is {limit}"
        if size > limit:
            raise RunError(f"{message}; set data.vocab_size={size}")
        if limit >= size + VOCAB_PADDING:
            log.warning("%s, so %d token ids are never trained; set data.vocab_size=%d", message, limit - size, size)

    def load_tokenizer(self) -> Tokenizer:
        """Load the set's tokenizer. Raises RunError if tokenizer.json is not the one named in corpus.json."""
        tokenizer = load_tokenizer(self.folder / "tokenizer.json")
        if compute_fingerprint(tokenizer) != self.corpus.tokenizer:
            raise RunError(
                f"{self.folder}/tokenizer.json: not the tokenizer the set was made with; prepare the set again"
            )
        return tokenizer

    def __len__(self) -> int:
        return int(self.begins[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = int(np.searchsorted(self.begins, index, side="right")) - 1
        if shard not in self._maps:
            self._maps[shard] = self.map_shard(shard)
        return self._maps[shard][index - self.begins[shard]]

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_maps": {}}

    def map_shard(self, shard: int) -> np.ndarray:
        """Return the memory-mapped samples of a shard, [N, T], which are the last part of its file.

        Raises DamagedFileError if the file does not have the hash that index.json records.
        """
        path, samples = self.files[shard]
        verify_file(path, self._hashes[shard])
        shape = (samples, self.corpus.context_length)
        dtype = choose_token_dtype(self.corpus.vocab_size)
        return np.memmap(path, dtype, "r", os.path.getsize(path) - samples * shape[1] * dtype.itemsize, shape)


def _check_basename(folder: Path, name: object) -> Path:
    """Return the path of the file `name` of an index.json. Raises RunError if it is outside of `folder`."""
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise RunError(f"{folder}/index.json: the shard name {name!r} is outside the folder; prepare the set again")
    return folder / name
