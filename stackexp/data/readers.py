"""Read documents: one per text file, per line of a JSON Lines file, or per row of a parquet file.

Text files of any size are read in pieces. A JSON line is read into memory completely, up to MAX_LINE_BYTES, and a
parquet file in batches of rows.
"""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import zstandard

from stackexp.data.columns import ALL_TEXT, Columns, Filter, get_value, name_kind
from stackexp.data.parquet import read_rows
from stackexp.data.sources import TEXT_SUFFIXES, Source, UnreadableSourceError

PIECE_CHARACTERS = 1 << 18  # longer documents are split, after a line feed where there is one
MAX_LINE_BYTES = 1 << 28  # decompressed
ZSTD_READ_BYTES = 1 << 10  # one byte can decompress to 256 KiB


class Piece(NamedTuple):
    """Part of a document's text."""

    text: str
    ends_document: bool


class TokenBlock(NamedTuple):
    """Token ids [N], including end-of-text, with the number of documents ending in them and their bytes of text."""

    ids: np.ndarray
    documents: int
    bytes: int


class FilteredOut(NamedTuple):
    """Documents that do not fulfill the filters."""

    documents: int = 1


class BadLine(NamedTuple):
    """A line or row without a document."""

    location: str  # file:line, or file:row counted from 1
    reason: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


def read_pieces(
    source: Source, columns: Columns = ALL_TEXT, advance: Callable[[int], object] = lambda size: None
) -> Iterator[Piece | BadLine | FilteredOut]:
    """Yield the documents of a text, JSON Lines or parquet file in order, in pieces, and its bad lines.

    `columns` names the text (default: "text") and the filters; text files have neither. `advance` is called with the
    number of bytes read since the last call. Raises UnreadableSourceError if the file cannot be read, is truncated or
    corrupt, and RunError if a parquet file lacks a column or a filter cannot compare it.
    """
    name = source.name.lower()
    try:
        with open(source.path, "rb") as raw:
            if source.is_parquet:
                yield from _read_parquet(source, raw, columns, advance)
                return
            if name.endswith((".gz", ".zst")) and not raw.peek(1):
                raise EOFError("it is empty")
            is_text = name.endswith(TEXT_SUFFIXES)
            position = 0
            for piece in _read_text(source, raw) if is_text else _read_json_lines(source, raw, columns):
                yield piece
                advance(raw.tell() - position)
                position = raw.tell()
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as e:
        raise UnreadableSourceError(f"{source.path}: corrupt or cut short ({e}); replace the file or remove it") from e
    except OSError as e:
        reason = e.strerror or e
        raise UnreadableSourceError(f"{source.path}: cannot be read ({reason}); fix that or remove the file") from e


def cut_into_pieces(parts: Iterable[str]) -> Iterator[Piece]:
    """Yield a document, given in parts of any size, in pieces of at most PIECE_CHARACTERS."""
    rest = ""
    for part in parts:
        rest += part
        begin = 0
        while len(rest) - begin > PIECE_CHARACTERS:
            end = rest.rfind("\n", begin, begin + PIECE_CHARACTERS) + 1 or begin + PIECE_CHARACTERS
            yield Piece(rest[begin:end], False)
            begin = end
        rest = rest[begin:]
    yield Piece(rest, True)


def _read_text(source: Source, raw: BinaryIO) -> Iterator[Piece | BadLine]:
    if line := _find_invalid_line(raw):
        yield BadLine(f"{source.name}:{line}", "invalid UTF-8")
    elif source.size:
        raw.seek(0)
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        yield from cut_into_pieces(iter(lambda: text.read(PIECE_CHARACTERS), ""))
        text.detach()


