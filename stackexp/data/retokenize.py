"""Convert token files to another tokenizer: decode each document, then encode it."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from stackexp.data.readers import Piece, cut_into_pieces
from stackexp.data.sources import find_sources
from stackexp.data.token_files import (
    REMEDY,
    FileRecord,
    TokenFile,
    count_token,
    explain_failed_writes,
    find_end_of_text,
    write_record,
    write_token_file,
)
from stackexp.data.tokenizer import (
    KnownTokenizer,
    compute_fingerprint,
    count_token_bytes,
    get_end_of_text_id,
    get_vocab_size,
    is_byte_level,
    list_token_bytes,
    tokenize_pieces,
)
from stackexp.errors import RunError
from stackexp.files import compute_sha256, hold_lock
from stackexp.progress_bar import open_bar, print_line

BLOCK_TOKENS = 1 << 18


@dataclass
class TextCounts:
    """Counts of one file's documents and text."""

    documents: int = 0
    replaced_documents: int = 0  # with bytes that are not UTF-8, replaced by U+FFFD
    source_bytes: int = 0  # encoded by the old ids
    text_bytes: int = 0  # the same, after the replacement
    kept_bytes: int = 0  # encoded by the new ids


@dataclass(frozen=True)
class Retokenizer:
    """A converter of token files from the tokenizer `old` to `new`.

    `end_of_text` is the id that ends a document; None to find it in each file.
    """

    old: KnownTokenizer
    new: Tokenizer
    end_of_text: int | None = None

    def retokenize(self, source: Path, folder: Path) -> dict[str, FileRecord]:
        """Convert a token file, or a folder of them, to files of the same names; return their records by name.

        Files that are complete and were converted from the same file with the same tokenizers are kept. Raises
        RunError if there is nothing to read, a file is damaged or belongs to another tokenizer, or `folder` cannot be
        written.
        """
        found = {file.name: file.path for file in find_sources(source) if file.has_tokens}
        if not found:
            raise RunError(f"{source}: contains no token files, whose names end in .npy or .bin; correct the path")
        is_inside = source.is_dir() and source.resolve() in (folder.resolve(), *folder.resolve().parents)
        if is_inside or source.resolve() == (folder / source.name).resolve():
            raise RunError(f"{folder}: contains the source files; choose another --to")
        files = {name: TokenFile(path) for name, path in found.items()}
        for file in files.values():
            if file.record and self.old.contradicts(file.record.tokenizer):
                raise RunError(
                    f"{file.path}: token ids of another tokenizer ({file.record.tokenizer[:16]}) than {self.old.path}; "
                    "set --from to the tokenizer that made them"
                )
        ends = {name: self._find_end_of_text(file) for name, file in files.items()}
        self._report_ambiguous_ends(ends)
        with explain_failed_writes(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with (
                hold_lock(folder / ".lock", f"the conversion into {folder}"),
                open_bar(desc="retokenizing", total=sum(map(len, files.values())), unit="tok", unit_scale=True) as bar,
            ):
                return {name: self._convert(file, ends[name], folder / name, bar) for name, file in files.items()}

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        return {"tokenizer": compute_fingerprint(self.new), "source_tokenizer": self.old.fingerprint}

    @cached_property
    def _is_old_id(self) -> np.ndarray:
        """True for each id of the old tokenizer, bool [vocab_size]."""
        known = np.zeros(self.old.vocab_size, bool)
        known[list(self.old.tokenizer.get_vocab(with_added_tokens=True).values())] = True
        return known

    @cached_property
    def _old_bytes(self) -> dict[int, bytes] | None:
        """The bytes of each old id; None if the tokenizer is not byte-level."""
        return list_token_bytes(self.old.tokenizer) if is_byte_level(self.old.tokenizer) else None

    def _convert(self, file: TokenFile, end: int, path: Path, bar: tqdm) -> FileRecord:
        digest = compute_sha256(file.path)
        if file.record and file.record.sha256 != digest:
            raise RunError(f"{file.path}: its SHA-256 differs from its record; {REMEDY}")
        origin = {**self._fingerprints, "source_sha256": digest, "source_end_of_text": end}
        path.parent.mkdir(parents=True, exist_ok=True)
        if (record := _find_complete(path, origin)) is not None:
            bar.update(len(file))
            print_line(f"{path}: already converted")
            if not record.replaced_documents:
                self._record_text_bytes(file, record.text_bytes)
            return record
        counts = TextCounts()
        record = write_token_file(
            path,
            self.encode(file, end, counts, bar.update),
            vocab_size=get_vocab_size(self.new),
            counts=lambda: {name: getattr(counts, name) for name in ("documents", "replaced_documents", "text_bytes")},
            source=str(file.path.absolute()),
            end_of_text=get_end_of_text_id(self.new),
            **origin,
        )
        if (lost := counts.text_bytes - counts.kept_bytes) > 0:
            print_line(
                f"note: {path}: {lost:,} of {counts.text_bytes:,} bytes of text are lost; the new tokenizer normalizes "
                "text or has no token for some characters"
            )
        self._record_text_bytes(file, counts.source_bytes)
        return record

    def _find_end_of_text(self, file: TokenFile) -> int:
        """Return the id that ends the documents of a file. Raises RunError if a given id does not occur."""
        end = self.end_of_text
        if end is None and file.record:
            end = file.record.end_of_text
        if end is None and self.old.is_neox:
            end = find_end_of_text(file.tokens)
        if end is None:
            end = get_end_of_text_id(self.old.tokenizer)
        if not count_token(file.tokens, end):
            if self.end_of_text is not None:
                raise RunError(f"{file.path}: contains no id {end}; set --end-of-text to the id that ends documents")
            print_line(
                f"note: {file.path}: contains no end-of-text id {end}, so it is one document; if another id ends "
                "documents, set --end-of-text"
            )
        return end

    def _report_ambiguous_ends(self, ends: dict[str, int]) -> None:
        """Report ids that end documents but are text to the tokenizer, such as two spaces in OLMo's oldest files."""
        for end in sorted(set(ends.values()) - {self.end_of_text, get_end_of_text_id(self.old.tokenizer)}):
            if text := self.old.tokenizer.id_to_token(end):
                names = ", ".join(name for name, other in ends.items() if other == end)
                print_line(
                    f"note: id {end} ends the documents of {names}, but is also the token {text!r}, which therefore "
                    "ends a document too; to use another id, set --end-of-text"
                )

    def encode(
        self, file: TokenFile, end: int, counts: TextCounts, advance: Callable[[int], object]
    ) -> Iterator[np.ndarray]:
        """Yield the new ids of a file in parts, with the new end-of-text id after each document.

        `end` is the old id that ends a document. `advance` is called with the number of ids read since the last call.
        """
        token_bytes = count_token_bytes(self.new)
        for tokens in tokenize_pieces(self._decode_documents(file, end, counts, advance), self.new):
            counts.text_bytes += tokens.bytes
            counts.kept_bytes += int(token_bytes[tokens.ids].sum())
            yield tokens.ids

    def _decode_documents(
        self, file: TokenFile, end: int, counts: TextCounts, advance: Callable[[int], object]
    ) -> Iterator[Piece]:
        """Yield the text of all documents in pieces. The last document has no end if its ids have none."""
        for ids in self._read_documents(file, end, advance):
            has_ended = ids[-1] == end
            for piece in cut_into_pieces([self._decode(ids[:-1] if has_ended else ids, counts)]):
                yield Piece(piece.text, piece.ends_document and has_ended)

    def _read_documents(self, file: TokenFile, end: int, advance: Callable[[int], object]) -> Iterator[np.ndarray]:
        """Yield the ids of each document with its end. Raises RunError for an id that the old tokenizer lacks."""
        known = self._is_old_id
        parts: list[np.ndarray] = []
        for first in range(0, len(file), BLOCK_TOKENS):
            ids = np.asarray(file.tokens[first : first + BLOCK_TOKENS])
            is_unknown = (ids != end) & ~((ids >= 0) & (ids < len(known)) & known[np.clip(ids, 0, len(known) - 1)])
            if is_unknown.any():
                position = int(is_unknown.argmax())
                raise RunError(
                    f"{file.path}: id {ids[position]:,} at position {first + position:,} is not in the --from "
                    f"tokenizer, whose largest id is {len(known) - 1:,}; use the tokenizer that made the file"
                )
            *ended, rest = np.split(ids, np.flatnonzero(ids == end) + 1)
            for document in ended:
                yield np.concatenate([*parts, document])
                parts = []
            parts.append(rest)
            advance(len(ids))
        if any(map(len, parts)):
            yield np.concatenate(parts)

    def _decode(self, ids: np.ndarray, counts: TextCounts) -> str:
        """Return the text of a document without its end. Bytes that are not UTF-8 become U+FFFD."""
        if self._old_bytes is None:  # a U+FFFD that the ids spell counts as replaced, too
            text = self.old.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            data, is_replaced = text.encode(), "\ufffd" in text
        else:
            data = b"".join(map(self._old_bytes.__getitem__, ids.tolist()))
            text = data.decode(errors="replace")
            is_replaced = text.encode() != data
        counts.documents += 1
        counts.replaced_documents += is_replaced
        counts.source_bytes += len(data)
        return text

    def _record_text_bytes(self, file: TokenFile, text_bytes: int | None) -> None:
        """Add the bytes of text to the record of the source file, so that its bits per byte can be computed.

        Skipped if the end-of-text id was given, because the record may mean another one.
        """
        if self.end_of_text is not None or file.record is None or file.record.text_bytes == text_bytes:
            return
        try:
            write_record(file.path, replace(file.record, text_bytes=text_bytes))
        except OSError as error:
            print_line(f"note: cannot add the bytes of text to the record of {file.path} ({error.strerror})")


def _find_complete(path: Path, origin: dict[str, Any]) -> FileRecord | None:
    """Return the record of a complete file with this origin."""
    try:
        record = TokenFile(path).record
    except RunError:
        return None
    return record if record and origin.items() <= asdict(record).items() else None
