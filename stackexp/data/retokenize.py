"""Convert token files to another tokenizer: decode them to documents, then tokenize these like text."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from stackexp.data.readers import Piece
from stackexp.data.sources import find_sources
from stackexp.data.token_files import (
    FileRecord,
    TokenFile,
    count_token,
    find_end_of_text,
    open_complete,
    write_token_file,
)
from stackexp.data.tokenizer import (
    KnownTokenizer,
    compute_fingerprint,
    get_end_of_text_id,
    get_vocab_size,
    is_byte_level,
    list_token_bytes,
    tokenize_pieces,
)
from stackexp.errors import RunError
from stackexp.files import WRITE_REMEDY, compute_sha256, explain_failed_writes, hold_lock
from stackexp.terminal import open_bar, print_line

WRONG_IDS = "set --from to the tokenizer that made them"


class DocumentDecoder:
    """A decoder of token ids to the text of documents. Bytes that are not UTF-8 become U+FFFD and are counted."""

    def __init__(self, known: KnownTokenizer) -> None:
        tokenizer = known.tokenizer
        self.known, self.ids = known, set(tokenizer.get_vocab(with_added_tokens=True).values())
        self._bytes = list_token_bytes(tokenizer) if is_byte_level(tokenizer) else None
        self.documents = self.replaced_documents = self.text_bytes = 0

    def decode(self, file: TokenFile, end: int, bar: tqdm | None = None) -> Iterator[Piece]:
        """Yield the text of each document of a file, whose documents end with the id `end`.

        The last document has no end if its ids have none. Raises RunError for an id that the tokenizer lacks.
        """
        rest: list[np.ndarray] = []
        for block in file.read_blocks(max(self.known.vocab_size, end + 1), WRONG_IDS, end):
            *ended, last = np.split(block, np.flatnonzero(block == end) + 1)
            for ids in ended:
                yield Piece(self._decode_ids(file, np.concatenate([*rest, ids])[:-1]), True)
                rest = []
            rest.append(last)
            if bar is not None:
                bar.update(len(block))
        if any(map(len, rest)):
            yield Piece(self._decode_ids(file, np.concatenate(rest)), False)

    def _decode_ids(self, file: TokenFile, array: np.ndarray) -> str:
        ids = array.tolist()
        if unknown := set(ids) - self.ids:
            raise RunError(f"{file.name}: token id {min(unknown):,} is not in {self.known.path}; {WRONG_IDS}")
        if self._bytes is None:  # a U+FFFD that the ids spell counts as replaced, too
            text = self.known.tokenizer.decode(ids, skip_special_tokens=False)
            self.replaced_documents += "\ufffd" in text
        else:
            data = b"".join(map(self._bytes.__getitem__, ids))
            text = data.decode(errors="replace")
            self.replaced_documents += text.encode() != data
        self.documents += 1
        self.text_bytes += len(text.encode())
        return text


@dataclass(frozen=True)
class Retokenizer:
    """A converter of token files from the tokenizer `old` to `new`.

    `end_of_text` is the id that ends a document; None to find it in each file. `dtype` is the type of raw files.
    """

    old: KnownTokenizer
    new: Tokenizer
    end_of_text: int | None = None
    dtype: str | None = None

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
        size = self.old.vocab_size
        files = {name: TokenFile(path, dtype=self.dtype, vocab_size=size) for name, path in found.items()}
        for file in files.values():
            if file.record and self.old.differs_from(file.record.tokenizer):
                name = file.record.tokenizer[:16]
                raise RunError(f"{file.path}: ids of another tokenizer ({name}) than {self.old.path}; {WRONG_IDS}")
        ends = {name: self._find_end_of_text(file) for name, file in files.items()}
        with explain_failed_writes(folder, WRITE_REMEDY):
            folder.mkdir(parents=True, exist_ok=True)
            with (
                hold_lock(folder / ".lock", f"the conversion into {folder}"),
                open_bar(desc="retokenizing", total=sum(map(len, files.values())), unit="tok", unit_scale=True) as bar,
            ):
                return {name: self._convert(file, ends[name], folder / name, bar) for name, file in files.items()}

    def _convert(self, file: TokenFile, end: int, path: Path, bar: tqdm) -> FileRecord:
        ends = b"" if file.document_ends is None else np.ascontiguousarray(file.document_ends).tobytes()
        origin = {
            "tokenizer": compute_fingerprint(self.new),
            "source_tokenizer": self.old.fingerprint,
            "source_sha256": compute_sha256(file.path),
            "source_end_of_text": end,
            "source_layout": f"{file.tokens.dtype.str} {hashlib.sha256(ends).hexdigest()[:16]}",
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        complete = open_complete(path)
        if complete and (record := complete.record) and origin.items() <= asdict(record).items():
            bar.update(len(file))
            print_line(f"{path}: already converted")
            return record
        decoder, names = DocumentDecoder(self.old), ("documents", "replaced_documents", "text_bytes")
        return write_token_file(
            path,
            (block.ids for block in tokenize_pieces(decoder.decode(file, end, bar), self.new)),
            vocab_size=get_vocab_size(self.new),
            counts=lambda: {name: getattr(decoder, name) for name in names},
            source=str(file.path.absolute()),
            end_of_text=get_end_of_text_id(self.new),
            **origin,
        )

    def _find_end_of_text(self, file: TokenFile) -> int:
        """Return the id that ends the documents of a file. Raises RunError if a given id does not occur."""
        end = self.end_of_text
        if end is None and file.record:
            end = file.record.end_of_text
        if end is None and self.old.is_neox:
            end = find_end_of_text(file.tokens)
        if end is None:
            end = get_end_of_text_id(self.old.tokenizer)
        if file.document_ends is None and not count_token(file.tokens, end):
            if self.end_of_text is not None:
                raise RunError(f"{file.path}: contains no id {end}; set --end-of-text to the id that ends documents")
            print_line(
                f"note: {file.path}: contains no end-of-text id {end}, so it is one document; if another id ends "
                "documents, set --end-of-text"
            )
        return end