def _find_invalid_line(raw: BinaryIO) -> int | None:
    """Return the number of the first line that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    while True:
        chunk = raw.read(PIECE_CHARACTERS)
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as e:
            return line + e.object.count(b"\n", 0, e.start)
        if not chunk:
            return None
        line += chunk.count(b"\n")


class _BadDocumentError(Exception):
    """A JSON line without a document; the message is the reason."""


def _read_json_lines(source: Source, raw: BinaryIO, columns: Columns) -> Iterator[Piece | BadLine | FilteredOut]:
    file, number = _decompress(source.name.lower(), raw), 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        try:
            if len(line) > MAX_LINE_BYTES:
                _skip_line(line, file)
                raise _BadDocumentError(f"longer than {MAX_LINE_BYTES:,} bytes")
            if not line.isspace():
                text = _parse_document(line, columns)
                yield from [FilteredOut()] if text is None else cut_into_pieces([text])
        except _BadDocumentError as e:
            yield BadLine(f"{source.name}:{number}", str(e))


def _parse_document(line: bytes, columns: Columns) -> str | None:
    """Return the text of a JSON line, or None if it is filtered out. Raises _BadDocumentError for an invalid line."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
        if not all(condition.accepts(_get_comparable(record, condition)) for condition in columns.filters):
            return None
        text = get_value(record, columns.text)
        text.encode()  # fails for lone surrogates
    except UnicodeError as e:
        raise _BadDocumentError("invalid UTF-8") from e
    except json.JSONDecodeError as e:
        raise _BadDocumentError(f"invalid JSON ({e.msg})") from e
    except ValueError as e:  # a number with more digits than Python converts
        raise _BadDocumentError(str(e).partition(":")[0]) from e
    except (KeyError, TypeError, AttributeError, RecursionError) as e:
        raise _BadDocumentError(f"no {columns.text}") from e
    if not text:
        raise _BadDocumentError(f"no {columns.text}")
    return text


def _get_comparable(record: Any, condition: Filter) -> Any:
    """Return the value that a filter compares. Raises _BadDocumentError if it is missing or cannot be compared."""
    try:
        value = get_value(record, condition.column)
    except (KeyError, TypeError) as e:
        raise _BadDocumentError(f"no {condition.column}") from e
    if value is not None and (mismatch := condition.find_mismatch(name_kind(value))):
        raise _BadDocumentError(mismatch)
    return value


def _read_parquet(
    source: Source, raw: BinaryIO, columns: Columns, advance: Callable[[int], object]
) -> Iterator[Piece | BadLine | FilteredOut]:
    for number, (text, encoded) in enumerate(read_rows(source, raw, columns, advance), 1):
        try:
            values = [value.decode() if isinstance(value, bytes) else value for value in encoded]
            if not all(condition.accepts(value) for condition, value in zip(columns.filters, values, strict=True)):
                yield FilteredOut()
                continue
            if not text:
                raise _BadDocumentError(f"no {columns.text}")
            yield from cut_into_pieces([text.decode()])
        except (UnicodeError, _BadDocumentError) as e:
            yield BadLine(f"{source.name}:{number}", "invalid UTF-8" if isinstance(e, UnicodeError) else str(e))


def _skip_line(line: bytes, file: BinaryIO) -> None:
    """Read to the end of a line that starts with `line`."""
    while line and not line.endswith(b"\n"):
        line = file.readline(PIECE_CHARACTERS)


def _decompress(name: str, raw: BinaryIO) -> BinaryIO:
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(raw))
    return io.BufferedReader(_ZstdFile(raw), 1 << 20) if name.endswith(".zst") else raw


class _ZstdFile(io.RawIOBase):
    """The decompressed contents of a zstd file.

    Raises EOFError if the last frame is incomplete; `ZstdDecompressor.stream_reader` does not detect that.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame: zstandard.ZstdDecompressionObj | None = None  # the frame that is being read
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` and return the number of bytes written, 0 at the end of the file."""
        while not self._output:
            self._input = self._input or self._raw.read(ZSTD_READ_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the last zstd frame is not complete")
                return 0
            frame = self._frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            self._output = memoryview(frame.decompress(self._input))
            self._frame, self._input = (None, frame.unused_data) if frame.eof else (frame, b"")
        size = min(len(buffer), len(self._output))
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size
