"""Token files of one tokenizer -> token files of another: decoded document by document and encoded again."""

import codecs
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from stackexp.data.evaluation_sets import KnownTokenizer
from stackexp.data.locking import locked
from stackexp.data.readers import Piece, cut_into_pieces
from stackexp.data.sources import TOKEN_SUFFIXES
from stackexp.data.token_files import (
    REMEDY,
    FileRecord,
    TokenFile,
    count_of,
    find_end_of_text,
    sha256_of,
    write_record,
    write_token_file,
)
from stackexp.data.tokenizer import (
    compute_fingerprint,
    count_token_bytes,
    get_end_of_text_id,
    get_vocab_size,
    is_byte_level,
    tokenize_pieces,
)
from stackexp.errors import RunError

IDS_AT_ONCE = 1 << 18
NO_IDS = np.array([], np.int64)

Part = tuple[np.ndarray, bool]  # token ids [N] of a document, and whether they end it


@dataclass
class Counts:
    """What is counted of a file: bytes of its text, and those that the old tokens and the new ones stand for."""

    documents: int = 0
    replaced_documents: int = 0
    text_bytes: int = 0
    source_bytes: int = 0
    kept_bytes: int = 0

    def recorded(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("documents", "replaced_documents", "text_bytes")}


@dataclass(frozen=True)
class Retokenizer:
    """From one tokenizer to another. `end`: the id that ends a document, if it is not what the files say themselves."""

    known: KnownTokenizer
    new: Tokenizer
    end: int | None = None

    def retokenize(self, source: Path, folder: Path) -> dict[str, FileRecord]:
        """Re-encode the token file or the folder of them `source` into files of the same names; their records.

        A file that is there already, made of the same file with the same tokenizers, stays. Raises RunError if there
        is nothing to read, a file is damaged or not of the old tokenizer, or `folder` cannot be written.
        """
        files = find_token_files(source)
        inside = source.is_dir() and source.resolve() in (folder.resolve(), *folder.resolve().parents)
        if inside or source.resolve() == (folder / source.name).resolve():
            raise RunError(f"{folder}: holds the files to read themselves; choose another --to")
        tokens = {name: TokenFile(path) for name, path in files.items()}
        for file in tokens.values():
            self._check_tokenizer(file)
        ends = {name: self._end_of(file) for name, file in tokens.items()}
        self._remark_on(ends)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (
                locked(folder / ".lock", f"the re-encoding into {folder}"),
                tqdm(desc="re-encoding", total=sum(map(len, tokens.values())), unit="tok", unit_scale=True) as bar,
            ):
                return {name: self._file(file, ends[name], folder / name, bar) for name, file in tokens.items()}
        except OSError as e:
            raise RunError(
                f"{e.filename or folder}: cannot be written ({e.strerror or e}); make room or choose another --to, "
                "then run the same command again: finished files are kept"
            ) from e

    @property
    def old(self) -> Tokenizer:
        return self.known.tokenizer

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        return {"tokenizer": compute_fingerprint(self.new), "source_tokenizer": self.known.fingerprint}

    @cached_property
    def _known_ids(self) -> np.ndarray:
        """Which ids the old tokenizer has, [its vocab_size]."""
        known = np.zeros(self.known.vocab_size, bool)
        known[list(self.old.get_vocab(with_added_tokens=True).values())] = True
        return known

    @cached_property
    def _table(self) -> dict[int, bytes] | None:
        return _bytes_of_tokens(self.old) if is_byte_level(self.old) else None

    def _file(self, file: TokenFile, end: int, path: Path, bar: tqdm) -> FileRecord:
        digest = sha256_of(file.path)
        if file.record and file.record.sha256 != digest:
            raise RunError(f"{file.path}: not what its record says (another SHA-256); {REMEDY}")
        made_of = {**self._fingerprints, "source_sha256": digest, "source_end_of_text": end}
        if (record := _there(path, made_of)) is not None:
            bar.update(len(file))
            _say(f"{path}: already there")
            if not record.replaced_documents:
                self._complete(file, record.text_bytes)
            return record
        path.parent.mkdir(parents=True, exist_ok=True)
        counts = Counts()
        record = write_token_file(
            path,
            self.encoded(file, end, counts, bar.update),
            vocab_size=get_vocab_size(self.new),
            counts=counts.recorded,
            source=str(file.path.absolute()),
            end_of_text=get_end_of_text_id(self.new),
            **made_of,
        )
        if (lost := counts.text_bytes - counts.kept_bytes) > 0:
            _say(
                f"note: {path}: {lost:,} of {counts.text_bytes:,} bytes of text are not in its tokens: --tokenizer "
                "changes the text before it encodes it, or has no token for some of its characters"
            )
        self._complete(file, counts.source_bytes)
        return record

    def _check_tokenizer(self, file: TokenFile) -> None:
        if file.record and self.known.contradicts(file.record.tokenizer):
            raise RunError(
                f"{file.path}: token ids of another tokenizer ({file.record.tokenizer[:16]}) than {self.known.path}; "
                "give with --from the one that made them"
            )

    def _end_of(self, file: TokenFile) -> int:
        """The id that ends the documents of a file. Raises RunError if it was given and the file does not hold it."""
        end = self.end
        if end is None and file.record:
            end = file.record.end_of_text
        if end is None and self.known.is_neox:
            end = find_end_of_text(file.tokens)
        if end is None:
            end = get_end_of_text_id(self.old)
        if not count_of(file.tokens, end):
            if self.end is not None:
                raise RunError(f"{file.path}: holds no id {end}; --end-of-text is the id that ends its documents")
            _say(
                f"note: {file.path}: id {end}, which ends a document, is not in it: taken for one document; if another "
                "id ends them, give it with --end-of-text"
            )
        return end

    def _remark_on(self, ends: dict[str, int]) -> None:
        """Say which ids end documents though they are text to the tokenizer, as two spaces in OLMo's oldest files."""
        for end in sorted(set(ends.values()) - {self.end, get_end_of_text_id(self.old)}):
            if text := self.old.id_to_token(end):
                names = [name for name, of in ends.items() if of == end]
                _say(
                    f"note: id {end} ends the documents of {', '.join(names)}, but is also the tokenizer's {text!r}, "
                    "which ends one too wherever it stands; with --end-of-text another id ends them"
                )

    def encoded(
        self, file: TokenFile, end: int, counts: Counts, advance: Callable[[int], object]
    ) -> Iterator[np.ndarray]:
        """The new token ids of a file in parts, each document followed by the new tokenizer's end-of-text id.

        `end`: the id that ends a document of the file; `advance` is told of its ids as they are read.
        """
        table = count_token_bytes(self.new)
        table[get_end_of_text_id(self.new)] = 0  # also where it is no special token
        for tokens in tokenize_pieces(self._texts(self._checked(file, end, advance), counts), self.new):
            counts.text_bytes += tokens.bytes
            counts.kept_bytes += int(table[tokens.ids].sum())
            yield tokens.ids

    def _checked(self, file: TokenFile, end: int, advance: Callable[[int], object]) -> Iterator[Part]:
        """The documents of a file. Raises RunError for an id that the old tokenizer has not."""
        known = self._known_ids
        for first in range(0, len(file), IDS_AT_ONCE):
            ids = np.asarray(file.tokens[first : first + IDS_AT_ONCE])
            bad = (ids != end) & ~((ids >= 0) & (ids < len(known)) & known[np.clip(ids, 0, len(known) - 1)])
            if bad.any():
                at = int(bad.argmax())
                raise RunError(
                    f"{file.path}: id {ids[at]:,} at position {first + at:,} is not of the --from tokenizer, whose "
                    f"largest is {len(known) - 1:,}; give the tokenizer that made the file"
                )
            begin = 0
            for stop in np.flatnonzero(ids == end).tolist():
                yield ids[begin:stop], True
                begin = stop + 1
            if begin < len(ids):
                yield ids[begin:], False
            advance(len(ids))

    def _texts(self, parts: Iterator[Part], counts: Counts) -> Iterator[Piece]:
        """The documents' text in pieces (see readers.cut); the last does not end if the file ends within a document."""
        decode = _ByteLevel(self._table) if self._table else _WholeDocuments(self.old)
        ended = False

        def texts(part: Part | None) -> Iterator[str]:
            """Of the document that begins with `part`."""
            nonlocal ended
            while part:
                ids, ended = part
                yield decode(ids, ended)
                part = None if ended else next(parts, None)
            if not ended:
                yield decode(NO_IDS, True)

        for part in parts:
            for piece in cut_into_pieces(texts(part)):
                yield Piece(piece.text, piece.ends_document and ended)
            counts.documents += 1
            counts.replaced_documents += decode.replaced
            decode.replaced = False
        counts.source_bytes = decode.bytes

    def _complete(self, file: TokenFile, text_bytes: int) -> None:
        """Note the bytes of text, known now, in the record of the source too: bits per byte of either can be told.

        Not if the id that ends a document was given: it may not be the one whose bytes count as none.
        """
        if self.end is not None or file.record is None or file.record.text_bytes == text_bytes:
            return
        try:
            write_record(file.path, replace(file.record, text_bytes=text_bytes))
        except OSError as e:
            _say(f"note: the record of {file.path} stays without the bytes of its text ({e.strerror})")


