"""JSON lines of any length: a document's text out of a line that is never whole in memory.

Long strings are decoded into a temporary file and replaced by marks as the line is read. What is left is short: the
json module itself judges it, so keys before and after, nested objects, doubled keys and syntax mean what they always
do.
"""

import codecs
import collections
import json
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

HELD = 1 << 12  # characters; a longer string is set aside
REST = 1 << 24  # characters of a line without its long strings
PART = 1 << 20  # bytes of text read back at a time
MARK = secrets.token_hex(16)  # no text begins with it

WHOLE = re.compile(
    r"""(?: [^"\\]++ | \\[^u] | \\u(?![dD][89abAB]).{4}
          | \\u.{4} (?= [^\\] | \\[^u] | \\u.{4} ) (?: \\u[dD][c-fC-F].. )?  # half a pair waits for what follows
        )*+""",
    re.DOTALL | re.VERBOSE,
)
"""As much of a string as can be decoded by itself: never half an escape or half a pair of surrogates."""


class TooLong(ValueError):
    """A line is longer than REST without its long strings."""


def long_text(line: Iterable[bytes], scratch: Path | None = None) -> Iterable[str]:
    """The parts of the "text" of the JSON object in `line`, given in parts. `scratch`: folder for a temporary file.

    Reads the line to its end and raises what json.loads(line.decode())["text"].encode() would, or TooLong.
    """
    line = iter(line)
    characters = _decoded(line)
    aside = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 (open for as long as its text is read)
    try:
        rest, spans = _set_aside(characters, aside)
        text = json.loads(rest)["text"]
    except Exception:
        try:
            collections.deque(characters, 0)  # what is not UTF-8 comes first, as where a line is decoded whole
        finally:
            collections.deque(line, 0)
        raise
    if not text.startswith(MARK):
        text.encode()
        return [text]
    span = spans[int(text.removeprefix(MARK))]
    if span is None:
        raise UnicodeError("half a pair of surrogates")
    return _decoded(_read(aside, *span))


def _set_aside(characters: Iterable[str], aside: IO[bytes]) -> tuple[str, list[tuple[int, int] | None]]:
    """The line with a mark for each long string, and where those are in `aside`: begin, end; None for one that is not
    Unicode. Raises json's errors for a long string, and TooLong."""
    rest, size, spans = [], 0, []
    buffer, at, inside = "", 0, False
    begin = None  # of the string in `aside`, once it is known to be long
    for chunk in characters:
        buffer, at = buffer[at:] + chunk, 0
        while at < len(buffer):
            if not inside:
                quote = buffer.find('"', at)
                inside, begin = quote >= 0, None
                end = quote if inside else len(buffer)
                rest.append(buffer[at:end])
                size += end - at
                at = end + inside
                continue
            end = WHOLE.match(buffer, at).end()
            closed = buffer[end : end + 1] == '"'
            if begin is None and end - at > HELD:
                begin = aside.tell()
                spans.append((begin, begin))
            if begin is not None:
                spans[-1] = _append(buffer[at:end], aside, spans[-1])
                if closed:
                    rest.append(f'"{MARK}{len(spans) - 1}"')
                else:
                    at = end
            elif closed:
                rest.append(f'"{buffer[at : end + 1]}')
                size += end - at
            if not closed:
                break  # until more is read
            at, inside = end + 1, False
        if size > REST:
            raise TooLong("too long beside its text")
    if inside:  # json says what it says of such strings
        rest.append(f'"{buffer[at:]}')
    return "".join(rest), spans


def _append(part: str, aside: IO[bytes], span: tuple[int, int] | None) -> tuple[int, int] | None:
    """Decode part of a JSON string into `aside`; the string's span so far. Raises json's errors."""
    try:
        data = json.loads(f'"{part}"').encode()
    except UnicodeEncodeError:
        return None
    aside.write(data)
    return span and (span[0], aside.tell())


def _read(file: IO[bytes], begin: int, end: int) -> Iterator[bytes]:
    file.seek(begin)
    while (left := end - file.tell()) > 0:
        yield file.read(min(left, PART))


def _decoded(parts: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for part in parts:
        yield decoder.decode(part)
    yield decoder.decode(b"", final=True)
