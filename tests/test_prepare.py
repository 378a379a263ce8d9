"""The contents of a prepared set, preparing it again, errors, and the command line."""

import gzip
import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import zstandard
from corpora import TEXTS, json_lines, prepare_set, read_files, write_many

from stackexp.cli import main
from stackexp.data import prepare
from stackexp.data.prepare import Preparation, sample_texts
from stackexp.data.shards import TokenSet
from stackexp.data.sources import find_sources
from stackexp.data.tokenizer import PIECE_CHARACTERS
from stackexp.data.units import name_unit, read_unit
from stackexp.errors import RunError

T = 64
ODD = [*("naïve 東京 🙂\r\n", "<|endoftext|>", "x", "tabs\tand\n\n\nlines\n"), "no newline " * (PIECE_CHARACTERS // 5)]
DOCUMENTS = [TEXTS[0], *ODD, *TEXTS[1:], ODD[0]]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Write DOCUMENTS in files of every kind."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "b").mkdir()
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.txt").write_text("not read")
    (folder / "a.txt").write_text(TEXTS[0])
    (folder / "b" / "1.jsonl").write_bytes(json_lines(ODD))
    (folder / "b" / "2.jsonl.gz").write_bytes(gzip.compress(json_lines(TEXTS[1:3])))
    two_frames = [zstandard.compress(json_lines([text])) for text in TEXTS[3:]]
    (folder / "b" / "3.jsonl.zst").write_bytes(b"".join(two_frames))
    (folder / "c.md").write_bytes(ODD[0].encode())
    (folder / "d.png").write_bytes(b"\x89PNG")
    return folder


@pytest.fixture(scope="module")
def prepared(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "set"
    prepare_set(source, folder, vocab_size=400)
    return folder


def tokens_of(folder: Path) -> np.ndarray:
    token_set = TokenSet(folder)
    return np.concatenate([token_set[i] for i in range(len(token_set))])


def list_units(source: Path, folder: Path, **settings) -> list[Path]:
    """Return the folders of the units in order."""
    return [folder / name_unit(unit) for unit in Preparation(source, vocab_size=300, **settings).units]


def test_decoding_restores_the_documents_in_order(source, prepared):
    token_set = TokenSet(prepared)
    corpus, tokenizer = token_set.corpus, token_set.load_tokenizer()
    tail = read_unit(list_units(source, prepared)[0]).tail
    tokens = np.concatenate([tokens_of(prepared), tail]).astype(int)
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    assert text == "".join(document + "<|endoftext|>" for document in DOCUMENTS)
    assert corpus.documents == len(DOCUMENTS) == (tokens == 0).sum()
    assert corpus.bytes == sum(len(document.encode()) for document in DOCUMENTS)
    assert corpus.tokens == len(tokens) == corpus.sequences * T + corpus.dropped_tokens
    assert corpus.dropped_tokens == len(tail) < T
    assert corpus.sources == ["a.txt", "b/1.jsonl", "b/2.jsonl.gz", "b/3.jsonl.zst", "c.md"]
    assert corpus.vocab_size == 400 > tokens.max()


def test_unit_tails_are_packed_together(source, prepared, tmp_path):
    corpus = prepare_set(source, tmp_path / "set", tokenizer=prepared / "tokenizer.json", unit_bytes=1)
    units = list_units(source, tmp_path / "set", unit_bytes=1)
    shards = json.loads((tmp_path / "set" / "index.json").read_text())["shards"]
    counts = [sum(s["samples"] for s in shards if s["raw_data"]["basename"].startswith(unit.name)) for unit in units]
    tails = [np.array(read_unit(unit).tail, int) for unit in units]
    body, packed = np.split(tokens_of(tmp_path / "set"), [sum(counts) * T])
    bodies = np.split(body, np.cumsum(counts)[:-1] * T)
    all_tails = np.concatenate(tails)
    assert len(all_tails) >= T, "the tails must fill a sequence"
    assert packed.tolist() == all_tails[: len(packed)].tolist()
    assert corpus.dropped_tokens == len(all_tails) - len(packed) < T
    tokens = np.concatenate([part for pair in zip(bodies, tails, strict=True) for part in pair])
    expected = np.concatenate([tokens_of(prepared), read_unit(list_units(source, prepared)[0]).tail])
    assert tokens.tolist() == expected.tolist()


def test_tokenizer_is_trained_on_a_limited_sample(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(TEXTS[0])
    monkeypatch.setattr("stackexp.data.prepare.TRAINING_BYTES", 1000)
    assert list(sample_texts(find_sources(tmp_path))) == [TEXTS[0][:500]] * 2


def test_ids_above_65535_are_stored_as_uint32(tmp_path):
    (tmp_path / "a.txt").write_text("spam " * 500)
    prepare_set(tmp_path / "a.txt", tmp_path / "small")
    spec = json.loads((tmp_path / "small" / "tokenizer.json").read_text())
    spec["model"]["vocab"] = {token: i + 70_000 if i else 0 for token, i in spec["model"]["vocab"].items()}
    (tmp_path / "large.json").write_text(json.dumps(spec))
    prepare_set(tmp_path / "a.txt", tmp_path / "large", tokenizer=tmp_path / "large.json")
    large = tokens_of(tmp_path / "large").astype(np.int64)
    assert large.max() > 70_000
    assert np.where(large, large - 70_000, 0).tolist() == tokens_of(tmp_path / "small").tolist()


# Preparing again


def test_finished_set_is_not_touched(source, prepared):
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    assert prepare_set(source, prepared, vocab_size=400) == TokenSet(prepared).corpus
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before


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
        prepare_set(source, prepared, **{"vocab_size": 400} | settings)


def test_changed_sources_of_a_finished_set_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text(TEXTS[1])
    prepare_set(tmp_path, tmp_path / "to")
    (tmp_path / "b.txt").write_text(TEXTS[1])
    with pytest.raises(RunError, match=r"other sources \(added, removed or changed: b\.txt\)"):
        prepare_set(tmp_path, tmp_path / "to")


def stop_before_merge(monkeypatch, source: Path, folder: Path, **settings) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "merge_units", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare_set(source, folder, **settings)


def test_a_resumed_set_with_changed_sources_equals_a_fresh_one(prepared, tmp_path, monkeypatch, capsys):
    data, settings = tmp_path / "data", {"tokenizer": prepared / "tokenizer.json", "unit_bytes": 1}
    data.mkdir()
    for n in range(3):
        (data / f"{n}.txt").write_text(TEXTS[n] * 3)
    stop_before_merge(monkeypatch, data, tmp_path / "resumed", **settings)
    (data / "0.txt").write_text(TEXTS[0].swapcase() * 3)  # of the same size
    (data / "1.txt").unlink()
    units = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "resumed").glob("unit.*")}
    prepare_set(data, tmp_path / "resumed", **settings)
    assert "sources have changed (0.txt and 1 more); their units are prepared again" in capsys.readouterr().err
    kept = [path for path in (tmp_path / "resumed").glob("unit.*") if units[path.name] == path.stat().st_mtime_ns]
    assert len(kept) == 1
    prepare_set(data, tmp_path / "fresh", **settings)
    assert read_files(tmp_path / "resumed") == read_files(tmp_path / "fresh")


def test_a_tokenizer_trained_on_other_sources_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXTS[1])
    stop_before_merge(monkeypatch, tmp_path / "a.txt", tmp_path / "to")
    (tmp_path / "a.txt").write_text(TEXTS[2])
    with pytest.raises(RunError, match=r"prepared from other sources .*a\.txt.*; delete the folder"):
        prepare_set(tmp_path / "a.txt", tmp_path / "to")


def test_folder_with_other_contents_is_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "source.txt").write_text(TEXTS[1])
    with pytest.raises(RunError, match="not empty"):
        prepare_set(tmp_path / "source.txt", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.txt", "thesis.tex"]


def test_prepared_sets_among_the_sources_are_skipped(tmp_path):
    """Skip an unfinished set with logs, and a copy without hidden files."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "set" / "jobs").mkdir(parents=True)
    for name in ("plan.json", ".plan.lock"):
        (tmp_path / "set" / name).write_text("{}")
    (tmp_path / "copy").mkdir()
    for name in ("set/jobs/1.txt", "copy/index.json", "copy/corpus.json", "copy/notes.txt"):
        (tmp_path / name).write_text("{}")
    assert [source.name for source in find_sources(tmp_path)] == ["a.txt"]


# Errors

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
    prepare_set(bad_source, tmp_path / "lenient", context_length=16, unit_bytes=1)
    with pytest.raises(RunError, match="bad lines were left out"):
        prepare_set(bad_source, tmp_path / "lenient", context_length=16, strict=True, unit_bytes=1)


def test_a_link_to_another_source_is_not_read_twice(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "latest.txt").symlink_to("a.txt")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/b.txt").write_text("two")
    source = tmp_path / "source"
    source.mkdir()
    (source / "c.txt").symlink_to(tmp_path / "elsewhere/b.txt")
    assert [found.name for found in find_sources(tmp_path)] == ["a.txt", "elsewhere/b.txt"]
    assert [found.name for found in find_sources(source)] == ["c.txt"]
    (source / "b.txt").symlink_to(tmp_path / "elsewhere/b.txt")
    assert [found.name for found in find_sources(source)] == ["b.txt"], "two links to one file, which is elsewhere"


def flip_middle_byte(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 255]) + data[len(data) // 2 + 1 :]


# Without a time in its header: the bytes are part of test names, which must be the same in all pytest-xdist workers.
GZIPPED = gzip.compress(json_lines(TEXTS), mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, b"", "no such file or folder"),
        ("a.png", b"x", r"nothing to read \(found \.png\)"),
        ("prepared/", b"", "source: contains only prepared sets; give the files from which they were prepared"),
        ("a.jsonl", b"{}\n" * 5, r"no documents, but 5 bad lines, the first: a\.jsonl:1: no text; correct the files"),
        ("a.jsonl.gz", GZIPPED[:-9], r"a\.jsonl\.gz: corrupt or cut short"),
        ("a.jsonl.gz", flip_middle_byte(GZIPPED), r"a\.jsonl\.gz: corrupt or cut short"),
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


def test_an_error_ends_only_the_workers_of_prepare(bad_source, tmp_path):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        number = other.submit(os.getpid).result()
        with pytest.raises(RunError, match="--strict"):
            prepare_set(bad_source, tmp_path / "set", strict=True, unit_bytes=1, workers=2)
        assert other.submit(os.getpid).result() == number


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
    assert result.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/to: cannot be written (File too large)")
    assert not list((tmp_path / "to").glob("*unit.*"))
    corpus = prepare_set(tmp_path / "source.txt", tmp_path / "to")
    assert corpus.bytes == len(TEXTS[0].encode()) * 5


def test_part_prints_the_next_step(tmp_path, invoke, monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "to be restored")
    monkeypatch.delenv("RAYON_NUM_THREADS")
    source = write_many(tmp_path / "source", 1)
    command = f"data prepare {source} --to {tmp_path}/set --vocab-size 300 --workers 1 --context-length 64".split()
    assert "run the command without --part" in invoke(*command, "--part", "1/1")
    invoke(*command)
    assert os.environ["RAYON_NUM_THREADS"] == "1", "the threads of the tokenizers library"
    assert np.array(TokenSet(tmp_path / "set")[0]).shape == (64,)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("plan.json", {"sources": [5]}, "plan.json: corrupt"),
        ("plan.json", {"sources": None}, "plan.json: corrupt"),
        ("unit.*/unit.json", {"tail": [-1]}, "unit.json: missing or corrupt"),
        ("unit.*/unit.json", {"tokens": 1e9}, "unit.json: missing or corrupt"),
        ("unit.*/index.json", {"shards": None}, "index.json: missing or corrupt"),
        ("unit.*/index.json", {"shards": []}, "index.json and corpus.json disagree"),
    ],
)
def test_a_damaged_record_of_an_unfinished_set_is_reported(tmp_path, name, change, message):
    source, folder = tmp_path / "a.txt", tmp_path / "set"
    source.write_text("one two three " * 100)
    plan = Preparation(source, vocab_size=300, context_length=16)
    prepare.prepare(plan, folder, workers=1)
    (folder / "corpus.json").unlink()
    (path,) = folder.glob(name)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RunError, match=message):
        prepare.prepare(plan, folder, workers=1)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("corpus.json", {"documents": "7"}),
        ("corpus.json", {"sources": [5]}),
        ("index.json", {"bytes": 1}),
        ("index.json", {"bytes": ["a"]}),
    ],
)
def test_a_damaged_record_of_a_finished_set_is_reported(tmp_path, name, change):
    (tmp_path / "a.txt").write_text("one two three " * 100)
    prepare.prepare(Preparation(tmp_path / "a.txt", vocab_size=300, context_length=16), tmp_path / "set", workers=1)
    path = tmp_path / "set" / name
    record = json.loads(path.read_text())
    (record["shards"][0]["raw_data"] if name == "index.json" else record).update(change)
    path.write_text(json.dumps(record))
    with pytest.raises(RunError, match=f"{name}: (missing or )?corrupt; prepare the set again"):
        TokenSet(tmp_path / "set", cache=True)
