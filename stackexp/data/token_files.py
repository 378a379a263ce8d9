"""Files of token ids: raw little-endian numbers as OLMo writes them, real .npy files, llm.c's, and Megatron's.

Preparation, retokenization, evaluation and fetching all read ids through `TokenFile.read_blocks`.

A file that stackexp wrote or fetched has a record next to it, `<file>.json`. The record is written last, so its
presence means that the file is complete and was checked.
"""

import codecs
import glob
import hashlib
import io
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from stackexp.data.olmo import END_OF_TEXT, TWO_SPACES
from stackexp.data.shards import choose_token_dtype, verify_file
from stackexp.data.sources import UnreadableSourceError, find_megatron_index
from stackexp.errors import RunError
from stackexp.files import build_record, compute_sha256, read_json, sync_file, write_json

NPY_MAGIC = b"\x93NUMPY"
REMEDY = "it is truncated or damaged: fetch or make it again"
TYPE_REMEDY = "give --dtype to data prepare or data retokenize, or save the ids with numpy.save"
BLOCK_TOKENS = 1 << 20
# llm.c writes 256 int32 (magic number, version, number of ids, ...), then the ids.
LLM_C_TYPES = {20240520: "<u2", 20240801: "<u4"}
LLM_C_HEADER_BYTES = 1024
MIN_TEXT_BYTES = 64
"""A file without a header that begins with as many bytes of text is not read as token ids."""
# Megatron writes NAME.bin with raw ids, and NAME.idx: this magic, version, type, numbers of sequences and of document
# bounds, then the lengths of the sequences (int32), their addresses (int64), and the document bounds in sequences.
MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# Raw ids seem to be uint32 if every second uint16 is below TINY, but many of the others are not.
TYPE_SAMPLE, MIN_TYPE_SAMPLE, TINY = 1 << 20, 8, 32
MIN_WIDER_SAMPLE = 64  # pairs of ids whose second is always 0, from which they have twice the bytes of the given type


@dataclass(frozen=True)
class FileRecord:
    """The contents of a token file's record."""

    sha256: str
    bytes: int  # file size
    tokens: int
    vocab_size: int  # the tokenizer's largest id + 1
    tokenizer: str  # fingerprint, "gpt-neox-20b" or "unknown"
    source: str  # URL or path
    source_sha256: str | None = None  # the file from which it was retokenized
    source_tokenizer: str | None = None  # fingerprint of the tokenizer that decoded that file
    source_end_of_text: int | None = None
    source_layout: str | None = None  # type of its ids and a hash of its index
    end_of_text: int | None = None  # the id that ends a document
    documents: int | None = None
    text_bytes: int | None = None  # UTF-8 size of the encoded text
    replaced_documents: int | None = None  # documents with bytes that are not UTF-8, replaced by U+FFFD
    skipped_lines: int | None = None  # lines without a document
    first_skipped: str | None = None  # the first of them, and the reason


def get_record_path(path: Path) -> Path:
    """Return the path of the record of the token file `path`."""
    return path.with_name(f"{path.name}.json")


def read_record(path: Path) -> FileRecord | None:
    """Return the record of the token file `path`, or None. Raises RunError if the record cannot be read."""
    record = get_record_path(path)
    try:
        return build_record(FileRecord, read_json(record))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{record}: cannot be read ({error.strerror}); check its permissions") from error
    except (RunError, TypeError) as error:
        raise RunError(f"{record}: corrupt; delete it and make {path.name} again") from error


