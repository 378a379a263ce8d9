"""Token files of one tokenizer -> token files of another: decoded document by document and encoded again."""

import codecs
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from stackexp.data import olmo
from stackexp.data.locking import locked
from stackexp.data.readers import PIECE, Piece
from stackexp.data.token_files import FileRecord, TokenFile, sha256_of, write_record, write_token_file
from stackexp.data.tokenizer import end_of_text, fingerprint, is_byte_level, vocab_size
from stackexp.errors import RunError

SUFFIXES = (".npy", ".bin")
IDS_AT_ONCE = 1 << 18
BATCH_PIECES, BATCH_CHARACTERS = 1024, 1 << 21  # limits of what is encoded at once

Part = tuple[np.ndarray, bool]  # token ids [N] of a document, and whether they end it


@dataclass
class Counts:
    """What is counted of a file; `text_bytes` of the new file, `source_bytes` of what the old tokens stand for."""

    documents: int = 0
    text_bytes: int = 0
    source_bytes: int = 0
    replaced_documents: int = 0


@dataclass(frozen=True)
class Retokenizer:
    """From one tokenizer to another. `end`: the id that ends a document, if it is not what the files say themselves."""

    old: Tokenizer
    new: Tokenizer
    end: int | None = None

    def retokenize(self, source: Path, folder: Path, progress: bool = True) -> dict[str, FileRecord]:
        """Re-encode the token file or the folder of them `source` into files of the same names; their records.

        A file that is there already, made of the same file with the same tokenizers, stays. Raises RunError if there
        is nothing to read, an id is not of the old tokenizer, or `folder` cannot be written.
        """
        files = find_token_files(source)
        inside = source.is_dir() and source.resolve() in (folder.resolve(), *folder.resolve().parents)
        if inside or source.resolve() == (folder / source.name).resolve():
            raise RunError(f"{folder}: holds the files to read themselves; choose another --to")
        tokens = {name: TokenFile(path) for name, path in files.items()}
        ends = {name: self._end_of(file) for name, file in tokens.items()}
        self._remark_on(ends)
        total = sum(map(len, tokens.values()))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (
                locked(folder / ".lock", f"the re-encoding into {folder}"),
                tqdm(desc="re-encoding", total=total, unit="tok", unit_scale=True, disable=not progress) as bar,
            ):
                return {name: self._file(file, ends[name], folder / name, bar) for name, file in tokens.items()}
        except OSError as e:
            raise RunError(
                f"{e.filename or folder}: cannot be written ({e.strerror or e}); make room or choose another --to, "
                "then run the same command again: finished files are kept"
            ) from e

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        return {"tokenizer": fingerprint(self.new), "source_tokenizer": fingerprint(self.old)}

    @cached_property
    def _known(self) -> np.ndarray:
        """Which ids the old tokenizer has, [its vocab_size]."""
        known = np.zeros(vocab_size(self.old), bool)
        known[list(self.old.get_vocab(with_added_tokens=True).values())] = True
        return known

    @cached_property
    def _table(self) -> dict[int, bytes] | None:
        return _bytes_of_tokens(self.old) if is_byte_level(self.old) else None

    def _file(self, file: TokenFile, end: int, path: Path, bar: tqdm) -> FileRecord:
        made_of = {
            **self._fingerprints,
            "source_sha256": file.record.sha256 if file.record else sha256_of(file.path),
            "source_end_of_text": end,
        }
        if (record := _there(path, made_of)) is not None:
            bar.update(len(file))
            tqdm.write(f"{path}: already there", file=sys.stderr)
            if not record.replaced_documents:
                _complete(file, record.text_bytes)
            return record
        path.parent.mkdir(parents=True, exist_ok=True)
        counts = Counts()
        parts = self._checked(file, end, bar.update)
        record = write_token_file(
            path,
            self._encoded(self._texts(parts, counts), counts),
            vocab_size=vocab_size(self.new),
            counts=lambda: {name: n for name, n in asdict(counts).items() if name != "source_bytes"},
            source=str(file.path.absolute()),
            end_of_text=end_of_text(self.new),
            **made_of,
        )
        _complete(file, counts.source_bytes)
        return record

    def _end_of(self, file: TokenFile) -> int:
        """The id that ends the documents of a file."""
        if self.end is not None:
            return self.end
        own = end_of_text(self.old)
        if file.record and file.record.end_of_text is not None:
            found = file.record.end_of_text
        else:
            neox = own == 0 and olmo.END_OF_TEXT[1] < len(self._known) <= olmo.EMBEDDING_SIZE
            found = olmo.find_end_of_text(file.tokens, (own, *olmo.END_OF_TEXT) if neox else (own,))
        return own if found is None else found

    def _remark_on(self, ends: dict[str, int]) -> None:
        """Say which ids end documents though they are text to the tokenizer, as two spaces in OLMo's oldest files."""
        for end in sorted(set(ends.values()) - {self.end, end_of_text(self.old)}):
            if text := self.old.id_to_token(end):
                names = [name for name, of in ends.items() if of == end]
                tqdm.write(
                    f"note: id {end} ends the documents of {', '.join(names)}, but is also the tokenizer's {text!r}, "
                    "which ends one too wherever it stands; with --end-of-text another id ends them",
                    file=sys.stderr,
                )

    def _checked(self, file: TokenFile, end: int, advance: Callable[[int], object]) -> Iterator[Part]:
        """The documents of a file. Raises RunError for an id that the old tokenizer has not."""
        known = self._known
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
        """The documents' text in pieces of at most PIECE characters, cut after a newline where there is one.

        The last piece does not end if the file ends within a document.
        """
        decode = _ByteLevel(self._table) if self._table else _WholeDocuments(self.old)
        text, opened = "", False
        for ids, ends in itertools.chain(parts, [(np.array([], np.int64), None)]):
            opened |= len(ids) > 0
            text += decode(ids, ends is not False)
            while len(text) > PIECE:
                cut = text.rfind("\n", 0, PIECE) + 1 or PIECE
                yield Piece(text[:cut], False)
                text = text[cut:]
            if ends or (ends is None and opened):
                yield Piece(text, bool(ends))
                counts.documents += 1
                counts.replaced_documents += decode.replaced
                text, opened, decode.replaced = "", False, False
        counts.source_bytes = decode.bytes

    def _encoded(self, pieces: Iterator[Piece], counts: Counts) -> Iterator[np.ndarray]:
        """Token ids of the pieces in batches, each document followed by the new tokenizer's end-of-text id."""
        end = end_of_text(self.new)
        for batch in _batches(pieces):
            encodings = self.new.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
            ids: list[int] = []
            for piece, encoding in zip(batch, encodings, strict=True):
                ids += encoding.ids
                if piece.ends:
                    ids.append(end)
            counts.text_bytes += sum(len(piece.text.encode()) for piece in batch)
            yield np.array(ids, np.int64)


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
    found = {path.relative_to(source): path for path in sorted(source.rglob("*")) if path.suffix in SUFFIXES}
    files = {
        str(name): path
        for name, path in found.items()
        if path.is_file() and not any(part.startswith(".") for part in name.parts)
    }
    if not files:
        raise RunError(f"{source}: holds no token files; they end in {' or '.join(SUFFIXES)}")
    return files


def _there(path: Path, made_of: dict) -> FileRecord | None:
    """The record of a file that is whole and made of the same."""
    try:
        record = TokenFile(path).record
    except RunError:
        return None
    return record if record and made_of.items() <= asdict(record).items() else None


def _complete(file: TokenFile, text_bytes: int) -> None:
    """Note the bytes of text, known now, in the record of the source too: bits per byte of either can be told."""
    if file.record is None or file.record.text_bytes is not None:
        return
    try:
        write_record(file.path, replace(file.record, text_bytes=text_bytes))
    except OSError as e:
        tqdm.write(f"note: the record of {file.path} stays without the bytes of its text ({e.strerror})", sys.stderr)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Groups of at most BATCH_PIECES pieces, ended by the piece that makes them BATCH_CHARACTERS long."""
    while batch := list(itertools.islice(pieces, 1)):
        characters = len(batch[0].text)
        while len(batch) < BATCH_PIECES and characters < BATCH_CHARACTERS:
            if (piece := next(pieces, None)) is None:
                break
            batch.append(piece)
            characters += len(piece.text)
        yield batch
