"""Token ids in one file, memory-mapped: raw little-endian uint16 without a header, as OLMo's, or a real .npy.

Beside a file that stackexp wrote or fetched lies its record, `<file>.json`, written last: its presence means that
the file is whole and was checked.
"""

import hashlib
import io
import json
import mmap
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from stackexp.data.olmo import END_OF_TEXT, TWO_SPACES
from stackexp.data.shards import sync, token_dtype, write_json
from stackexp.errors import RunError

NPY_MAGIC = b"\x93NUMPY"
REMEDY = "cut short or damaged: fetch or make it again"
BLOCK = 1 << 22  # ids looked through at a time


@dataclass(frozen=True)
class FileRecord:
    """What is known of a token file. Sizes: `bytes` of the file, `text_bytes` of the text that its tokens stand for."""

    sha256: str
    bytes: int
    tokens: int
    vocab_size: int  # the tokenizer's largest id + 1
    tokenizer: str  # fingerprint, or "gpt-neox-20b"
    source: str  # URL or path
    source_sha256: str | None = None  # of the file it was re-encoded from
    source_tokenizer: str | None = None  # that decoded it, a fingerprint
    source_end_of_text: int | None = None
    end_of_text: int | None = None  # the id that ends a document
    documents: int | None = None
    text_bytes: int | None = None
    replaced_documents: int | None = None  # whose tokens were not UTF-8: U+FFFD stands for what was not


