"""A line that is read in parts means what it means when it is read whole."""

import codecs
import gzip
import io
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard

from stackexp.data import long_lines, readers
from stackexp.data.long_lines import TooLong, long_text
from stackexp.data.readers import BadLine, Piece, read_pieces
from stackexp.data.sources import find_sources

ALPHABET = ["a", " ", "\n", "\t", '"', "\\", "/", "é", "東", "🙂", "\x7f", "\\u0041", "u", "d83d", "\u2028"]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Long is what exceeds a few characters, and all is read in parts of a few. Not so in processes of their own."""
    monkeypatch.setattr(long_lines, "HELD", 5)
    monkeypatch.setattr(long_lines, "PART", 7)


def parts(line: bytes, size: int) -> list[bytes]:
    return [line[n : n + size] for n in range(0, len(line), size)]


def in_parts(line: bytes, size: int) -> str | type:
    """The text of a line, or the kind of what is raised."""
    try:
        return "".join(long_text(parts(line, size)))
    except Exception as error:
        return kind(error)


def whole(line: bytes) -> str | type:
    try:
        text = json.loads(line.decode())["text"]
        text.encode()
        return text
    except Exception as error:
        return kind(error)


def kind(error: Exception) -> type:
    """What the reader tells apart: of several mistakes the words may name another one."""
    for known in (UnicodeError, json.JSONDecodeError):
        if isinstance(error, known):
            return known
    return AttributeError if isinstance(error, KeyError | TypeError) else type(error)


def documents(count: int) -> list[bytes]:
    """Lines with all that JSON knows, of random characters, escaped in both ways."""
    generator, lines = random.Random(0), []

    def string() -> str:
        return "".join(generator.choices(ALPHABET, k=generator.choice([0, 1, 4, 30, 90])))

    for _ in range(count):
        record = {"id": string(), "text": string(), "more": {"text": [string(), 1, None, {string(): 2.5}]}}
        items = list(record.items())
        generator.shuffle(items)
        lines.append(json.dumps(dict(items), ensure_ascii=generator.random() < 0.5).encode() + b"\n")
    return lines


@pytest.mark.parametrize("size", [1, 2, 3, 13, 1000])
def test_the_text_is_the_same_as_of_a_line_read_whole(size):
    for line in documents(60):
        assert in_parts(line, size) == json.loads(line)["text"]


def test_broken_lines_are_refused_for_the_same_reason():
    generator, reasons = random.Random(1), set()
    for line in documents(400):
        data = bytearray(line)
        for _ in range(generator.choice([1, 1, 3])):
            at = generator.randrange(len(data))
            data[at : at + generator.choice([0, 1])] = generator.choice(
                [b"", b"\\", b'"', b"\xff", b"\n", b"}", b"\\u"]
            )
        expected = whole(bytes(data))
        reasons.add(expected if isinstance(expected, type) else str)
        assert in_parts(bytes(data), 11) == expected, bytes(data)
    assert reasons == {str, UnicodeError, json.JSONDecodeError, AttributeError}, "else this tests little"


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "first of many words", "text": "second of many words"}',
        b'{"text": 3, "other": "long enough to be set aside"}',
        b'["long enough to be set aside"]',
        b'"long enough to be set aside"',
        b'{"a long key, set aside": "text"}',
        b'{"text": "never closed, but long',
        b'{"text": "short',
        b'{"text": "half a pair \\ud83d"}',
        b'{"text": "half a pair \\ud83d and more words"}',
        b'{"text": "two first halves \\ud83d\\ud83d\\ude00"}',
        b'{"text": "the second half alone \\ude00 is here"}',
        b'{"half": "half a pair \\ud83d in another string", "text": "and a good one, long enough"}',
        b'{"text": "no such escape \\x in JSON"}',
        b'{"text": "a raw\ttab in it, which JSON forbids"}',
        b'{"text": "a cut escape \\u12',
        b'{"text": "ends in a backslash \\',
        b'{"text": "invalid JSON first" nonsense, "then": "\xff"}',
        b'{"text": ""}',
        b"",
        b"nonsense, and more of it",
    ],
)
def test_odd_lines(line):
    for size in (1, 4, 1000):
        assert in_parts(line, size) == whole(line)


def test_a_line_of_too_much_beside_its_strings(monkeypatch):
    monkeypatch.setattr(long_lines, "REST", 1000)
    line = json.dumps({"numbers": [1] * 1000, "text": "x" * 5000}).encode()
    with pytest.raises(TooLong):
        long_text(parts(line, 100))
    assert in_parts(json.dumps({"text": "x" * 5000}).encode(), 100) == "x" * 5000


def test_many_short_strings_take_no_longer_than_their_length(monkeypatch):
    """As they did while what is left of 4 MB was copied for each of them."""
    monkeypatch.setattr(long_lines, "HELD", 1 << 12)
    line = json.dumps({"words": ["ab"] * 700_000, "text": "x"}).encode()
    start = time.process_time()
    assert in_parts(line, 1 << 22) == "x"
    assert time.process_time() - start < 20


def lines_file(folder: Path, name: str, lines: list[bytes]) -> list[Piece | BadLine]:
    """What is read of a file of these lines."""
    data = b"\n".join(lines)
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)(data)
    (folder / name).write_bytes(packed)
    return list(read_pieces(find_sources(folder / name)[0], scratch=folder))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_the_limit_changes_nothing_in_a_file(tmp_path, monkeypatch, name):
    monkeypatch.setattr(readers, "PIECE", 50)
    text = "words of a line\nand more of them, " * 9
    good = [json.dumps({"text": text * n, "id": "x" * 99}).encode() for n in range(1, 5)]
    bad = [
        b'{"text": "' + b"x" * 999,
        b'{"text": "' + b"\xff" * 999 + b'"}',
        b'{"id": "' + b"x" * 999 + b'"}',
        b" " * 9,
    ]
    lines = [good[0], bad[0], good[1], bad[1], bad[3], good[2], bad[2], b'{"text": ""}', b'{"text": "', good[3]]
    usual = lines_file(tmp_path, name, lines)
    monkeypatch.setattr(readers, "LONG_LINE", 100)
    assert lines_file(tmp_path, name, lines) == usual
    assert [str(piece) for piece in usual if isinstance(piece, BadLine)] == [
        f"{name}:2: invalid JSON (Invalid control character at)",
        f"{name}:4: invalid UTF-8",
        f"{name}:7: no text",
        f"{name}:8: no text",
        f"{name}:9: invalid JSON (Invalid control character at)",
    ]
    assert "".join(piece.text for piece in usual if isinstance(piece, Piece)) == text * 10
    assert sum(piece.ends_document for piece in usual if isinstance(piece, Piece)) == 4


def test_a_gzip_that_breaks_within_a_long_line_is_one_line(tmp_path, monkeypatch):
    from stackexp.errors import RunError

    monkeypatch.setattr(readers, "LONG_LINE", 100)
    text = "".join(random.Random(0).choices("abcdefgh ", k=100_000))
    data = bytearray(gzip.compress(json.dumps({"text": text}).encode()))
    data[len(data) // 2] ^= 255
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(RunError, match=r"a\.jsonl\.gz: corrupt or cut short"):
        list(read_pieces(find_sources(tmp_path / "a.jsonl.gz")[0]))


MEASURE = r"""
import re, sys
from pathlib import Path
from stackexp.data.packing import write_unit
from stackexp.data.readers import read_pieces
from stackexp.data.sources import find_sources
from stackexp.data.tokenizer import load_tokenizer
folder, name, tokenizer = map(Path, sys.argv[1:])
memory = lambda: int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])  # not the parent's
loaded, before = load_tokenizer(tokenizer) if tokenizer.name else None, memory()
pieces = read_pieces(find_sources(folder / name)[0], scratch=folder)
if loaded:
    unit = write_unit(folder, pieces, loaded, 2048)
    count, size = unit.documents, unit.bytes
