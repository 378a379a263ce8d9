"""Read documents: one per text file, per line of a JSON Lines file, or per row of a parquet file.

Text files of any size are read in pieces. A JSON line is read into memory completely, up to MAX_LINE_BYTES, and a
parquet file in batches of rows, so that memory does not grow with its row groups.
"""

import codecs
import gzip
import io
import json
import operator
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import numpy as np
import zstandard

from stackexp.data.sources import TEXT_SUFFIXES, Source, UnreadableSourceError
from stackexp.errors import RunError, first_line, suggest_name
from stackexp.lazy import LazyModule

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet
else:  # their import takes long
    pa, parquet = LazyModule("pyarrow"), LazyModule("pyarrow.parquet")

PIECE_CHARACTERS = 1 << 18  # read at a time from a text file
MAX_LINE_BYTES = 1 << 28  # decompressed
ZSTD_READ_BYTES = 1 << 10  # one byte can decompress to 256 KiB
ROUNDED_KINDS = {"halffloat": "float16", "float": "float32"}  # pyarrow's and numpy's names
BATCH_ROWS = 256
BUFFER_BYTES = 1 << 20  # per parquet column; without it, pyarrow reads the whole column of a row group

# Columns: the text of a document, and filters on the other columns

COMPARISONS = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
FILTER = re.compile(r"\s*([^=!<>]*[^=!<>\s])\s*(==|!=|>=|<=|>|<)\s*([^=!<>\s].*?)\s*", re.DOTALL)


@dataclass(frozen=True)
class Filter:
    """A condition on a column, such as int_score>=3. Documents that do not satisfy it are left out."""

    column: str  # a.b is the field b of the column a
    comparison: str
    value: str

    def __str__(self) -> str:
        is_plain = re.fullmatch(r"[^=!<>\s\"'](.*\S)?", self.value, re.DOTALL)
        return f"{self.column}{self.comparison}" + (self.value if is_plain else f'"{self.value}"')

    @property
    def number(self) -> Decimal | None:
        """The value as a number, or None if it is not a finite one."""
        try:
            number = Decimal(self.value)
        except ArithmeticError:
            return None
        return number if number.is_finite() else None

    def accepts(self, value: Any) -> bool:
        """Return True if a number or a string satisfies the condition; None and NaN never do.

        Raises ValueError with the reason if the value cannot be compared.
        """
        if value is None or value != value:
            return False
        if isinstance(value, str):
            if self.comparison not in ("==", "!=") and self.number is not None:
                raise ValueError(f"{self.column} is text, which {self.comparison} compares as letters")
            return COMPARISONS[self.comparison](value, self.value)
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            raise ValueError(f"{self.column} is of type {type(value).__name__}, neither number nor text")
        if self.number is None:
            raise ValueError(f"{self.column} is a number, {self.value!r} is not")
        return COMPARISONS[self.comparison](Decimal(repr(value)) if isinstance(value, float) else value, self.number)


@dataclass(frozen=True)
class Columns:
    """The columns that are read: the document's text, and those of the filters, which must all be satisfied."""

    text: str = "text"
    filters: tuple[Filter, ...] = ()


ALL_TEXT = Columns()


def parse_filter(text: str) -> Filter:
    """Parse COLUMN OPERATOR VALUE; quotes around the value are removed. Raises ValueError for anything else."""
    match = FILTER.fullmatch(text)
    if not match:
        raise ValueError(f"expected COLUMN OPERATOR VALUE, quoted, such as 'int_score>=3', found {text!r}")
    column, comparison, value = match.groups()
    return Filter(column, comparison, re.sub(r"""^(["'])(.*)\1$""", r"\2", value, flags=re.DOTALL))


def get_value(record: Any, column: str) -> Any:
    """Return the value of a column in a record, None in a parent that is null.

    Raises KeyError or TypeError if the record has no such column.
    """
    if column in record:
        return record[column]
    for key in column.split("."):
        if record is None:
            return None
        record = record[key]
    return record


# Documents


class Piece(NamedTuple):
    """Part of a document's text."""

    text: str
    ends_document: bool


class TokenBlock(NamedTuple):
    """Token ids [N], including end-of-text, with the number of documents ending in them and their bytes of text."""

    ids: np.ndarray
    documents: int
    bytes: int
    has_known_bytes: bool = True


