"""Finding the files of a source folder, and reading their documents."""

import gzip
import json
import os
from unittest.mock import Mock

import pytest
import zstandard
from corpora import prepare_set

from stackexp.data import readers
from stackexp.data.readers import BadLine, Piece
from stackexp.data.sources import find_sources
from stackexp.errors import RunError


def test_linked_folders_are_read_once(tmp_path):
    top, outside = tmp_path / "outer" / "top", tmp_path / "outside"
    for folder in (top / "sub", top / ".store" / "kept", outside / "deep"):
        folder.mkdir(parents=True)
        (folder / f"{folder.name}.txt").write_text("text")
    (tmp_path / "outer" / "sibling.txt").write_text("text")
    (outside / "above.txt").write_text("text")
    links = {"again": top / "sub", "loop": top, "up": top.parent, "zone": outside, "zone2": outside}
    for link, target in (links | {"kept": top / ".store" / "kept"}).items():  # .store is otherwise hidden
        (top / link).symlink_to(target)
    (outside / "back").symlink_to(top)
    (outside / "deep" / "round").symlink_to(outside)
    names = [source.name for source in find_sources(top)]
    assert names == ["kept/kept.txt", "sub/sub.txt", "zone/above.txt", "zone/deep/deep.txt"]
    (tmp_path / "link").symlink_to(top)
    assert [source.name for source in find_sources(tmp_path / "link")] == names


def test_file_name_that_is_not_utf8_is_refused(tmp_path):
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "w") as file:
        file.write("text")
    with pytest.raises(RunError, match=r"the name of 'caf\\udce9.txt' is not UTF-8; rename it") as error:
        find_sources(tmp_path)
    str(error.value).encode()


def test_unreadable_files_and_folders_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "other").symlink_to("nowhere")
    assert [source.name for source in find_sources(tmp_path)] == ["a.txt"]
    (tmp_path / "b.jsonl").symlink_to("nowhere")
    with pytest.raises(RunError, match=r"b\.jsonl: cannot be read \(No such file or directory\)"):
        find_sources(tmp_path)
    (tmp_path / "b.jsonl").unlink()
    monkeypatch.setattr(os, "scandir", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(RunError, match=r"cannot be read \(Permission denied\); fix that") as error:
        prepare_set(tmp_path, tmp_path / "to")
    assert "\n" not in str(error.value)


def test_a_text_file_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 50)
    text = "a line of it\r\nand more of 東京, " * 30 + "\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    pieces = list(readers.read_pieces(find_sources(tmp_path)[0]))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece.text) for piece in pieces) == 50


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16", "utf-32"])
def test_text_in_utf16_is_a_bad_line(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("one line\nand another\n", encoding=encoding)
    [bad] = readers.read_pieces(find_sources(tmp_path)[0])
    assert str(bad).startswith("a.txt:1: ")
    assert "UTF" in bad.reason


@pytest.mark.parametrize(
    ("name", "compress"), [("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)]
)
def test_lines_above_the_limit_are_bad_lines(tmp_path, monkeypatch, name, compress):
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 30)
    empty = len(json.dumps({"text": ""}))
    good, longest, long = (json.dumps({"text": "x" * n}).encode() for n in (5, 100 - empty - 1, 300))
    (tmp_path / name).write_bytes(compress(b"\n".join([good, long, longest, b" ", long, good])))
    pieces = list(readers.read_pieces(find_sources(tmp_path / name)[0]))
    bad = [str(piece) for piece in pieces if isinstance(piece, BadLine)]
    assert bad == [f"{name}:{line}: longer than 100 bytes" for line in (2, 5)]
    text = "".join(piece.text for piece in pieces if isinstance(piece, Piece))
    assert text == "x" * (5 + 100 - empty - 1 + 5)


def test_zstd_files_may_have_large_windows_and_several_frames(tmp_path):
    """The Pushshift archives have windows of 2 GB; many readers refuse more than 128 MB."""
    line, path = json.dumps({"text": "x"}).encode() + b"\n", tmp_path / "a.jsonl.zst"
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    long = compressor.compress(line * 1000) + compressor.flush()
    path.write_bytes(zstandard.compress(line) + long)
    (source,) = find_sources(path)
    assert len(list(readers.read_pieces(source))) == 1001
    for cut in (1, len(long) - 3):  # in the middle and in the header of the second frame
        path.write_bytes(zstandard.compress(line) + long[:-cut])
        with pytest.raises(RunError, match=r"a\.jsonl\.zst: corrupt or cut short") as error:
            list(readers.read_pieces(source))
        assert "\n" not in str(error.value)


def test_a_file_with_only_a_byte_order_mark_has_no_document(tmp_path):
    (tmp_path / "a.txt").write_text("", encoding="utf-8-sig")
    (source,) = find_sources(tmp_path)
    assert list(readers.read_pieces(source)) == []


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path, name):
    text = "text\n" if name == "a.txt" else json.dumps({"text": "text\n"})
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    (source,) = find_sources(tmp_path)
    assert list(readers.read_pieces(source)) == [Piece("text\n", True)]
