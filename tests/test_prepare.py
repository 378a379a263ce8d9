import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from corpora import TEXTS, files_of, json_lines, write_many

from stackexp.data.packing import read_unit
from stackexp.data.prepare import _sample, prepare
from stackexp.data.readers import PIECE_CHARACTERS
from stackexp.data.shards import Corpus, TokenSet
from stackexp.data.sources import find_sources
from stackexp.errors import RunError
from stackexp.verbs.data_prepare import main

T = 64
ODD = ["naïve 東京 🙂\r\n", "<|endoftext|>", "x", "tabs\tand\n\n\nlines\n", "no newline " * (PIECE_CHARACTERS // 5)]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Documents of every kind; in order: TEXTS[0], ODD, TEXTS[1:3], TEXTS[3:], ODD[0]."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "b").mkdir()
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.txt").write_text("not read")
    (folder / "a.txt").write_text(TEXTS[0])
    (folder / "b" / "1.jsonl").write_bytes(json_lines(ODD))
    (folder / "b" / "2.jsonl.gz").write_bytes(gzip.compress(json_lines(TEXTS[1:3])))
    two_frames = [zstandard.compress(json_lines([t])) for t in TEXTS[3:]]
    (folder / "b" / "3.jsonl.zst").write_bytes(b"".join(two_frames))
    (folder / "c.md").write_bytes(ODD[0].encode())
    (folder / "d.png").write_bytes(b"\x89PNG")
    return folder


DOCUMENTS = [TEXTS[0], *ODD, *TEXTS[1:], ODD[0]]


@pytest.fixture(scope="module")
def prepared(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "set"
    prepare(source, folder, vocab_size=400, context_length=T, workers=1, progress=False)
    return folder


def tokens_of(folder: Path) -> np.ndarray:
    opened = TokenSet(folder)
    return np.concatenate([opened[i] for i in range(len(opened))])


def test_decoding_gives_the_documents_back_in_order(prepared):
    opened = TokenSet(prepared)
    corpus, tokenizer = opened.corpus, opened.load_tokenizer()
    tail = np.load(prepared / "unit.00000" / "tail.npy")
    tokens = np.concatenate([tokens_of(prepared), tail])
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    assert text == "".join(document + "<|endoftext|>" for document in DOCUMENTS)
    assert corpus.documents == len(DOCUMENTS) == (tokens == 0).sum()
    assert corpus.bytes == sum(len(d.encode()) for d in DOCUMENTS)
    assert corpus.tokens == len(tokens) == corpus.sequences * T + corpus.dropped_tokens
    assert corpus.dropped_tokens == len(tail) < T
    assert corpus.sources == ["a.txt", "b/1.jsonl", "b/2.jsonl.gz", "b/3.jsonl.zst", "c.md"]
    assert corpus.vocab_size == 400 > tokens.max()


def test_tails_of_the_units_are_packed_together(source, prepared, tmp_path):
    tokenizer = prepared / "tokenizer.json"
    corpus = prepare(source, tmp_path / "set", tokenizer=tokenizer, context_length=T, unit_bytes=1, progress=False)
    units = [tmp_path / "set" / f"unit.{n:05}" for n in range(5)]
    counts = [sum(s["samples"] for s in read_unit(u).shards) for u in units]
    tails = [np.load(u / "tail.npy") for u in units]
    body, packed = np.split(tokens_of(tmp_path / "set"), [sum(counts) * T])
    bodies = np.split(body, np.cumsum(counts)[:-1] * T)
    together = np.concatenate(tails)
    assert len(together) >= T, "else this tests nothing"
    assert packed.tolist() == together[: len(packed)].tolist()
    assert corpus.dropped_tokens == len(together) - len(packed) < T
    whole = np.concatenate([part for pair in zip(bodies, tails, strict=True) for part in pair])
    expected = np.concatenate([tokens_of(prepared), np.load(prepared / "unit.00000" / "tail.npy")])
    assert whole.tolist() == expected.tolist()


def test_the_number_of_workers_does_not_matter(source, tmp_path):
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        prepare(source, folder, vocab_size=300, context_length=T, workers=workers, unit_bytes=1, progress=False)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")


def test_a_tokenizer_is_trained_on_no_more_than_the_limit(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(TEXTS[0])
    monkeypatch.setattr("stackexp.data.prepare.TRAINING_BYTES", 1000)
    assert list(_sample(find_sources(tmp_path))) == [TEXTS[0][:500]] * 2


SCRIPT = """
import sys
from pathlib import Path
from stackexp.data.prepare import prepare
prepare(Path(sys.argv[1]), Path(sys.argv[2]), vocab_size=300, context_length=64, workers=2, unit_bytes=20000,
        progress=False)
"""


def start(source: Path, folder: Path, **kwargs) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, source, folder], start_new_session=True, **kwargs)


def members(group: int) -> list[int]:
    """Processes of a process group that are still running."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.fixture(scope="module")
def many_files(tmp_path_factory) -> Path:
    """About 20 units of 20 kB."""
    return write_many(tmp_path_factory.mktemp("many"), 40)


def finished_units(folder: Path) -> int:
    return len(list(folder.glob("unit.*")))


def is_in_a_unit(folder: Path) -> bool:
    return bool(list(folder.glob(".unit.*")))


MOMENTS = [  # what is there to see when the process is killed
    lambda folder: (folder / "tokenizer.json").exists(),
    is_in_a_unit,
    lambda folder: finished_units(folder) >= 5 and is_in_a_unit(folder),
]


def kill_at(moment: Callable[[Path], bool], source: Path, folder: Path) -> None:
    """Start, and kill the parent at the moment (or when it has ended); its workers must notice."""
    process = start(source, folder)
    wait_for(lambda: moment(folder) or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: not members(process.pid), "a worker outlived its parent")


def wait_for(condition: Callable[[], bool], message: str = "timed out") -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.002)


def test_killed_at_any_moment_it_goes_on_and_nothing_is_lost_or_doubled(many_files, tmp_path):
    for attempt in range(5):  # a machine may be too quick for the kills of one series
        folder, seen = tmp_path / f"killed{attempt}", []
        for moment in MOMENTS:
            if not (folder / "corpus.json").exists():
                kill_at(moment, many_files, folder)
                seen.append(finished_units(folder))
        assert start(many_files, folder).wait() == 0
        if hit := any(0 < count < finished_units(folder) for count in seen):
            break
    assert hit, f"no kill met the middle: {seen}"
    assert not is_in_a_unit(folder)
    prepare(
        many_files, tmp_path / "whole", vocab_size=300, context_length=T, unit_bytes=20000, progress=False, workers=1
    )
    assert files_of(folder) == files_of(tmp_path / "whole")


def test_a_finished_set_is_left_as_it_is(source, prepared):
    before = {p: p.stat().st_mtime_ns for p in prepared.rglob("*")}
    corpus = prepare(source, prepared, vocab_size=400, context_length=T, progress=False)
    assert isinstance(corpus, Corpus)
    assert {p: p.stat().st_mtime_ns for p in prepared.rglob("*")} == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_length": 32}, r"another context length \(64, not 32\)"),
        ({"vocab_size": 300}, "another tokenizer"),
        ({"unit_bytes": 5}, "another unit bytes"),
    ],
)
def test_other_settings_are_refused(source, prepared, settings, message):
    with pytest.raises(RunError, match=message):
        prepare(source, prepared, **{"vocab_size": 400, "context_length": T, "progress": False} | settings)


def test_changed_sources_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text(TEXTS[1])
    arguments = {"vocab_size": 300, "context_length": T, "progress": False}
    prepare(tmp_path, tmp_path / "to", **arguments)
    (tmp_path / "b.txt").write_text(TEXTS[1])
    with pytest.raises(RunError, match=r"another sources \(come, gone or changed: b\.txt\)"):
        prepare(tmp_path, tmp_path / "to", **arguments)


@pytest.mark.parametrize("workers", [1, 2])
def test_broken_sources_are_all_named_and_mending_them_redoes_no_others(prepared, tmp_path, capsys, workers):
    source, to = tmp_path / "source", tmp_path / "to"
    source.mkdir()
    for n, text in enumerate(TEXTS):
        (source / f"{n}.jsonl.gz").write_bytes(gzip.compress(json_lines([text])))
    for n in (1, 3):
        (source / f"{n}.jsonl.gz").write_bytes(b"broken")
    settings = {"tokenizer": prepared / "tokenizer.json", "context_length": T, "unit_bytes": 1, "progress": False}
    with pytest.raises(RunError, match=r"3\.jsonl\.gz: corrupt or cut short"):
        prepare(source, to, **settings, workers=workers)
    assert "1.jsonl.gz: corrupt or cut short" in capsys.readouterr().err
    made = [(to / f"unit.0000{n}").stat().st_ino for n in (0, 2, 4)]
    (source / "1.jsonl.gz").unlink()
    (source / "3.jsonl.gz").write_bytes(gzip.compress(json_lines([TEXTS[3]])))
    prepare(source, to, **settings, workers=workers)
    assert "sources have changed, 1.jsonl.gz and 1 more" in capsys.readouterr().err
    assert [(to / f"unit.0000{n}").stat().st_ino for n in (0, 1, 3)] == made
    prepare(source, tmp_path / "anew", **settings)
    assert files_of(to) == files_of(tmp_path / "anew")


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
    return folder


def test_bad_lines_are_counted_and_named(bad_source, tmp_path, capsys):
    arguments = [str(bad_source), "--to", str(tmp_path / "to"), "--vocab-size", "300", "--context-length", "32"]
    assert main(arguments) == 0
    expected = [f"lines.jsonl.gz:{n}: {why}" for n, (_, why) in enumerate(BAD, 1) if why] + [
        "text.txt:3: invalid UTF-8"
    ]
    log = (tmp_path / "to" / "bad_lines.log").read_text().splitlines()
    assert [line.split(" (")[0] for line in log] == expected
    corpus = TokenSet(tmp_path / "to").corpus
    assert (corpus.bad_lines, corpus.documents) == (len(expected), 3)
    output = capsys.readouterr().out
    assert "9 bad lines:\n  lines.jsonl.gz:2: invalid JSON" in output
    assert f"data.kind=shards data.path={tmp_path / 'to'}" in output


def test_strict_stops_at_the_first_bad_line(bad_source, tmp_path):
    arguments = {"vocab_size": 300, "context_length": 32, "progress": False}
    for workers, first in {1: r"lines\.jsonl\.gz:2: invalid JSON", 2: r"lines\.jsonl\.gz:2|text\.txt:3"}.items():
        with pytest.raises(RunError, match=first) as error:  # of two processes either may come first
            prepare(bad_source, tmp_path / str(workers), strict=True, unit_bytes=1, workers=workers, **arguments)
        assert "\n" not in str(error.value)
    prepare(bad_source, tmp_path / "lenient", unit_bytes=1, workers=1, **arguments)
    (tmp_path / "lenient" / "corpus.json").unlink()
    with pytest.raises(RunError, match=r"lines\.jsonl\.gz:2: invalid JSON"):
        prepare(bad_source, tmp_path / "lenient", strict=True, unit_bytes=1, workers=1, **arguments)


def broken_in_the_middle(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 255]) + data[len(data) // 2 + 1 :]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, b"", "no such file or folder"),
        ("a.png", b"x", r"nothing to read \(found \.png\)"),
        ("a.txt", b"", "do not fill one sequence"),
        ("a.jsonl", b"{}\n" * 5, r"0 documents \(5 bad lines\) do not fill one sequence"),
        ("a.jsonl.gz", gzip.compress(json_lines(TEXTS))[:-9], r"a\.jsonl\.gz: corrupt or cut short"),
        ("a.jsonl.gz", b"plain text", r"a\.jsonl\.gz: corrupt or cut short"),
        ("a.jsonl.gz", broken_in_the_middle(gzip.compress(json_lines(TEXTS))), r"a\.jsonl\.gz: corrupt or cut short"),
        ("a.jsonl.zst", zstandard.compress(json_lines(TEXTS))[:-9], r"a\.jsonl\.zst: corrupt or cut short"),
        ("a.jsonl.gz", b"", r"a\.jsonl\.gz: corrupt or cut short \(it is empty\)"),
        ("a.jsonl.zst", b"", r"a\.jsonl\.zst: corrupt or cut short \(it is empty\)"),
        ("a.jsonl.zst", b"plain text", r"a\.jsonl\.zst: corrupt or cut short"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, name, content, message):
    source = tmp_path / "source"
    if name:
        source.mkdir()
        (source / name).write_bytes(content)
    with pytest.raises(RunError, match=message) as error:
        prepare(source, tmp_path / "to", vocab_size=300, context_length=T, progress=False)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "to" / "corpus.json").exists()


def test_a_folder_of_something_else_is_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "source.txt").write_text(TEXTS[1])
    with pytest.raises(RunError, match="not empty, and not from data prepare"):
        prepare(tmp_path / "source.txt", tmp_path, vocab_size=300, progress=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source.txt", "thesis.tex"]


def test_a_full_disk_is_one_line_and_the_work_can_go_on(tmp_path):
    """The kernel's limit on the size of a file stands in for the disk: the same OSError, another number."""
    (tmp_path / "source.txt").write_text(TEXTS[0] * 5)
    limited = f"""
import resource, sys
from stackexp.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.exit(main("data prepare {tmp_path}/source.txt --to {tmp_path}/to --vocab-size 300 --context-length 64".split()))
"""
    ended = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/to: cannot be written (File too large)")
    assert not list((tmp_path / "to").glob("*unit.*"))
    corpus = prepare(tmp_path / "source.txt", tmp_path / "to", vocab_size=300, context_length=64, progress=False)
    assert corpus.bytes == len(TEXTS[0].encode()) * 5


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user, who may not write")
def test_a_folder_that_cannot_be_written_is_one_line():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        Path(folder, "source.txt").write_text(TEXTS[0])
        Path(folder, "set").mkdir()
        code = f"""
import os, sys
from stackexp.cli import main
import stackexp.data.prepare, stackexp.verbs.data_prepare
os.setuid(65534)
sys.exit(main("data prepare {folder}/source.txt --to {folder}/set --vocab-size 300".split()))
"""
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert ended.returncode == 1
        message = f"error: {folder}/set: cannot be written (Permission denied); mend that, then run the same command"
        assert ended.stderr.startswith(message)
        assert len(ended.stderr.splitlines()) == 1
        assert not list(Path(folder, "set").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "expected SOURCE --to FOLDER"),
        ("a", "expected SOURCE --to FOLDER"),
        ("a --to b", "give either --tokenizer FILE, or --vocab-size N"),
        ("a --to b --vocab-size 300 --tokenizer c", "give either --tokenizer FILE, or --vocab-size N"),
        ("a --to b --vocab-size 3", "--vocab-size: expected an integer >= 300, found 3"),
        ("a --to b --vocab-size x", "--vocab-size"),
        ("a --to b --vocab-size 300 --workers 0", "--workers: expected an integer >= 1, found 0"),
        ("a --to b --vocab-size 300 --strickt", "strict"),
        ("a --config quickstart", "takes neither SOURCE nor --to"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, tmp_path, monkeypatch):
    from stackexp.errors import ConfigError

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        main(arguments.split())
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_ids_above_uint16_are_stored_whole(tmp_path):
    from tokenizers import Tokenizer

    (tmp_path / "a.txt").write_text("spam " * 500)
    small = tmp_path / "set" / "tokenizer.json"
    prepare(tmp_path / "a.txt", tmp_path / "set", vocab_size=300, context_length=16, progress=False)
    spec = json.loads(Tokenizer.from_file(str(small)).to_str())
    spec["model"]["vocab"] = {t: i + 70_000 if i else 0 for t, i in spec["model"]["vocab"].items()}
    (tmp_path / "large.json").write_text(json.dumps(spec))
    prepare(
        tmp_path / "a.txt", tmp_path / "large", tokenizer=tmp_path / "large.json", context_length=16, progress=False
    )
    large = tokens_of(tmp_path / "large").astype(np.int64)
    assert large.max() > 70_000
    assert np.where(large, large - 70_000, 0).tolist() == tokens_of(tmp_path / "set").tolist()