class FilteredOut(NamedTuple):
    """A document that does not match the filters."""


class BadLine(NamedTuple):
    """A line or row without a document."""

    location: str  # file:line, or file:row counted from 1
    reason: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


Advance = Callable[[int], object]  # called with the number of bytes read since the last call


def read_pieces(
    source: Source, columns: Columns = ALL_TEXT, advance: Advance = lambda size: None
) -> Iterator[Piece | BadLine | FilteredOut]:
    """Yield the documents of a text, JSON Lines or parquet file in order, and its bad lines.

    A text file is yielded in several pieces, any other document in one. `columns` names the text (default: "text") and
    the filters; text files have neither. Raises UnreadableSourceError if the file cannot be read, is truncated or
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


def _read_text(source: Source, raw: BinaryIO) -> Iterator[Piece | BadLine]:
    if bad := _find_invalid_line(source, raw):
        yield bad
    elif source.size:
        raw.seek(0)
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        part = text.read(PIECE_CHARACTERS)  # empty if the file has only a byte order mark
        while following := text.read(PIECE_CHARACTERS):
            yield Piece(part, False)
            part = following
        if part:
            yield Piece(part, True)
        text.detach()


def _find_invalid_line(source: Source, raw: BinaryIO) -> BadLine | None:
    """Return the first line that is not UTF-8 text, or None. Text in UTF-16 or UTF-32 contains NUL bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    while True:
        chunk = raw.read(PIECE_CHARACTERS)
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as e:
            line += e.object.count(b"\n", 0, e.start)
            return BadLine(f"{source.name}:{line}", "invalid UTF-8")
        if (position := chunk.find(b"\0")) >= 0:
            line += chunk.count(b"\n", 0, position)
            return BadLine(f"{source.name}:{line}", "contains NUL bytes, as UTF-16 does; convert the file to UTF-8")
        if not chunk:
            return None
        line += chunk.count(b"\n")


class _BadDocumentError(Exception):
    """A line or row without a document; the message is the reason."""


def _select_text(record: Any, columns: Columns) -> str | None:
    """Return the text of a record, or None if it is filtered out. Raises _BadDocumentError if it has no text."""
    for condition in columns.filters:
        try:
            value = get_value(record, condition.column)
        except (KeyError, TypeError) as e:
            raise _BadDocumentError(f"no {condition.column}") from e
        try:
            if not condition.accepts(value):
                return None
        except ValueError as e:
            raise _BadDocumentError(str(e)) from e
    try:
        text = get_value(record, columns.text)
    except (KeyError, TypeError):
        text = None
    if not isinstance(text, str) or not text:
        raise _BadDocumentError(f"no {columns.text}")
    return text


# JSON Lines


def _read_json_lines(source: Source, raw: BinaryIO, columns: Columns) -> Iterator[Piece | BadLine | FilteredOut]:
    file, number = _decompress(source.name.lower(), raw), 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        try:
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(PIECE_CHARACTERS)
                raise _BadDocumentError(f"longer than {MAX_LINE_BYTES:,} bytes")
            if not line.isspace():
                text = _parse_line(line, columns)
                yield FilteredOut() if text is None else Piece(text, True)
        except _BadDocumentError as e:
            yield BadLine(f"{source.name}:{number}", str(e))


def _parse_line(line: bytes, columns: Columns) -> str | None:
    """Return the text of a JSON line, or None if it is filtered out. Raises _BadDocumentError for an invalid line."""
    try:
        text = _select_text(json.loads(line.decode("utf-8-sig")), columns)
        if text is not None:
            text.encode()  # fails for lone surrogates
    except UnicodeError as e:
        raise _BadDocumentError("invalid UTF-8") from e
    except json.JSONDecodeError as e:
        raise _BadDocumentError(f"invalid JSON ({e.msg})") from e
    except RecursionError as e:
        raise _BadDocumentError("invalid JSON (nested too deeply)") from e
    except ValueError as e:  # a number with more digits than Python converts
        raise _BadDocumentError(str(e).partition(":")[0]) from e
    return text


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


# Parquet