def record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def read_record(path: Path) -> FileRecord | None:
    """The record beside the token file `path`, if there is one. Raises RunError if it is corrupt or cannot be read."""
    record = record_path(path)
    try:
        return FileRecord(**json.loads(record.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as e:
        raise RunError(f"{record}: corrupt; delete it, and make {path.name} again") from e
    except OSError as e:
        raise RunError(f"{record}: cannot be read ({e.strerror})") from e


class TokenFile:
    """A token file, opened: `tokens` is a memory map [N] of uint16, or of what the header of a real .npy says.

    Raises RunError if the file is missing, empty, of an odd number of bytes, or not as long as its record says.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.record = read_record(self.path)
        try:
            size = self.path.stat().st_size
            if self.record and size != self.record.bytes:
                raise RunError(f"{self.path}: {size:,} bytes, not the {self.record.bytes:,} of its record; {REMEDY}")
            self.tokens = self._map(size)
        except (OSError, ValueError) as e:
            raise RunError(f"{self.path}: cannot be read ({getattr(e, 'strerror', None) or e})") from e

    def _map(self, size: int) -> np.memmap:
        if not size:
            raise RunError(f"{self.path}: empty; {REMEDY}")
        with open(self.path, "rb") as file:
            if file.read(len(NPY_MAGIC)) == NPY_MAGIC:
                return _map_npy(self.path)
        if size % 2:
            raise RunError(f"{self.path}: {size:,} bytes are no whole number of uint16 token ids; {REMEDY}")
        return np.memmap(self.path, "<u2", "r")

    def __len__(self) -> int:
        return len(self.tokens)

    def __reduce__(self) -> tuple:
        return TokenFile, (self.path,)


def _map_npy(path: Path) -> np.memmap:
    """The numbers of a real .npy, flat. Raises RunError if they are no token ids, ValueError if it is broken."""
    array = np.lib.format.open_memmap(path, mode="r")
    if array.dtype.kind not in "ui" or not array.size:
        raise RunError(f"{path}: expected token ids, found {array.dtype.name} {list(array.shape)}")
    return np.memmap(path, array.dtype, "r", array.offset, (array.size,))


class Chunks:
    """Token ids [N] cut into instances of at most T = context_length ids; a chunk scores all its ids but its first.

    Without `score_remainder`, as in OLMo: chunk i is tokens[i T : (i + 1) T], the rest is dropped. With it, chunk i is
    tokens[i (T - 1) : i (T - 1) + T], the last maybe shorter: each id but the file's first is scored exactly once.
    """

    def __init__(self, tokens: np.ndarray, context_length: int, score_remainder: bool):
        assert context_length >= 2
        self.tokens, self.context_length, self.score_remainder = tokens, context_length, score_remainder

    def __len__(self) -> int:
        if self.score_remainder:
            return -(-(len(self.tokens) - 1) // (self.context_length - 1)) if len(self.tokens) else 0
        return len(self.tokens) // self.context_length

    def __getitem__(self, index: int) -> np.ndarray:
        """Chunk `index`, [<= T]."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = index * (self.context_length - self.score_remainder)
        return self.tokens[begin : begin + self.context_length]

    def __reduce__(self) -> tuple:
        """A memory map is opened anew by who unpickles it: its pages are not sent."""
        tokens, rest = self.tokens, (self.context_length, self.score_remainder)
        if isinstance(getattr(tokens, "base", None), mmap.mmap):
            return _reopen, (tokens.filename, tokens.dtype, tokens.offset, tokens.shape, *rest)
        return Chunks, (tokens, *rest)


def _reopen(path: Path, dtype: np.dtype, offset: int, shape: tuple[int], *rest: int) -> Chunks:
    return Chunks(np.memmap(path, dtype, "r", offset, shape), *rest)


def count_of(tokens: np.ndarray, token: int) -> int:
    """How often the id `token` is in `tokens` [N], which are not loaded whole."""
    return sum(int((tokens[begin : begin + BLOCK] == token).sum()) for begin in range(0, len(tokens), BLOCK))


def find_end_of_text(tokens: np.ndarray) -> int | None:
    """The id that ends the documents of `tokens` [N], GPT-NeoX-20B's or OLMo's; None if they hold none that does.

    The last id, if it is one of END_OF_TEXT; of a copy that was cut the more frequent of these. TWO_SPACES only where
    it is the last id and neither of them is there.
    """
    last = int(tokens[-1])
    if last in END_OF_TEXT:
        return last
    counts = {end: count_of(tokens, end) for end in END_OF_TEXT}
    if any(counts.values()):
        return max(counts, key=counts.get)
    return last if last == TWO_SPACES else None


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def commit(temporary: Path, path: Path, record: FileRecord) -> None:
    """Make the finished file `temporary` the token file `path`; its record comes last."""
    record_path(path).unlink(missing_ok=True)
    temporary.replace(path)
    write_record(path, record)


def write_record(path: Path, record: FileRecord) -> None:
    """Write the record of the token file `path`, atomically."""
    write_json(record_path(path), {key: value for key, value in asdict(record).items() if value is not None})


def write_token_file(
    path: Path,
    tokens: Iterable[np.ndarray],
    *,
    vocab_size: int,
    counts: Callable[[], dict[str, int]] = dict,
    **record: object,
) -> FileRecord:
    """Write arrays of token ids [N] one after the other as a token file, atomically, with its record.

    It is raw uint16, or above a vocabulary of 65,536 a real .npy of uint32, so that it can be read without the record.
    `record`: the other fields of FileRecord (tokenizer, source ...); `counts`: those that are known once `tokens` have
    come. Raises RunError for an id >= vocab_size, and if there are no tokens.
    """
    dtype, count = token_dtype(vocab_size).newbyteorder("<"), 0
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(_header(dtype, count))
            for part in tokens:
                if len(part) and part.max() >= vocab_size:
                    raise RunError(f"{path}: token id {part.max()}, outside the vocabulary of {vocab_size}")
                file.write(np.ascontiguousarray(part, dtype))
                count += len(part)
            file.seek(0)
            file.write(_header(dtype, count))
            sync(file)
        if not count:
            raise RunError(f"{path}: no tokens to write")
        size = temporary.stat().st_size
        written = FileRecord(sha256_of(temporary), size, count, vocab_size, **record, **counts())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    commit(temporary, path, written)
    return written


def _header(dtype: np.dtype, count: int) -> bytes:
    """Of a real .npy of `count` ids, as long whatever their number; none for uint16."""
    if dtype.itemsize == 2:
        return b""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})
    return header.getvalue()