class _ByteLevel:
    """Decodes ids of a byte-level tokenizer as they come, exactly. `replaced`: bytes of the document were no UTF-8."""

    def __init__(self, table: dict[int, bytes]):
        self.table = table
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.replaced, self.bytes = False, 0

    def __call__(self, ids: np.ndarray, ends: bool) -> str:
        data = b"".join(map(self.table.__getitem__, ids.tolist()))
        self.bytes += len(data)
        try:
            text = self.decoder.decode(data, ends)
        except UnicodeDecodeError:
            self.replaced, self.decoder.errors = True, "replace"
            text = self.decoder.decode(data, ends)
        if ends:
            self.decoder.reset()
            self.decoder.errors = "strict"
        return text


class _WholeDocuments:
    """Decodes with the tokenizer's own decoder, which takes a document at a time: it is held in memory whole.

    `replaced`: the document holds U+FFFD, whether its bytes were no UTF-8 or spelled just that.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.ids = tokenizer, []
        self.replaced, self.bytes = False, 0

    def __call__(self, ids: np.ndarray, ends: bool) -> str:
        self.ids += ids.tolist()
        if not ends:
            return ""
        text = self.tokenizer.decode(self.ids, skip_special_tokens=False)
        self.ids, self.replaced = [], "\ufffd" in text
        self.bytes += len(text.encode())
        return text


def _bytes_of_tokens(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The bytes that each id of a byte-level tokenizer stands for; an added token's are its content's."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    table = {}
    for token, index in vocabulary.items():
        in_alphabet = alphabet.keys() >= set(token)
        table[index] = bytes(map(alphabet.__getitem__, token)) if in_alphabet else token.encode()
    added = json.loads(tokenizer.to_str())["added_tokens"]
    return table | {token["id"]: token["content"].encode() for token in added}


def find_token_files(source: Path) -> dict[str, Path]:
    """The token files at `source`, a file or a folder: {name relative to the folder: path}. Raises RunError if none."""
    if source.is_file():
        return {source.name: source}
    if not source.is_dir():
        raise RunError(f"{source}: no such file or folder")
    found = {path.relative_to(source): path for path in sorted(source.rglob("*")) if path.suffix in TOKEN_SUFFIXES}
    files = {
        str(name): path
        for name, path in found.items()
        if path.is_file() and not any(part.startswith(".") for part in name.parts)
    }
    if not files:
        raise RunError(f"{source}: holds no token files; they end in {' or '.join(TOKEN_SUFFIXES)}")
    return files


def _there(path: Path, made_of: dict) -> FileRecord | None:
    """The record of a file that is whole and made of the same."""
    try:
        record = TokenFile(path).record
    except RunError:
        return None
    return record if record and made_of.items() <= asdict(record).items() else None


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)
