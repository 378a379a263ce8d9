"""Convert token files to another tokenizer: decode each document and encode it again."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from stackexp.data.decoding import DocumentDecoder, Part
from stackexp.data.evaluation_sets import KnownTokenizer
from stackexp.data.sources import TOKEN_SUFFIXES
from stackexp.data.token_files import (
    REMEDY,
    FileRecord,
    TokenFile,
    count_token,
    find_end_of_text,
    record_path,
    write_record,
    write_token_file,
)
from stackexp.data.tokenizer import (
    compute_fingerprint,
    count_token_bytes,
    get_end_of_text_id,
    get_vocab_size,
    tokenize_pieces,
)
from stackexp.errors import RunError
from stackexp.files import hold_lock, sha256_of

BLOCK_TOKENS = 1 << 18


@dataclass
class TextCounts:
    """Bytes of one file's text."""

    source_bytes: int = 0  # encoded by the old ids
    text_bytes: int = 0  # the same, with invalid UTF-8 replaced by U+FFFD
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
        paths = find_token_files(source)
        is_inside = source.is_dir() and source.resolve() in (folder.resolve(), *folder.resolve().parents)
        if is_inside or source.resolve() == (folder / source.name).resolve():
            raise RunError(f"{folder}: contains the source files; choose another --to")
        files = {name: TokenFile(path) for name, path in paths.items()}
        for file in files.values():
            if file.record and self.old.contradicts(file.record.tokenizer):
                raise RunError(
                    f"{file.path}: token ids of another tokenizer ({file.record.tokenizer[:16]}) than {self.old.path}; "
                    "set --from to the tokenizer that made them"
                )
        ends = {name: self._find_end_of_text(file) for name, file in files.items()}
        self._report_ambiguous_ends(ends)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (
                hold_lock(folder / ".lock", f"the conversion into {folder}"),
                tqdm(desc="retokenizing", total=sum(map(len, files.values())), unit="tok", unit_scale=True) as bar,
            ):
                return {name: self._convert(file, ends[name], folder / name, bar) for name, file in files.items()}
        except OSError as error:
            raise RunError(
                f"{error.filename or folder}: cannot be written ({error.strerror or error}); free space or choose "
                "another --to, then rerun the command to resume"
            ) from error

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        return {"tokenizer": compute_fingerprint(self.new), "source_tokenizer": self.old.fingerprint}

    @cached_property
    def _is_old_id(self) -> np.ndarray:
        """Return True for each id of the old tokenizer, bool [vocab_size]."""
        known = np.zeros(self.old.vocab_size, bool)
        known[list(self.old.tokenizer.get_vocab(with_added_tokens=True).values())] = True
        return known

    def _convert(self, file: TokenFile, end: int, path: Path, bar: tqdm) -> FileRecord:
        digest = sha256_of(file.path)
        if file.record and file.record.sha256 != digest:
            raise RunError(f"{file.path}: its SHA-256 differs from its record; {REMEDY}")
        origin = {**self._fingerprints, "source_sha256": digest, "source_end_of_text": end}
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_partial_records(path)
        if (record := _find_complete(path, origin)) is not None:
            bar.update(len(file))
            _report(f"{path}: already converted")
            if not record.replaced_documents:
                self._record_text_bytes(file, record.text_bytes)
            return record
        counts, decoder = TextCounts(), DocumentDecoder(self.old.tokenizer)
        record = write_token_file(
            path,
            self.encode(file, end, counts, decoder, bar.update),
            vocab_size=get_vocab_size(self.new),
            counts=lambda: {
                "documents": decoder.documents,
                "replaced_documents": decoder.replaced_documents,
                "text_bytes": counts.text_bytes,
            },
            source=str(file.path.absolute()),
            end_of_text=get_end_of_text_id(self.new),
            **origin,
        )
        if (lost := counts.text_bytes - counts.kept_bytes) > 0:
            _report(
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
            _report(
                f"note: {file.path}: contains no end-of-text id {end}, so it is one document; if another id ends "
                "documents, set --end-of-text"
            )
        return end

    def _report_ambiguous_ends(self, ends: dict[str, int]) -> None:
        """Report ids that end documents but are text to the tokenizer, such as two spaces in OLMo's oldest files."""
        for end in sorted(set(ends.values()) - {self.end_of_text, get_end_of_text_id(self.old.tokenizer)}):
            if text := self.old.tokenizer.id_to_token(end):
                names = ", ".join(name for name, other in ends.items() if other == end)
                _report(
                    f"note: id {end} ends the documents of {names}, but is also the token {text!r}, which therefore "
                    "ends a document too; to use another id, set --end-of-text"
                )

    def encode(
        self,
        file: TokenFile,
        end: int,
        counts: TextCounts,
        decoder: DocumentDecoder,
        advance: Callable[[int], object],
    ) -> Iterator[np.ndarray]:
        """Yield the new ids of a file in parts, with the new end-of-text id after each document.

        `end` is the old id that ends a document. `advance` is called with the number of ids read since the last call.
        """
        token_bytes = count_token_bytes(self.new)
        token_bytes[get_end_of_text_id(self.new)] = 0  # even if it is not a special token
        for tokens in tokenize_pieces(decoder.decode(self._read_documents(file, end, advance)), self.new):
            counts.text_bytes += tokens.bytes
            counts.kept_bytes += int(token_bytes[tokens.ids].sum())
            yield tokens.ids
        counts.source_bytes = decoder.num_bytes

    def _read_documents(self, file: TokenFile, end: int, advance: Callable[[int], object]) -> Iterator[Part]:
        """Yield the documents of a file in parts. Raises RunError for an id that the old tokenizer does not have."""
        known = self._is_old_id
        for first in range(0, len(file), BLOCK_TOKENS):
            ids = np.asarray(file.tokens[first : first + BLOCK_TOKENS])
            is_unknown = (ids != end) & ~((ids >= 0) & (ids < len(known)) & known[np.clip(ids, 0, len(known) - 1)])
            if is_unknown.any():
                position = int(is_unknown.argmax())
                raise RunError(
                    f"{file.path}: id {ids[position]:,} at position {first + position:,} is not in the --from "
                    f"tokenizer, whose largest id is {len(known) - 1:,}; use the tokenizer that made the file"
                )
            begin = 0
            for stop in np.flatnonzero(ids == end).tolist():
                yield ids[begin:stop], True
                begin = stop + 1
            if begin < len(ids):
                yield ids[begin:], False
            advance(len(ids))

    def _record_text_bytes(self, file: TokenFile, text_bytes: int | None) -> None:
        """Add the bytes of text to the record of the source file, so that its bits per byte can be computed.

        Skipped if the end-of-text id was given, because the record may mean another one.
        """
        if self.end_of_text is not None or file.record is None or file.record.text_bytes == text_bytes:
            return
        try:
            write_record(file.path, replace(file.record, text_bytes=text_bytes))
        except OSError as error:
            _report(f"note: cannot add the bytes of text to the record of {file.path} ({error.strerror})")


def find_token_files(source: Path) -> dict[str, Path]:
    """Return the token files at `source`, a file or a folder, by relative name. Raises RunError if there are none."""
    if source.is_file():
        return {source.name: source}
    if not source.is_dir():
        raise RunError(f"{source}: no such file or folder; correct the path")
    found = {path.relative_to(source): path for path in sorted(source.rglob("*")) if path.suffix in TOKEN_SUFFIXES}
    files = {
        str(name): path
        for name, path in found.items()
        if path.is_file() and not any(part.startswith(".") for part in name.parts)
    }
    if not files:
        raise RunError(f"{source}: contains no token files; expected the suffix {' or '.join(TOKEN_SUFFIXES)}")
    return files


def _find_complete(path: Path, origin: dict[str, Any]) -> FileRecord | None:
    """Return the record of a complete file with this origin."""
    try:
        record = TokenFile(path).record
    except RunError:
        return None
    return record if record and origin.items() <= asdict(record).items() else None


def _remove_partial_records(path: Path) -> None:
    """Remove the temporary files of the record of `path` that killed conversions left; the folder is locked."""
    for partial in path.parent.glob(f".{escape(record_path(path).name)}.*"):
        partial.unlink(missing_ok=True)


def _report(line: str) -> None:
    tqdm.write(line, file=sys.stderr)