class TokenFile:
    """An open token file. `tokens` is a memory map [N] of the ids.

    The type is in the header of a real .npy or of llm.c, or in Megatron's index next to the file; else it is `dtype`,
    or uint16. `document_ends` [documents] are the positions after the documents in Megatron's index, or None without
    one. Messages call the file `name` (default: its path).

    Raises RunError if the file is missing, empty or cut short, if its length differs from its record, or if its type is
    unknown: a raw file without a record, whose ids seem to have more bytes or whose vocabulary needs them.
    """

    def __init__(
        self, path: str | Path, *, dtype: str | None = None, vocab_size: int | None = None, name: str | None = None
    ):
        self.path = Path(path)
        self.name = name or str(path)
        self.record = read_record(self.path)
        self.document_ends: np.ndarray | None = None
        self.is_llm_c = False
        try:
            size = self.path.stat().st_size
            if self.record and size != self.record.bytes:
                raise RunError(f"{self.name}: {size:,} bytes, but its record has {self.record.bytes:,}; {REMEDY}")
            self.tokens = self._map(size, dtype, vocab_size)
            if self.record and len(self) != self.record.tokens:
                raise RunError(f"{self.name}: {len(self):,} ids, but its record has {self.record.tokens:,}; {REMEDY}")
        except (OSError, ValueError, OverflowError, TokenError) as error:  # TokenError: from the header of an .npy
            raise RunError(
                f"{self.name}: cannot be read ({getattr(error, 'strerror', None) or error}); copy or make it again"
            ) from error

    def __len__(self) -> int:
        return len(self.tokens)

    def _map(self, size: int, dtype: str | None, vocab_size: int | None) -> np.memmap:
        if not size:
            raise RunError(f"{self.name}: empty; {REMEDY}")
        with open(self.path, "rb") as file:
            head = file.read(256)
        begin = head[:12]
        if begin.startswith(NPY_MAGIC):
            return self._map_npy()
        if len(begin) == 12 and (header := np.frombuffer(begin, "<i4"))[0] in LLM_C_TYPES:
            kind, count, self.is_llm_c = np.dtype(LLM_C_TYPES[header[0]]), int(header[2]), True
            if size != LLM_C_HEADER_BYTES + count * kind.itemsize:
                raise RunError(f"{self.name}: {size:,} bytes, but its header has {count:,} token ids; {REMEDY}")
            return np.memmap(self.path, kind, "r", LLM_C_HEADER_BYTES, (count,))
        if index := find_megatron_index(self.path):
            kind, self.document_ends = read_megatron_index(index, self.path, size)
            return np.memmap(self.path, kind, "r")
        if self.record is None and len(head) >= MIN_TEXT_BYTES and (text := decode_text(head)):
            hint = "; run `git lfs pull`" if text.startswith("version https://git-lfs") else ""
            raise RunError(f"{self.name}: contains text, not token ids; it begins: {text}{hint}")
        is_unknown = self.record is None and dtype is None
        if is_unknown and (vocab_size or 0) > 1 << 16:
            raise RunError(f"{self.name}: raw ids of a vocabulary of {vocab_size:,}, of unknown type; {TYPE_REMEDY}")
        kind = np.dtype(dtype or np.uint16).newbyteorder("<")
        if size % kind.itemsize:
            raise RunError(f"{self.name}: {size:,} bytes are not a whole number of {kind.name} token ids; {REMEDY}")
        tokens = np.memmap(self.path, kind, "r")
        if self.record is None and (width := _find_wider_ids(tokens, is_unknown)):
            remedy = TYPE_REMEDY if is_unknown else "give another --dtype, or save them with numpy.save"
            found = f"because every second {kind.name} is {'tiny' if is_unknown else 0}"
            raise RunError(f"{self.name}: its ids seem to have {width} bytes, {found}; {remedy}")
        return tokens

    def _map_npy(self) -> np.memmap:
        """Map the integers of a real .npy as [N]. Raises RunError for another type, ValueError for a corrupt file."""
        array = np.lib.format.open_memmap(self.path, mode="r")
        if array.dtype.kind not in "ui" or not array.size or not array.flags.c_contiguous:
            order = "" if array.flags.c_contiguous else " in Fortran order"
            found = f"{array.dtype.name} {list(array.shape)}{order}"
            raise RunError(f"{self.name}: expected token ids, found {found}; write it as a 1-d array of integers")
        if rest := self.path.stat().st_size - array.offset - array.nbytes:
            raise RunError(f"{self.name}: {rest:,} bytes follow the array, such as another array; write one per file")
        return np.memmap(self.path, array.dtype, "r", array.offset, (array.size,))

    def read_blocks(
        self, vocab_size: int, advice: str = "give the tokenizer that made the file", end: int | None = None
    ) -> Iterator[np.ndarray]:
        """Yield all ids in order, in blocks of about BLOCK_TOKENS.

        With `end`, this id is added to the documents in Megatron's index that do not end with it, and left out at the
        beginning of a file of llm.c, which writes it before each document.
        Raises RunError for an id outside the vocabulary, and at the end if the file differs from its record.
        """
        digest, position = hashlib.sha256(), 0
        try:
            with open(self.path, "rb") as file:  # not the memory map: its pages would count as this process's memory
                digest.update(file.read(self.tokens.offset))
                while len(ids := np.fromfile(file, self.tokens.dtype, BLOCK_TOKENS)):
                    if self.record:
                        digest.update(ids.data)
                    if not 0 <= ids.min() <= ids.max() < vocab_size:
                        first = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
                        found = f"token id {ids[first]:,} at position {position + first:,}"
                        raise RunError(f"{self.name}: {found} is outside the vocabulary of {vocab_size:,}; {advice}")
                    begin, position = position, position + len(ids)
                    yield ids if end is None else self._end_documents(ids, begin, end)
        except OSError as error:
            reason = f"cannot be read ({error.strerror}); fix that or remove the file"
            raise UnreadableSourceError(f"{self.name}: {reason}") from error
        if self.record and self.record.sha256 != digest.hexdigest():
            raise RunError(f"{self.name}: differs from its record (another SHA-256); {REMEDY}")

    def _end_documents(self, ids: np.ndarray, begin: int, end: int) -> np.ndarray:
        """Return ids [N] from position `begin` on, with `end` at the end of each document of the index."""
        if self.is_llm_c and not begin and ids[0] == end:
            return ids[1:]
        if self.document_ends is None:
            return ids
        first, last = np.searchsorted(self.document_ends, (begin, begin + len(ids)), "right")
        ends = self.document_ends[first:last] - begin
        ids = ids.astype(np.result_type(ids.dtype, np.min_scalar_type(end)))  # the id may not fit, such as 256 of bytes
        return np.insert(ids, ends[ids[ends - 1] != end], end)


