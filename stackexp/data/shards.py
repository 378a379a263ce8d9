"""A prepared set on disk: MDS shards of token sequences, their index.json, tokenizer.json and corpus.json.

Every sample is one sequence of exactly `context_length` tokens, column `tokens`, uint16 (uint32 above 65,536
tokens). The files are mosaicml-streaming's MDS; writing them takes a page and saves importing the library (5 s).
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from tokenizers import Tokenizer

from stackexp.data.tokenizer import compute_fingerprint, load_tokenizer
from stackexp.errors import RunError

FORMAT_VERSION = 1
SHARD_BYTES = 1 << 25  # of tokens in one shard


@dataclass
class Corpus:
    """What corpus.json records of a prepared set. `tokens` = sequences * context_length + dropped_tokens."""

    tokenizer: str  # fingerprint
    vocab_size: int
    context_length: int
    documents: int
    tokens: int  # with one end-of-text token per document
    bytes: int  # of the documents' text in UTF-8
    sequences: int
    dropped_tokens: int  # the end of the last documents, too short for a sequence
    bad_lines: int
    sources: list[str] = field(default_factory=list)
    format_version: int = FORMAT_VERSION


def token_dtype(vocab_size: int) -> np.dtype:
    """The type that token ids are stored as."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: it is whole and on the disk, or as it was."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        sync(file)
    temporary.replace(path)


def write_json(path: Path, value: object) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def sync(file: IO) -> None:
    """Wait until the disk has what was written."""
    file.flush()
    os.fsync(file.fileno())


def write_shard(path: Path, sequences: np.ndarray) -> dict:
    """Write sequences [N, T] as one MDS shard; its entry for index.json is returned.

    Layout: N (uint32), N + 1 offsets (uint32), the JSON of the columns, the samples.
    """
    samples, length = sequences.shape
    columns = {
        "column_encodings": [f"ndarray:{sequences.dtype.name}:{length}"],
        "column_names": ["tokens"],
        "column_sizes": [length * sequences.dtype.itemsize],
        "compression": None,
        "format": "mds",
        "hashes": ["sha256"],
        "size_limit": SHARD_BYTES,
        "version": 2,
    }
    header = json.dumps(columns, sort_keys=True).encode()
    begin = 4 + 4 * (samples + 1) + len(header)
    offsets = begin + np.arange(samples + 1) * columns["column_sizes"][0]
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for part in (np.uint32(samples), offsets.astype(np.uint32), header, np.ascontiguousarray(sequences)):
            file.write(part)
            digest.update(part)
        sync(file)
    raw = {"basename": path.name, "bytes": int(offsets[-1]), "hashes": {"sha256": digest.hexdigest()}}
    return columns | {"raw_data": raw, "samples": samples, "zip_data": None}


class ShardWriter:
    """Cut a stream of tokens into sequences and write them as shards into `folder`."""

    def __init__(self, folder: Path, context_length: int, dtype: np.dtype):
        self.folder, self.context_length, self.dtype = folder, context_length, dtype
        self.shards: list[dict] = []
        self.full = max(1, SHARD_BYTES // (context_length * dtype.itemsize)) * context_length
        self.buffer = np.empty(self.full, dtype)
        self.filled = 0

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens [N]."""
        while len(tokens):
            part = tokens[: self.full - self.filled]
            self.buffer[self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            tokens = tokens[len(part) :]
            if self.filled == self.full:
                self._flush()

    def close(self) -> np.ndarray:
        """Write the last sequences and return the tokens left over, fewer than context_length."""
        self._flush()
        return self.buffer[: self.filled].copy()

    def _flush(self) -> None:
        count, rest = divmod(self.filled, self.context_length)
        whole = count * self.context_length
        if count:
            path = self.folder / f"shard.{len(self.shards):05}.mds"
            self.shards.append(write_shard(path, self.buffer[:whole].reshape(count, self.context_length)))
        self.buffer[:rest] = self.buffer[whole : self.filled]
        self.filled = rest


def in_folder(shards: list[dict], name: str) -> list[dict]:
    """Index entries of shards that lie in the sub-folder `name`."""
    return [s | {"raw_data": s["raw_data"] | {"basename": f"{name}/{s['raw_data']['basename']}"}} for s in shards]


def write_metadata(folder: Path, corpus: Corpus, shards: list[dict], tokenizer: Tokenizer) -> None:
    """Write what makes shards a prepared set; corpus.json comes last: its presence means done."""
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    write_json(folder / "index.json", {"version": 2, "shards": shards})
    write_json(folder / "corpus.json", asdict(corpus))


class TokenSet:
    """A prepared set, opened: `set[i]` is sequence i, [T] of token ids, read from disk on demand.

    Raises RunError if the folder is missing, unfinished, of another format, or its shards are not whole; it names the
    command that makes the set, with `options`. The folder may be the `cache` of a set elsewhere: its shards come when
    they are needed.
    """

    def __init__(self, folder: str | Path, options: str = "--vocab-size N", cache: bool = False):
        self.folder = Path(folder)
        self.corpus = self._read_corpus(options)
        try:
            shards = json.loads((self.folder / "index.json").read_text(encoding="utf-8"))["shards"]
            self.files = [(self.folder / s["raw_data"]["basename"], s["samples"]) for s in shards]
            broken = [path for (path, _), s in zip(self.files, shards, strict=True) if not (cache or _whole(path, s))]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise RunError(f"{self.folder}/index.json: missing or corrupt; prepare the set again") from e
        if broken:
            raise RunError(f"{broken[0]}: missing or not as long as index.json says; prepare the set again")
        self.begins = np.cumsum([0] + [samples for _, samples in self.files])
        if self.begins[-1] != self.corpus.sequences:
            raise RunError(f"{self.folder}: index.json and corpus.json do not agree; prepare the set again")
        self._maps: dict[int, np.ndarray] = {}

    def _read_corpus(self, options: str) -> Corpus:
        path = self.folder / "corpus.json"
        if not path.is_file():
            state = "holds no finished set" if self.folder.is_dir() else "no such folder"
            command = f"stackexp data prepare SOURCE --to {self.folder} {options}"
            raise RunError(f"{self.folder}: {state}; make one with: {command}")
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["format_version"] != FORMAT_VERSION:
                raise RunError(
                    f"{path}: format {record['format_version']}, not {FORMAT_VERSION}; prepare the set again"
                )
            return Corpus(**record)
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise RunError(f"{path}: corrupt; prepare the set again") from e

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the set. Raises RunError if tokenizer.json is not the one corpus.json names."""
        tokenizer = load_tokenizer(self.folder / "tokenizer.json")
        if compute_fingerprint(tokenizer) != self.corpus.tokenizer:
            raise RunError(f"{self.folder}/tokenizer.json: not the tokenizer the set was made with; prepare it again")
        return tokenizer

    def __len__(self) -> int:
        return int(self.begins[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = int(np.searchsorted(self.begins, index, side="right")) - 1
        if shard not in self._maps:
            self._maps[shard] = self._map(shard)
        return self._maps[shard][index - self.begins[shard]]

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_maps": {}}

    def _map(self, shard: int) -> np.ndarray:
        """The samples of a shard, [N, T]: they are the end of its file."""
        path, samples = self.files[shard]
        shape = (samples, self.corpus.context_length)
        dtype = token_dtype(self.corpus.vocab_size)
        return np.memmap(path, dtype, "r", os.path.getsize(path) - samples * shape[1] * dtype.itemsize, shape)


def _whole(path: Path, entry: dict) -> bool:
    return path.is_file() and path.stat().st_size == entry["raw_data"]["bytes"]
