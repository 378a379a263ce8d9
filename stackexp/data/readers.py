"""Documents out of files: plain text (one document a file) and JSON lines (Dolma's id, text, source; one a line)."""

import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import zstandard

from stackexp.errors import RunError

TEXT = (".txt", ".text", ".md", ".rst", ".py")
JSON_LINES = (".jsonl", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
PIECE = 1 << 18  # characters tokenised at a time; longer documents are cut, at a line's end where there is one


@dataclass(frozen=True)
class Source:
    """One input file: `name` is its path relative to the source folder, with slashes."""

    path: str
    name: str
    size: int
    modified: int  # ns


class Piece(NamedTuple):
    """Part of a document's text; `ends`: it is the last part."""

    text: str
    ends: bool


class BadLine(NamedTuple):
    """A line that holds no document: where (file:line) and why."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


def find_sources(source: Path) -> list[Source]:
    """The readable files of a folder, in order of their names, or the one file given.

    Hidden files and folders are left out. Raises RunError if nothing is there to read.
    """
    if not source.exists():
        raise RunError(f"{source}: no such file or folder")
    paths = [source] if source.is_file() else sorted(_walk(source), key=lambda p: p.relative_to(source).as_posix())
    known = [p for p in paths if p.name.lower().endswith(TEXT + JSON_LINES)]
    if not known:
        seen = ", ".join(sorted({p.suffix or p.name for p in paths})[:8]) or "no files"
        raise RunError(f"{source}: nothing to read (found {seen}); known are {' '.join(TEXT + JSON_LINES)}")
    base = source.parent if source.is_file() else source
    found = []
    for path in known:
        stat = path.stat()
        found.append(Source(str(path), path.relative_to(base).as_posix(), stat.st_size, stat.st_mtime_ns))
    return found


def _walk(folder: Path) -> Iterator[Path]:
    """Files that are not hidden. Links to folders are followed last, so that each folder is read once, and never up."""
    top, seen, starts = folder.resolve(), set(), [folder]
    for start in starts:  # grows by the links that are found
        for root, folders, files in os.walk(start):
            real = Path(root).resolve()
            if real in seen or real in top.parents:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(f for f in folders if not f.startswith("."))
            starts += [Path(root, f) for f in folders if Path(root, f).is_symlink()]
            yield from (Path(root, f) for f in files if not f.startswith(".") and Path(root, f).is_file())


def read(source: Source, advance: Callable[[int], None] = lambda size: None) -> Iterator[Piece | BadLine]:
    """The documents of a file; `advance` is told of the bytes as they are read.

    Raises RunError if the file cannot be read, is cut short or not what its name says.
    """
    name, position = source.name.lower(), 0
    try:
        with open(source.path, "rb") as raw:
            read_kind = _read_text if name.endswith(TEXT) else _read_json_lines
            for piece in read_kind(source, raw):
                yield piece
                advance(raw.tell() - position)
                position = raw.tell()
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as e:
        raise RunError(f"{source.path}: corrupt or cut short ({e}); replace the file or remove it") from e
    except OSError as e:
        raise RunError(f"{source.path}: cannot be read ({e.strerror or e})") from e


def cut(text: str) -> Iterator[Piece]:
    """A document as pieces of at most PIECE characters, cut after a newline where there is one."""
    begin = 0
    while len(text) - begin > PIECE:
        end = text.rfind("\n", begin, begin + PIECE) + 1 or begin + PIECE
        yield Piece(text[begin:end], False)
        begin = end
    yield Piece(text[begin:], True)


def _read_text(source: Source, raw: BinaryIO) -> Iterator[Piece | BadLine]:
    if line := _invalid_line(raw):
        yield BadLine(f"{source.name}:{line}", "invalid UTF-8")
        return
    raw.seek(0)
    text = io.TextIOWrapper(raw, encoding="utf-8", newline="")
    piece = text.read(PIECE) + text.readline(PIECE)
    while piece:
        following = text.read(PIECE) + text.readline(PIECE)
        yield Piece(piece, not following)
        piece = following
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


def _read_json_lines(source: Source, raw: BinaryIO) -> Iterator[Piece | BadLine]:
    for number, line in enumerate(_decompressed(source.name.lower(), raw), 1):
        if line.isspace():
            continue
        try:
            text = json.loads(line.decode())["text"]
            text.encode()
        except UnicodeError:
            yield BadLine(f"{source.name}:{number}", "invalid UTF-8")
        except json.JSONDecodeError as e:
            yield BadLine(f"{source.name}:{number}", f"invalid JSON ({e.msg})")
        except (KeyError, TypeError, AttributeError, RecursionError):
            yield BadLine(f"{source.name}:{number}", "no text")
        else:
            yield from cut(text) if text else [BadLine(f"{source.name}:{number}", "no text")]


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
            self.pending = self.pending or self.raw.read(1 << 17)
            if not self.pending:
                if self.frame is not None:
                    raise EOFError("the last zstd frame is not complete")
                return 0
            self.frame = self.frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            self.data, self.pending = self.frame.decompress(self.pending), b""
            if self.frame.eof:
                self.frame, self.pending = None, self.frame.unused_data
        size = min(len(buffer), len(self.data))
        buffer[:size], self.data = self.data[:size], self.data[size:]
        return size