def open_complete(path: Path) -> TokenFile | None:
    """Open a token file that has a record and the recorded contents; None if there is no such file."""
    try:
        file = TokenFile(path)
        verify_file(path, file.record.sha256 if file.record else None)
    except RunError:
        return None
    return file if file.record else None


def decode_text(begin: bytes) -> str:
    """Return the first words of a text (a page, an error message, a pointer of Git LFS); "" for token ids."""
    try:
        words = codecs.getincrementaldecoder("utf-8")().decode(begin).split()  # accepts a character cut off at the end
    except UnicodeDecodeError:
        return ""
    return " ".join(words)[:60] if "".join(words).isprintable() else ""


def read_megatron_index(path: Path, tokens: Path, size: int) -> tuple[np.dtype, np.ndarray]:
    """Return the type of the ids in the file `tokens` of `size` bytes, and the positions after its documents.

    Raises RunError if the index is of another format, cut short, or does not fit the file.
    """
    remedy = f"rename it if it does not belong to {tokens.name}, or make both again"
    with open(path, "rb") as file:
        header = file.read(34)
        if len(header) < 34 or not header.startswith(MEGATRON_MAGIC):
            raise RunError(f"{path}: not an index of Megatron; {remedy}")
        version, code, num_sequences, num_bounds = struct.unpack("<QBQQ", header[9:])
        if version != 1 or code not in MEGATRON_TYPES:
            raise RunError(f"{path}: version {version} with ids of type {code} is not supported; {remedy}")
        if path.stat().st_size < 34 + 12 * num_sequences + 8 * num_bounds:
            raise RunError(f"{path}: cut short; {remedy}")
        lengths = np.fromfile(file, "<i4", num_sequences)
        addresses = np.fromfile(file, "<i8", num_sequences)
        bounds = np.fromfile(file, "<i8", num_bounds)
    kind = np.dtype(MEGATRON_TYPES[code])
    starts = np.concatenate([[0], lengths.astype(np.int64).cumsum()])
    is_in_order = np.array_equal(addresses, starts[:-1] * kind.itemsize) and starts[-1] * kind.itemsize == size
    if not is_in_order or (lengths < 0).any() or ((bounds < 0) | (bounds > num_sequences)).any():
        raise RunError(f"{path}: its sequences are not those of {tokens.name}; {remedy}")
    ends = np.unique(starts[np.append(bounds, num_sequences)])
    return kind, ends[ends > 0]


def _find_wider_ids(words: np.ndarray, is_unknown: bool) -> int | None:
    """Return the bytes of ids whose halves the words [N] seem to be: low, high, low, high ...; None for whole ids.

    Words of an unknown type are suspected earlier than those of a type that the user gave.
    """
    if words.itemsize == 8 or len(words) % 2:
        return None
    sample = np.asarray(words[:TYPE_SAMPLE])
    low, high = sample[0::2], sample[1::2]
    is_zero = len(high) >= (4 if is_unknown else MIN_WIDER_SAMPLE) and not high.any() and low.any()
    is_long = is_unknown and words.itemsize == 2 and len(high) >= MIN_TYPE_SAMPLE
    if not is_zero and not (is_long and high.max() < TINY and np.mean(low >= TINY) > 1 / 4):
        return None
    wider = sample.view(f"<u{2 * words.itemsize}")
    return _find_wider_ids(wider, is_unknown) or wider.itemsize


