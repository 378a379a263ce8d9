"""Token files as the sources of a prepared set."""

import json
from pathlib import Path

import numpy as np
import pytest
from corpora import TEXTS, prepare_set

from stackexp.data.shards import TokenSet
from stackexp.data.token_files import write_token_file
from stackexp.data.tokenizer import compute_fingerprint, load_tokenizer, train_tokenizer
from stackexp.errors import RunError

DOCUMENTS = [TEXTS[1], "one\n", TEXTS[2], "東京"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_tokenizer(TEXTS, 400).to_str())
    return path


@pytest.fixture(scope="module")
def ids(tokenizer) -> np.ndarray:
    """Return the token ids of DOCUMENTS, each with end-of-text, id 0."""
    loaded = load_tokenizer(tokenizer)
    return np.array([i for text in DOCUMENTS for i in [*loaded.encode(text).ids, 0]])


@pytest.fixture(scope="module")
def record(tokenizer) -> dict:
    """Return the fields of a token file's record."""
    fingerprint = compute_fingerprint(load_tokenizer(tokenizer))
    return {"vocab_size": 400, "tokenizer": fingerprint, "source": "here", "end_of_text": 0}


@pytest.fixture(scope="module")
def text_set(tokenizer, tmp_path_factory) -> Path:
    """Return the set prepared from the text of DOCUMENTS."""
    folder = tmp_path_factory.mktemp("text")
    for n, text in enumerate(DOCUMENTS):
        (folder / f"{n}.txt").write_text(text)
    prepare_set(folder, folder / "set", tokenizer=tokenizer)
    return folder / "set"


WRITERS = {
    "raw.npy": lambda path, ids: ids.astype("<u2").tofile(path),
    "raw.bin": lambda path, ids: ids.astype("<u2").tofile(path),
    "real.npy": lambda path, ids: np.save(path, ids.astype(np.int64)),
    "cut.npy": lambda path, ids: ids[:-1].astype("<u2").tofile(path),  # without the last end-of-text
}


@pytest.mark.parametrize("name", WRITERS)
def test_token_ids_give_the_same_set_as_their_text(tokenizer, ids, text_set, tmp_path, name, monkeypatch):
    monkeypatch.setattr("stackexp.data.token_files.BLOCK_TOKENS", 100)
    WRITERS[name](tmp_path / name, ids)
    corpus = prepare_set(tmp_path / name, tmp_path / "set", tokenizer=tokenizer)
    units = [
        {path.name: path.read_bytes() for path in folder.glob("unit.*/shard*")}
        for folder in (text_set, tmp_path / "set")
    ]
    assert units[0] == units[1] != {}
    assert corpus.documents == len(DOCUMENTS)
    assert corpus.bytes == sum(len(text.encode()) for text in DOCUMENTS)
    assert corpus.sources == [name]
    assert TokenSet(tmp_path / "set").corpus == corpus


def test_files_with_records_in_two_processes(tokenizer, ids, record, tmp_path):
    middle = int(np.flatnonzero(ids == 0)[1]) + 1
    (tmp_path / "source").mkdir()
    for name, part in {"a.npy": ids[:middle], "b.npy": ids[middle:]}.items():
        write_token_file(tmp_path / "source" / name, [part], **record)
    corpus = prepare_set(tmp_path / "source", tmp_path / "set", tokenizer=tokenizer, workers=2, unit_bytes=1)
    assert corpus.tokens == len(ids)
    assert len(list((tmp_path / "set").glob("unit.*"))) == 2
    assert corpus.sources == ["a.npy", "b.npy"]


def assert_refused(source: Path, folder: Path, message: str, **options) -> None:
    with pytest.raises(RunError, match=message) as error:
        prepare_set(source, folder, **options)
    assert "\n" not in str(error.value)
    assert not (folder / "corpus.json").exists()


def test_unusable_token_files_are_one_line_errors(tokenizer, ids, tmp_path):
    source, to = tmp_path / "source", tmp_path / "to"
    source.mkdir()
    path = source / "a.npy"
    ids.astype("<u2").tofile(path)
    assert_refused(source, to, r"a\.npy: .*name the tokenizer that made them with --tokenizer", vocab_size=400)
    (source / "b.jsonl").write_text('{"text": "b"}')
    both = r"contains both token ids \(a\.npy\) and text \(b\.jsonl\); prepare them separately"
    assert_refused(source, to, both, tokenizer=tokenizer)
    (source / "b.jsonl").unlink()
    np.save(path, ids / 2)
    assert_refused(source, to, r"a\.npy: expected token ids, found float64", tokenizer=tokenizer)


@pytest.mark.parametrize("wrong", [400, 65_535, -1])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, ids, tmp_path, wrong):
    np.save(tmp_path / "a.npy", np.concatenate([ids, [wrong], ids]))
    message = rf"a\.npy: token id {wrong:,} at position {len(ids):,} is outside the vocabulary of 400"
    assert_refused(tmp_path / "a.npy", tmp_path / "to", message, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"tokenizer": "0" * 64}, "token ids of another tokenizer"),
        ({"tokenizer": "gpt-neox-20b"}, r"token ids of another tokenizer \(gpt-neox-20b\)"),
        ({"end_of_text": 3}, "documents end with id 3, but end-of-text of .* is 0"),
    ],
)
def test_record_of_another_tokenizer_is_refused(tokenizer, ids, record, tmp_path, other, message):
    write_token_file(tmp_path / "a.npy", [ids], **record | other)
    assert_refused(tmp_path / "a.npy", tmp_path / "to", message, tokenizer=tokenizer)


def test_changed_token_file_is_refused(tokenizer, ids, record, tmp_path):
    path = tmp_path / "a.npy"
    write_token_file(path, [ids], **record)
    path.write_bytes(b"\7" + path.read_bytes()[1:])
    message = r"a\.npy: differs from its record \(another SHA-256\)"
    assert_refused(path, tmp_path / "to", message, tokenizer=tokenizer)


def test_end_of_text_counts_no_bytes_even_if_not_special(tokenizer, ids, tmp_path):
    spec = json.loads(tokenizer.read_text())
    spec["added_tokens"][0]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    ids.astype("<u2").tofile(tmp_path / "a.npy")
    corpus = prepare_set(tmp_path / "a.npy", tmp_path / "to", tokenizer=tmp_path / "tokenizer.json")
    assert corpus.bytes == sum(len(text.encode()) for text in DOCUMENTS)


def test_file_without_end_of_text_is_one_document_with_a_warning(tokenizer, tmp_path, capsys):
    np.full(100, 7, "<u2").tofile(tmp_path / "a.npy")
    corpus = prepare_set(tmp_path / "a.npy", tmp_path / "to", tokenizer=tokenizer)
    assert (corpus.documents, corpus.tokens) == (1, 101)
    assert "a.npy: contains no end-of-text (id 0), so it is read as one document" in capsys.readouterr().err
