"""The contents of a prepared set, and what happens when it is prepared again."""

import gzip
import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import zstandard
from corpora import TEXTS, json_lines, prepare_set

from stackexp.data import prepare
from stackexp.data.prepare import Plan, sample_texts, start_set
from stackexp.data.shards import TokenSet
from stackexp.data.sources import find_sources
from stackexp.data.tokenizer import PIECE_CHARACTERS
from stackexp.data.units import name_unit, read_unit
from stackexp.errors import RunError

T = 64
ODD = [
    *("naïve 東京 🙂\r\n", "<|endoftext|>", "x", "tabs\tand\n\n\nlines\n"),
    "no newline " * (PIECE_CHARACTERS // 5),
]
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
    return [folder / name_unit(unit) for unit in Plan(source, vocab_size=300, **settings).units]


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


def test_a_resumed_set_with_changed_sources_equals_a_fresh_one(tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text(TEXTS[1] * 20)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "merge_units", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare_set(data, tmp_path / "resumed", vocab_size=300)
    assert (tmp_path / "resumed" / "tokenizer.json").exists()
    (data / "a.txt").write_text(TEXTS[2] * 20)
    for name in ("resumed", "fresh"):
        prepare_set(data, tmp_path / name, vocab_size=300)
    resumed, fresh = (tmp_path / name / "tokenizer.json" for name in ("resumed", "fresh"))
    assert resumed.read_bytes() == fresh.read_bytes()
    assert tokens_of(resumed.parent).tolist() == tokens_of(fresh.parent).tolist()


def test_folder_with_other_contents_is_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "source.txt").write_text(TEXTS[1])
    with pytest.raises(RunError, match="not empty, and not written by data prepare"):
        prepare_set(tmp_path / "source.txt", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.txt", "thesis.tex"]


def test_prepared_sets_among_the_sources_are_skipped(tmp_path):
    """Skip an unfinished set with Slurm logs, and a copy without hidden files."""
    (tmp_path / "a.txt").write_text("text")
    start_set(Plan(tmp_path, vocab_size=300, context_length=64), tmp_path / "set")
    (tmp_path / "set" / "jobs").mkdir()
    (tmp_path / "copy").mkdir()
    for name in ("set/jobs/1.txt", "copy/index.json", "copy/corpus.json", "copy/notes.txt"):
        (tmp_path / name).write_text("{}")
    assert [source.name for source in find_sources(tmp_path)] == ["a.txt"]
