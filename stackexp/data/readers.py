"""Documents out of files: plain text (one document a file) and JSON lines (Dolma's id, text, source; one a line).

Memory is bounded whatever a document's length.
"""

import codecs
import errno
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import zstandard

from stackexp.data.long_lines import long_text
from stackexp.data.sources import TEXT_SUFFIXES, Source
from stackexp.errors import RunError

PIECE = 1 << 18  # characters tokenised at a time; longer documents are cut, at a line's end where there is one
LONG_LINE = 1 << 22  # bytes; a longer line is never whole in memory
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class BrokenSource(RunError):
    """A source file that cannot be read to its end."""


class Piece(NamedTuple):
    """Part of a document's text; `ends_document`: it is the last part."""

    text: str
    ends_document: bool


class TokenBlock(NamedTuple):
    """Token ids [N], end-of-text included: how many documents end among them, and the bytes of their text."""

    ids: np.ndarray
    documents: int
    bytes: int


class BadLine(NamedTuple):
    """A line that holds no document: where (file:line) and why."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


def read_pieces(
    source: Source, advance: Callable[[int], None] = lambda size: None, scratch: Path | None = None
) -> Iterator[Piece | BadLine]:
    """The documents of a file; `advance` is told of the bytes as they are read.

    `scratch`: folder for what lines that are too long for memory need of the disk (None: the system's).
    Raises BrokenSource if the file cannot be read, is cut short or not what its name says.
    """
    name, position = source.name.lower(), 0
    try:
        with open(source.path, "rb") as raw:
            if name.endswith((".gz", ".zst")) and not raw.peek(1):
                raise EOFError("it is empty")
            pieces = _read_text(source, raw) if name.endswith(TEXT_SUFFIXES) else _read_json_lines(source, raw, scratch)
            for piece in pieces:
                yield piece
                advance(raw.tell() - position)
                position = raw.tell()
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as e:
        raise BrokenSource(f"{source.path}: corrupt or cut short ({e}); replace the file or remove it") from e
    except OSError as e:
        if e.errno in NO_ROOM:  # it was reading that needed room
            raise
        raise BrokenSource(f"{source.path}: cannot be read ({e.strerror or e})") from e


def cut_into_pieces(parts: Iterable[str]) -> Iterator[Piece]:
    """A document, given in parts, as pieces of at most PIECE characters, cut after a newline where there is one."""
    held = ""
    for part in parts:
        held += part
        begin = 0
        while len(held) - begin > PIECE:
            end = held.rfind("\n", begin, begin + PIECE) + 1 or begin + PIECE
            yield Piece(held[begin:end], False)
            begin = end
        held = held[begin:]
    yield Piece(held, True)


def _read_text(source: Source, raw: BinaryIO) -> Iterator[Piece | BadLine]:
    if line := _invalid_line(raw):
        yield BadLine(f"{source.name}:{line}", "invalid UTF-8")
        return
    raw.seek(0)
    if raw.peek(1):
        text = io.TextIOWrapper(raw, encoding="utf-8", newline="")
        yield from cut_into_pieces(iter(lambda: text.read(PIECE), ""))
        text.detach()


def _invalid_line(raw: BinaryIO) -> int | None:
    """The number of the first line that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    while True:
        chunk = raw.read(PIECE)
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as e:
            return line + e.object.count(b"\n", 0, e.start)
        if not chunk:
            return None
        line += chunk.count(b"\n")


def _read_json_lines(source: Source, raw: BinaryIO, scratch: Path | None) -> Iterator[Piece | BadLine]:
    file, number = _decompressed(source.name.lower(), raw), 0
    while line := file.readline(LONG_LINE):
        number += 1
        short = len(line) < LONG_LINE or line.endswith(b"\n")
        if short and line.isspace():
            continue
        where = f"{source.name}:{number}"
        try:
            if short:
                text = json.loads(line.decode())["text"]
                text.encode()
                parts = [text]
            else:
                parts = long_text(_to_its_end(line, file), scratch)
        except UnicodeError:
            yield BadLine(where, "invalid UTF-8")
        except json.JSONDecodeError as e:
            yield BadLine(where, f"invalid JSON ({e.msg})")
        except ValueError as e:  # TooLong, or a number of more digits than Python reads
            yield BadLine(where, str(e).partition(":")[0])
        except (KeyError, TypeError, AttributeError, RecursionError):
            yield BadLine(where, "no text")
        else:
            yield from cut_into_pieces(parts) if parts != [""] else [BadLine(where, "no text")]


def _to_its_end(line: bytes, file: BinaryIO) -> Iterator[bytes]:
    """The parts of a line that begins with `line`."""
    yield line
    while not line.endswith(b"\n") and (line := file.readline(LONG_LINE)):
        yield line


def _decompressed(name: str, raw: BinaryIO) -> BinaryIO:
    if name.endswith(".gz"):
        return gzip.open(raw)
    return io.BufferedReader(_Zstd(raw), 1 << 20) if name.endswith(".zst") else raw


class _Zstd(io.RawIOBase):
    """Zstandard frames, decompressed. Unlike zstandard's own reader it raises EOFError on a frame cut short."""

    def __init__(self, raw: BinaryIO):
        self.raw, self.pending, self.frame, self.data = raw, b"", None, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self.data:
            self.pending = self.pending or self.raw.read(1 << 10)  # which may be 1 << 18 times as long decompressed
            if not self.pending:
                if self.frame is not None:
                    raise EOFError("the last zstd frame is not complete")
                return 0
            self.frame = self.frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            self.data, self.pending = memoryview(self.frame.decompress(self.pending)), b""
            if self.frame.eof:
                self.frame, self.pending = None, self.frame.unused_data
        size = min(len(buffer), len(self.data))
        buffer[:size], self.data = self.data[:size], self.data[size:]
        return size