class Chunks:
    """Token ids [N] cut into chunks of at most T = context_length ids. A chunk scores all its ids except the first.

    As in OLMo, chunk i is tokens[i T : (i + 1) T] and the remainder is dropped. With `score_remainder`, chunk i is
    tokens[i (T - 1) : i (T - 1) + T] and the last may be shorter: every id except the first is scored exactly once.
    With a `limit`, only that many chunks are kept, evenly spaced.
    """

    def __init__(self, tokens: Any, context_length: int, score_remainder: bool, limit: int | None = None):
        assert context_length >= 2
        self.tokens, self.context_length, self.score_remainder = tokens, context_length, score_remainder
        self.total = len(tokens) // context_length
        if score_remainder:
            self.total = -(-(len(tokens) - 1) // (context_length - 1)) if len(tokens) else 0
        self.length = self.total if limit is None else min(limit, self.total)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray:
        """Return chunk `index`, [<= T]."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = index * self.total // self.length * (self.context_length - self.score_remainder)
        return self.tokens[begin : begin + self.context_length]


def count_token(tokens: np.ndarray, token: int) -> int:
    """Count the id `token` in `tokens` [N], block by block."""
    starts = range(0, len(tokens), BLOCK_TOKENS)
    return sum(int((tokens[start : start + BLOCK_TOKENS] == token).sum()) for start in starts)


def find_end_of_text(tokens: np.ndarray) -> int | None:
    """Return the id that ends the documents of an OLMo file, tokens [N]; None if there is none.

    This is the last id if it is in END_OF_TEXT, and otherwise (in a truncated file) the more frequent of these. It is
    TWO_SPACES only if that is the last id and none of END_OF_TEXT occurs.
    """
    last = int(tokens[-1])
    if last in END_OF_TEXT:
        return last
    counts = {end: count_token(tokens, end) for end in END_OF_TEXT}
    if any(counts.values()):
        return max(END_OF_TEXT, key=counts.__getitem__)
    return last if last == TWO_SPACES else None


def publish(temporary: Path, path: Path, record: FileRecord) -> None:
    """Rename the finished file `temporary` to the token file `path`, then write its record.

    Deletes partial records of killed processes, so no other process may write the record at the same time.
    """
    old = get_record_path(path)
    for outdated in [old, *old.parent.glob(f".{glob.escape(old.name)}.*")]:
        outdated.unlink(missing_ok=True)
    temporary.replace(path)
    write_json(old, {key: value for key, value in asdict(record).items() if value is not None}, indent=1)


def write_token_file(
    path: Path,
    tokens: Iterable[np.ndarray],
    *,
    vocab_size: int,
    counts: Callable[[], dict[str, Any]] = dict,
    **fields: Any,
) -> FileRecord:
    """Write a token file and its record atomically.

    The format is raw uint16, or for vocabularies above 65,536 a real .npy of uint32, which is readable without the
    record.

    Args:
        path: The file to write.
        tokens: Arrays of token ids [N], written one after the other.
        vocab_size: The tokenizer's largest id + 1.
        counts: Called after the last array; returns further fields of the record.
        **fields: The other fields of FileRecord, such as tokenizer and source.

    Raises:
        RunError: An id is outside the vocabulary, or there are no tokens.
    """
    dtype, count = choose_token_dtype(vocab_size).newbyteorder("<"), 0
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(_header(dtype, count))
            for part in tokens:
                if len(part) and part.max() >= vocab_size:
                    found = f"token id {part.max()}, outside the vocabulary of {vocab_size}"
                    raise RunError(f"{path}: {found}; use the tokenizer that made the ids")
                file.write(np.ascontiguousarray(part, dtype).data)
                count += len(part)
            file.seek(0)
            file.write(_header(dtype, count))
            sync_file(file)
        if not count:
            raise RunError(f"{fields['source']}: contains no tokens; check the path")
        size = temporary.stat().st_size
        record = FileRecord(compute_sha256(temporary), size, count, vocab_size, **fields, **counts())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    publish(temporary, path, record)
    return record


def _header(dtype: np.dtype, count: int) -> bytes:
    """Return the header of a .npy of `count` uint32 ids, whose length does not depend on `count`; b"" for uint16."""
    if dtype.itemsize == 2:
        return b""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})
    return header.getvalue()