def check_columns(source: Source, columns: Columns) -> None:
    """Raise RunError if an intact parquet file lacks a column, or a filter cannot compare it."""
    try:
        schema = parquet.read_schema(source.path)
    except (pa.ArrowException, OSError):  # reported with the other damaged files when they are read
        return
    _find_columns(source, schema, columns)


def _read_parquet(
    source: Source, raw: BinaryIO, columns: Columns, advance: Advance
) -> Iterator[Piece | BadLine | FilteredOut]:
    try:
        file = parquet.ParquetFile(raw, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True)
        names, columns = _find_columns(source, file.schema_arrow, columns)
        number = position = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=names, use_threads=False):
            for record in _list_records(batch):
                number += 1
                try:
                    if record is None:
                        raise _BadDocumentError("invalid UTF-8")
                    text = _select_text(record, columns)
                    yield FilteredOut() if text is None else Piece(text, True)
                except _BadDocumentError as e:
                    yield BadLine(f"{source.name}:{number}", str(e))
            done = source.size * number // file.metadata.num_rows
            advance(done - position)
            position = done
    except (pa.ArrowException, OSError) as e:
        if isinstance(e, OSError) and e.errno:  # of the file system
            raise
        message = f"{source.path}: corrupt or cut short ({first_line(e)}); replace the file or remove it"
        raise UnreadableSourceError(message) from e


def _list_records(batch: "pa.RecordBatch") -> list[dict[str, Any] | None]:
    """Return each row as a dictionary, None if its text is not UTF-8."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return [record for row in range(batch.num_rows) for record in _list_records(batch.slice(row, 1))]


def _find_columns(source: Source, schema: "pa.Schema", columns: Columns) -> tuple[list[str], Columns]:
    """Return the names of the columns to read, and the filters with values rounded to the precision of the columns.

    A stored 32-bit or 16-bit 0.65 is equal to the 0.65 of a filter.
    """
    name, kind = _find_column(source, schema, columns.text)
    if not (pa.types.is_null(kind) or _is_text(kind)):
        raise RunError(f"{source.path}: column {columns.text!r} is {kind}, not text; choose another --text-column")
    names, filters = [name], []
    for condition in columns.filters:
        name, kind = _find_column(source, schema, condition.column)
        names.append(name)
        try:
            condition.accepts(_make_sample(condition.column, kind))
        except ValueError as e:
            raise RunError(f"{source.path}: --filter '{condition}': {e}; correct or remove the filter") from e
        if str(kind) in ROUNDED_KINDS:
            assert condition.number is not None, "accepts has compared it"
            with np.errstate(over="ignore"):
                rounded = np.array(float(condition.number), ROUNDED_KINDS[str(kind)])
            if np.isfinite(rounded):  # a larger number has no value of this type
                condition = replace(condition, value=repr(float(rounded)))
        filters.append(condition)
    return list(dict.fromkeys(names)), Columns(columns.text, tuple(filters))


def _make_sample(column: str, kind: "pa.DataType") -> str | int | None:
    """Return a value of the kind that filters compare. Raises ValueError if they cannot compare it."""
    if _is_text(kind) or pa.types.is_null(kind):
        return "" if _is_text(kind) else None
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return 0
    raise ValueError(f"{column} is of type {kind}, neither number nor text")


def _is_text(kind: "pa.DataType") -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _find_column(source: Source, schema: "pa.Schema", name: str) -> tuple[str, "pa.DataType"]:
    """Return the name under which pyarrow reads a column or the field a.b of one, and its type."""
    path = [name] if name in schema.names else name.split(".")
    if (count := schema.names.count(path[0])) > 1:
        raise RunError(f"{source.path}: {count} columns are named {path[0]!r}; rename all but one")
    fields, kind = list(schema), None
    for number, part in enumerate(path):
        kind = next((field.type for field in fields if field.name == part), None)
        if kind is None:
            known = [".".join([*path[:number], field.name]) for field in fields]
            hint = suggest_name(name, known) or f"; it has {', '.join(known[:20]) or 'no such field'}"
            raise RunError(f"{source.path}: no column {name!r}{hint}")
        if pa.types.is_null(kind):  # a column without any value, which has no fields either
            return ".".join(path[: number + 1]), kind
        fields = list(kind) if pa.types.is_struct(kind) else []
    return ".".join(path), kind.value_type if pa.types.is_dictionary(kind) else kind
