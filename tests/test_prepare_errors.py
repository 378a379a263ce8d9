"""Bad lines, unreadable sources, a full disk and missing permissions."""

import gzip
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zstandard
from corpora import TEXTS, json_lines, prepare_set, read_files

from stackexp.cli import main
from stackexp.data.shards import TokenSet
from stackexp.errors import RunError

BAD = [
    (b'{"text": "good"}', None),
    (b"{nonsense", "invalid JSON"),
    (b'{"id": 1}', "no text"),
    (b'{"text": 3}', "no text"),
    (b'{"text": ""}', "no text"),
    (b"[1, 2]", "no text"),
    (b"", None),
    (b'{"text": "x", "n": ' + b"1" * 5000 + b"}", "Exceeds the limit"),
    (b'{"text": "\xff"}', "invalid UTF-8"),
    (b'{"text": "\\ud800"}', "invalid UTF-8"),
    (b'{"text": "also good"}', None),
]


@pytest.fixture
def bad_source(tmp_path) -> Path:
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(b"\n".join(line for line, _ in BAD)))
    (folder / "text.txt").write_bytes(b"one\ntwo\n\xffthree")
    (folder / "good.txt").write_text(TEXTS[1])
    (folder / "more.jsonl.xz").write_bytes(b"")
    return folder


def test_bad_lines_are_counted_and_logged(bad_source, tmp_path, capsys):
    options = ["--to", str(tmp_path / "to"), "--vocab-size", "300", "--context-length", "32"]
    assert main(["data", "prepare", str(bad_source), *options]) == 0
    expected = [f"lines.jsonl.gz:{n}: {reason}" for n, (_, reason) in enumerate(BAD, 1) if reason]
    expected.append("text.txt:3: invalid UTF-8")
    log = (tmp_path / "to" / "bad_lines.log").read_text().splitlines()
    assert [line.split(" (")[0] for line in log] == expected
    corpus = TokenSet(tmp_path / "to").corpus
    assert (corpus.bad_lines, corpus.documents) == (len(expected), 3)
    output, errors = capsys.readouterr()
    assert f"files not read: 1 with other suffixes (.xz), such as {bad_source / 'more.jsonl.xz'}" in errors
    assert "9 bad lines:\n  lines.jsonl.gz:2: invalid JSON" in output
    assert f"data.kind=shards data.path={tmp_path / 'to'}" in output


def test_strict_stops_at_the_first_bad_line(bad_source, tmp_path):
    first = r"lines\.jsonl\.gz:2"
    for workers, message in {1: first, 2: rf"{first}|text\.txt:3"}.items():  # either process may be first
        with pytest.raises(RunError, match=message) as error:
            prepare_set(bad_source, tmp_path / str(workers), strict=True, unit_bytes=1, workers=workers)
        assert "\n" not in str(error.value)
    prepare_set(bad_source, tmp_path / "lenient", context_length=16, unit_bytes=1)
    (tmp_path / "lenient" / "corpus.json").unlink()
    with pytest.raises(RunError, match=first):
        prepare_set(bad_source, tmp_path / "lenient", context_length=16, strict=True, unit_bytes=1)


def flip_middle_byte(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 255]) + data[len(data) // 2 + 1 :]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, b"", "no such file or folder"),
        ("a.png", b"x", r"nothing to read \(found \.png\)"),
        ("prepared/", b"", "source: contains only prepared sets; give the files from which they were prepared"),
        ("a.jsonl", b"{}\n" * 5, r"no documents, but 5 bad lines, the first: a\.jsonl:1: no text; correct the files"),
        ("a.jsonl.gz", gzip.compress(json_lines(TEXTS))[:-9], r"a\.jsonl\.gz: corrupt or cut short"),
        ("a.jsonl.gz", flip_middle_byte(gzip.compress(json_lines(TEXTS))), r"a\.jsonl\.gz: corrupt or cut short"),
        ("a.jsonl.zst", zstandard.compress(json_lines(TEXTS))[:-9], r"a\.jsonl\.zst: corrupt or cut short"),
        ("a.jsonl.zst", b"", r"a\.jsonl\.zst: corrupt or cut short \(it is empty\)"),
    ],
)
def test_unreadable_source_is_a_one_line_error(tmp_path, name, content, message):
    source = tmp_path / "source"
    if name:
        source.mkdir()
        if name.endswith("/"):
            prepare_set(Path(__file__), source / name, context_length=16)
        else:
            (source / name).write_bytes(content)
    with pytest.raises(RunError, match=message) as error:
        prepare_set(source, tmp_path / "to")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "to" / "corpus.json").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_all_unreadable_sources_are_reported_and_other_units_are_kept(tmp_path, capsys, workers):
    source, to = tmp_path / "source", tmp_path / "to"
    source.mkdir()
    prepare_set(Path(__file__), tmp_path / "other")
    settings = {"tokenizer": tmp_path / "other" / "tokenizer.json", "unit_bytes": 1}
    for n, text in enumerate(TEXTS):
        (source / f"{n}.jsonl.gz").write_bytes(gzip.compress(json_lines([text])))
    for n in (1, 3):
        (source / f"{n}.jsonl.gz").write_bytes(b"broken")
    with pytest.raises(RunError, match=r"3\.jsonl\.gz: corrupt or cut short"):
        prepare_set(source, to, **settings, workers=workers)
    assert "1.jsonl.gz: corrupt or cut short" in capsys.readouterr().err
    inodes = {path.stat().st_ino for path in to.glob("unit.*")}
    assert len(inodes) == 3
    (source / "1.jsonl.gz").unlink()
    (source / "3.jsonl.gz").write_bytes(gzip.compress(json_lines([TEXTS[3]])))
    prepare_set(source, to, **settings, workers=workers)
    assert "sources have changed (1.jsonl.gz and 1 more)" in capsys.readouterr().err
    assert inodes < {path.stat().st_ino for path in to.glob("unit.*")}
    prepare_set(source, tmp_path / "fresh", **settings)
    assert read_files(to) == read_files(tmp_path / "fresh")


def test_full_disk_is_a_one_line_error_and_the_command_resumes(tmp_path):
    """Limit the size of a file: the kernel raises the same kind of OSError as for a full disk."""
    (tmp_path / "source.txt").write_text(TEXTS[0] * 5)
    limited = f"""
import resource, sys
from stackexp.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.exit(main("data prepare {tmp_path}/source.txt --to {tmp_path}/to --vocab-size 300 --context-length 64".split()))
"""
    result = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True)
    assert result.returncode == 1
    message = f"error: {tmp_path}/to: cannot be written (File too large); free some space, then run the same command"
    assert result.stderr.splitlines()[-1].startswith(message)
    assert not list((tmp_path / "to").glob("*unit.*"))
    corpus = prepare_set(tmp_path / "source.txt", tmp_path / "to")
    assert corpus.bytes == len(TEXTS[0].encode()) * 5


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without write permission")
def test_missing_write_permission_is_a_one_line_error():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        Path(folder, "source.txt").write_text(TEXTS[0])
        Path(folder, "set").mkdir()
        code = f"""
import os, sys
from stackexp.cli import main
import stackexp.data.prepare, stackexp.verbs.data
os.setuid(65534)
sys.exit(main("data prepare {folder}/source.txt --to {folder}/set --vocab-size 300".split()))
"""
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert result.returncode == 1
        message = f"error: {folder}/set: cannot be written (Permission denied); fix that, then run the same command"
        assert result.stderr.startswith(message)
        assert len(result.stderr.splitlines()) == 1
        assert not list(Path(folder, "set").iterdir())
