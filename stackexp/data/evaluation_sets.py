"""Find named evaluation sets, and open each as token ids in chunks of the context length.

A path in data.validation or data.test is one set or a folder of sets:

    a folder written by `data prepare`      its sequences, concatenated
    .npy, .bin                              token ids, see data/token_files.py
    .jsonl[.gz, .zst], .parquet, .txt       tokenized once into the cache
    a folder of these                       the sets <name>/<stem>; a subfolder with a single set counts as that set
    a folder of .py, .md or .rst files      one set, a document per file

Sets are never fully loaded into memory. A file in the cache is named after a hash of its source and its tokenizer, so
it is never stale. It is written atomically under a lock, so only one of several processes converts.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from stackexp.config.data import DataConfig
from stackexp.data import olmo
from stackexp.data.path_checks import explain_missing_set, suggest_fetch
from stackexp.data.readers import BadLine, Piece, read_pieces
from stackexp.data.shards import TokenSet, verify_file
from stackexp.data.sources import COLUMN_SUFFIXES, TEXT_SUFFIXES, TOKEN_SUFFIXES, Source, find_sources
from stackexp.data.token_files import Chunks, TokenFile, open_complete, write_token_file
from stackexp.data.tokenizer import (
    UNKNOWN_TOKENIZER,
    KnownTokenizer,
    compute_fingerprint,
    decodes_exactly,
    get_end_of_text_id,
    get_vocab_size,
    has_exact_bytes,
    tokenize_pieces,
)
from stackexp.errors import RunError
from stackexp.files import CACHE_REMEDY, compute_sha256, explain_failed_writes, get_cache_root, hash_values, hold_lock

log = logging.getLogger(__name__)

SET_SUFFIXES = (*TOKEN_SUFFIXES, ".txt", ".text", *COLUMN_SUFFIXES)  # in a folder of sets; README.md is not a set
PREPARED_SET_FILES = ("corpus.json", "plan.json", "index.json")  # finished, in progress, incomplete


@dataclass(frozen=True)
class EvaluationSet:
    """An open evaluation set."""

    name: str
    path: Path
    chunks: Chunks
    bytes_per_token: float | None  # bytes of text; None if unknown
    has_exact_bytes: bool  # the bytes of its tokens add up to those of its text
    identity: str  # changes with the contents


class Concatenated:
    """The sequences of a prepared set as one array of token ids [N]; slices are read on demand."""

    def __init__(self, tokens: TokenSet):
        self.sequences, self.length = tokens, tokens.corpus.context_length

    def __len__(self) -> int:
        return len(self.sequences) * self.length

    def __getitem__(self, part: slice) -> np.ndarray:
        begin, end, _ = part.indices(len(self))
        first = begin // self.length
        rows = [self.sequences[i] for i in range(first, -(-end // self.length))]
        return np.concatenate(rows)[begin - first * self.length : end - first * self.length]


# Find sets


def find_sets(name: str, path: Path, *, warn_missing: bool = True) -> dict[str, Path]:
    """Return the sets at a path: {name: path}, or for a folder of sets {name/<stem>: path}.

    Logs a warning if sets of V2 or V3 are missing, because their averages need all of them, unless `warn_missing` is
    False. Raises RunError if there is no set.
    """
    if not path.exists():
        raise RunError(explain_missing_set(name, path))
    if path.is_file() or _is_set(path):
        return {name: path}
    found = _find_in_folder(name, path)
    if not found and _holds_documents(path):
        return {name: path}
    if not found:
        known = " ".join(SET_SUFFIXES)
        raise RunError(f"{path}: contains no sets; expected prepared sets or files with suffix {known}")
    if any(entry.name.lower().endswith((".py", ".rst")) for entry in path.iterdir()):
        log.warning("%s: its .py and .rst files are not scored; move them to a folder without other sets", path)
    missing = [n for n in olmo.NAMES.get(name, ()) if f"{name}/{n}" not in found]
    if missing and warn_missing:
        advice = suggest_fetch(name, path)
        log.warning("%s: %d sets are missing: %s; %s", name, len(missing), ", ".join(missing), advice)
    return found


def _find_in_folder(name: str, folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    without_sets: dict[str, Path] = {}
    for entry in sorted(folder.iterdir()):
        is_loop = entry.is_symlink() and entry.is_dir() and folder.resolve().is_relative_to(entry.resolve())
        if is_loop or entry.name.startswith("."):
            continue
        if not entry.name.isprintable():  # such as bytes that are not UTF-8
            raise RunError(f"{folder}: the name {entry.name!a} is not UTF-8 or has control characters; rename it")
        stem = f"{name}/{_remove_suffix(entry)}"
        if entry.is_dir() and not _is_set(entry):
            inside = _find_in_folder(stem, entry)
            if len(inside) == 1:  # such as 4chan/val.npy
                inside = dict.fromkeys([stem], *inside.values())
            elif not inside:
                without_sets[stem] = entry
        else:
            inside = {stem: entry} if entry.is_dir() or entry.name.lower().endswith(SET_SUFFIXES) else {}
        if duplicates := found.keys() & inside.keys():
            duplicate = min(duplicates)
            raise RunError(f"{folder}: {found[duplicate].name} and {entry.name} are both {duplicate}; rename one")
        found |= inside
    if found:  # otherwise the documents of all subfolders are one set
        found |= {stem: entry for stem, entry in without_sets.items() if _holds_documents(entry)}
    return found


def _holds_documents(folder: Path) -> bool:
    """Return True for a folder of documents such as .py and .md files, which together are one set."""
    try:
        return not any(source.has_tokens for source in find_sources(folder))
    except RunError:
        return False


def _is_set(folder: Path) -> bool:
    return any((folder / name).is_file() for name in PREPARED_SET_FILES)


def _remove_suffix(path: Path) -> str:
    suffixes = [] if path.is_dir() else [s for s in SET_SUFFIXES if path.name.lower().endswith(s)]
    return path.name[: -len(max(suffixes, key=len))] if suffixes else path.name


# Open a set


def open_set(name: str, path: Path, config: DataConfig, tokenizer: KnownTokenizer | None) -> EvaluationSet:
    """Open the set at `path` for a model with this tokenizer (None if unknown).

    Raises RunError if the set is missing or damaged, has ids outside the model's vocabulary, was made with another
    tokenizer, or is too short for one chunk.
    """
    tokens: Any  # an array or Concatenated
    bytes_per_token: float | None
    if _is_set(path):
        tokens, bytes_per_token, identity = _open_prepared(path, config, tokenizer)
    else:
        file = _open_tokens(path, config, tokenizer)
        verify_file(file.path, file.record.sha256 if file.record else None)
        _check_tokens(path, file, config, tokenizer)
        tokens, record = file.tokens, file.record
        bytes_per_token = record.text_bytes / record.tokens if record and record.text_bytes else None
        stat = file.path.stat()
        identity = record.sha256 if record else f"{stat.st_size} bytes of {stat.st_mtime_ns}"
    chunks = Chunks(tokens, config.context_length, config.score_remainder, config.max_chunks)
    if not len(chunks):
        message = f"{path}: {len(tokens)} tokens do not fill one chunk of data.context_length {config.context_length}"
        remedy = "lower it, or score them with data.score_remainder=true (--score-remainder)"
        raise RunError(f"{message}; {'use a longer text' if config.score_remainder else remedy}")
    is_exact = tokenizer is not None and (
        has_exact_bytes(tokenizer.tokenizer)
        or (bytes_per_token is None and decodes_exactly(tokenizer.tokenizer, tokens))  # exact for this set
    )
    return EvaluationSet(name, path, chunks, bytes_per_token, is_exact, identity)


def _open_prepared(path: Path, config: DataConfig, tokenizer: KnownTokenizer | None) -> tuple[Concatenated, float, str]:
    token_set = TokenSet(path, f"--tokenizer {tokenizer.path if tokenizer else 'TOKENIZER.json'}")
    corpus = token_set.corpus
    if tokenizer and tokenizer.differs_from(corpus.tokenizer):
        remedy = f"prepare it with --tokenizer {tokenizer.path}, or convert it with data retokenize"
        if path.resolve().is_relative_to(get_cache_root().resolve()):  # the corpus of this Python
            remedy = "this Python or its packages differ from those of the run; use the environment of the run"
        raise RunError(f"{path}: made with another tokenizer than {tokenizer.path.parent}; {remedy}")
    token_set.check_vocab_size(config.vocab_size)
    identity = compute_sha256(path / "index.json")  # includes the hashes of the shards
    return Concatenated(token_set), corpus.bytes / max(corpus.tokens, 1), identity


def _open_tokens(path: Path, config: DataConfig, tokenizer: KnownTokenizer | None) -> TokenFile:
    """Open the token file at `path`, or its converted copy in the cache."""
    name = path.name.lower()
    if not path.is_dir() and name.endswith(TOKEN_SUFFIXES):
        return TokenFile(path, vocab_size=tokenizer.vocab_size if tokenizer else config.vocab_size)
    if not path.is_dir() and not name.endswith(TEXT_SUFFIXES + COLUMN_SUFFIXES):
        known = " ".join(TOKEN_SUFFIXES + TEXT_SUFFIXES + COLUMN_SUFFIXES)
        raise RunError(f"{path}: unknown suffix; expected one of {known}")
    return convert_text(path, tokenizer and tokenizer.tokenizer)


def _check_tokens(path: Path, file: TokenFile, config: DataConfig, tokenizer: KnownTokenizer | None) -> None:
    target = tokenizer.path if tokenizer else "TOKENIZER.json"
    command = f"data retokenize {path} --to FOLDER --from ITS-TOKENIZER.json --tokenizer {target}"
    advice = f"convert it with: python -m stackexp {command}"
    recorded = file.record.tokenizer if file.record else UNKNOWN_TOKENIZER
    if tokenizer and tokenizer.differs_from(recorded):
        owner = "GPT-NeoX-20B" if recorded == olmo.TOKENIZER else "another tokenizer"
        raise RunError(f"{path}: contains token ids of {owner}, not of {target}; {advice}")
    if tokenizer and file.document_ends is not None:
        end = get_end_of_text_id(tokenizer.tokenizer, target)
        if (file.tokens[file.document_ends - 1] != end).any():  # `data prepare` would add it
            command = f"data prepare {path} --to FOLDER --tokenizer {target}"
            raise RunError(f"{path}: has documents without end-of-text; run: python -m stackexp {command}")
    limit = config.vocab_size
    if tokenizer and not tokenizer.is_neox:
        limit = min(limit, tokenizer.vocab_size)
    if not file.record or file.record.vocab_size > limit:
        for _ in file.read_blocks(limit, advice):
            pass


# Convert text


def convert_text(path: Path, tokenizer: Tokenizer | None) -> TokenFile:
    """Return the token ids of a text, JSON Lines or parquet file or a folder of these, tokenized like `data prepare`.

    End-of-text ends a document. Lines without a document are skipped with a warning. Raises RunError if a file is
    damaged or if there is no text.
    """
    sources = find_sources(path)
    if tokenizer is None:
        raise RunError(f"{path}: is text, but the model's tokenizer is unknown; set data.path to its training data")
    names = [[source.name, compute_sha256(Path(source.path))] for source in sources]  # the suffix is the format
    digest = hash_values(names)
    name = hash_values([digest, compute_fingerprint(tokenizer)])[:16]
    target = get_cache_root() / "sets" / f"{path.name.split('.')[0][:100]}-{name}.npy"
    with explain_failed_writes(target, CACHE_REMEDY):
        if (file := open_complete(target)) is None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with hold_lock(target.with_suffix(".lock"), f"the conversion of {path}"):
                if (file := open_complete(target)) is None:
                    _write_tokens(target, path, sources, digest, tokenizer)
                    file = TokenFile(target)
    if file.record and file.record.skipped_lines:
        skipped, first = file.record.skipped_lines, file.record.first_skipped
        log.warning("%s: skipped %d lines without a document; the first: %s", path, skipped, first)
    return file


def _write_tokens(target: Path, path: Path, sources: list[Source], digest: str, tokenizer: Tokenizer) -> None:
    """Tokenize the `sources` at `path`, whose hash is `digest`, to the token file `target`."""
    text_bytes, bad = 0, []

    def read() -> Iterator[Piece]:
        for piece in (piece for source in sources for piece in read_pieces(source)):
            if isinstance(piece, Piece):
                yield piece
            elif isinstance(piece, BadLine):
                bad.append(piece)

    def tokenize() -> Iterator[np.ndarray]:
        nonlocal text_bytes
        for block in tokenize_pieces(read(), tokenizer):
            text_bytes += block.bytes
            yield block.ids
        if bad and not text_bytes:
            raise RunError(f"{path}: no text can be read: {bad[0]}")

    write_token_file(
        target,
        tokenize(),
        vocab_size=get_vocab_size(tokenizer),
        counts=lambda: (
            {"text_bytes": text_bytes} | ({"skipped_lines": len(bad), "first_skipped": str(bad[0])} if bad else {})
        ),
        source=str(path),
        source_sha256=digest,
        tokenizer=compute_fingerprint(tokenizer),
        end_of_text=get_end_of_text_id(tokenizer),
    )