else:
    count = size = 0
    for piece in pieces:
        count, size = count + piece.ends_document, size + len(piece.text.encode())
print(count, size, memory() - before)
"""


def memory_of_one_document(folder: Path, name: str, size: int, tokenizer: Path | str = "") -> float:
    """Read (with a tokenizer: prepare) a document of about `size` bytes; peak of memory beyond the program's, in MB."""
    text = Path(codecs.__file__).read_text()[: 1 << 15]
    text = text * (size // len(text)) + "ends here"
    data = text.encode() if name.endswith(".txt") else json.dumps({"text": text}).encode()
    pack = {".gz": lambda data: gzip.compress(data, 1), ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
    (folder / name).write_bytes(pack(data))
    command = [sys.executable, "-c", MEASURE, folder, name, tokenizer]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    count, size, kilobytes = map(int, result.stdout.split())
    assert (count, size) == (1, len(text.encode()))
    return kilobytes / 1024


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt"])
def test_memory_does_not_grow_with_a_document(tmp_path, name):
    """Whole in memory, it would take its 25 MB several times. A .zst so small is read in few parts."""
    size, most = (64, 70) if name.endswith(".zst") else (25, 40)
    assert memory_of_one_document(tmp_path, name, size << 20) < most


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt"])
def test_a_document_of_200_mb(tmp_path, name):
    from stackexp.data.tokenizer import train_tokenizer

    (tmp_path / "tokenizer.json").write_text(train_tokenizer([Path(io.__file__).read_text()], 1000).to_str())
    assert memory_of_one_document(tmp_path, name, 200 << 20, tmp_path / "tokenizer.json") < 400


@pytest.mark.slow
def test_a_zst_of_200_mb(tmp_path):
    """Only read: what follows is the same as of the others."""
    assert memory_of_one_document(tmp_path, "a.jsonl.zst", 200 << 20) < 100
