"""Token files as the source of a prepared set."""

import json
from pathlib import Path

import numpy as np
import pytest
from corpora import TEXTS, files_of

from stackexp.data import token_sources
from stackexp.data.prepare import prepare
from stackexp.data.shards import TokenSet
from stackexp.data.token_files import write_token_file
from stackexp.data.tokenizer import compute_fingerprint, load_tokenizer, train_tokenizer
from stackexp.errors import RunError

T = 32
DOCUMENTS = [TEXTS[1], "one\n", TEXTS[2], "東京"]
SETTINGS = {"context_length": T, "progress": False, "workers": 1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_tokenizer(TEXTS, 400).to_str())
    return path


@pytest.fixture(scope="module")
def ids(tokenizer) -> np.ndarray:
    """The documents as one process would tokenise them, each with end-of-text, id 0."""
    loaded = load_tokenizer(tokenizer)
    return np.array([i for text in DOCUMENTS for i in [*loaded.encode(text).ids, 0]])


@pytest.fixture(scope="module")
def of_text(tokenizer, tmp_path_factory) -> Path:
    """The set made of the documents' text."""
    folder = tmp_path_factory.mktemp("text")
    for n, text in enumerate(DOCUMENTS):
        (folder / f"{n}.txt").write_text(text)
    prepare(folder, folder / "set", tokenizer=tokenizer, **SETTINGS)
    return folder / "set"


WRITERS = {
    "raw.npy": lambda path, ids: ids.astype("<u2").tofile(path),
    "raw.bin": lambda path, ids: ids.astype("<u2").tofile(path),
    "real.npy": lambda path, ids: np.save(path, ids.astype(np.int64)),
    "cut.npy": lambda path, ids: ids[:-1].astype("<u2").tofile(path),  # the last end-of-text is added
}


@pytest.mark.parametrize("name", WRITERS)
def test_ids_make_the_set_that_their_text_makes(tokenizer, ids, of_text, tmp_path, name, monkeypatch):
    monkeypatch.setattr("stackexp.data.token_sources.BLOCK", 100)
    WRITERS[name](tmp_path / name, ids)
    corpus = prepare(tmp_path / name, tmp_path / "set", tokenizer=tokenizer, **SETTINGS)
    made, expected = files_of(tmp_path / "set"), files_of(of_text)
    same = [n for n in expected if Path(n).name not in ("corpus.json", "unit.json")]  # which name the sources
    assert {n: made[n] for n in same} == {n: expected[n] for n in same}
    assert corpus.documents == len(DOCUMENTS)
    assert corpus.bytes == sum(len(text.encode()) for text in DOCUMENTS)
    assert corpus.sources == [name]
    assert TokenSet(tmp_path / "set").corpus == corpus


def test_files_with_records_in_two_processes(tokenizer, ids, of_text, tmp_path):
    own = {
        "vocab_size": 400,
        "tokenizer": compute_fingerprint(load_tokenizer(tokenizer)),
        "source": "here",
        "end_of_text": 0,
    }
    middle = int(np.flatnonzero(ids == 0)[1]) + 1
    (tmp_path / "source").mkdir()
    for name, part in {"a.npy": ids[:middle], "b.npy": ids[middle:]}.items():
        write_token_file(tmp_path / "source" / name, [part], **own)
    settings = SETTINGS | {"workers": 2, "unit_bytes": 1}
    corpus = prepare(tmp_path / "source", tmp_path / "set", tokenizer=tokenizer, **settings)
    assert corpus.tokens == len(ids)
    assert (tmp_path / "set" / "unit.00001").exists()
    assert corpus.sources == ["a.npy", "b.npy"]


def assert_refused(source: Path, folder: Path, message: str, **given) -> None:
    with pytest.raises(RunError, match=message) as error:
        prepare(source, folder, **given, **SETTINGS)
    assert "\n" not in str(error.value)
    assert not (folder / "corpus.json").exists()


def test_what_is_refused_is_one_line(tokenizer, ids, tmp_path):
    source, to = tmp_path / "source", tmp_path / "to"
    source.mkdir()
    path = source / "a.npy"
    ids.astype("<u2").tofile(path)
    assert_refused(source, to, r"a\.npy: .*name the tokenizer that made them with --tokenizer", vocab_size=400)
    (source / "b.jsonl").write_text('{"text": "b"}')
    assert_refused(
        source, to, r"holds token ids \(a\.npy\) and text \(b\.jsonl\); prepare them apart", tokenizer=tokenizer
    )
    (source / "b.jsonl").unlink()
    path.write_bytes(path.read_bytes()[:-1])
    assert_refused(source, to, r"a\.npy: .*no whole number of uint16", tokenizer=tokenizer)
    path.write_bytes(b"")
    assert_refused(source, to, r"a\.npy: empty", tokenizer=tokenizer)
    np.save(path, ids / 2)
    assert_refused(source, to, r"a\.npy: expected token ids, found float64", tokenizer=tokenizer)


@pytest.mark.parametrize("wrong", [400, 65_535, -1])
def test_ids_outside_the_vocabulary(tokenizer, ids, tmp_path, wrong):
    np.save(tmp_path / "a.npy", np.concatenate([ids, [wrong], ids]))
    message = rf"a\.npy: token id {wrong} at position {len(ids)}, outside the vocabulary of 400"
    assert_refused(tmp_path / "a.npy", tmp_path / "to", message, tokenizer=tokenizer)


def test_the_record_is_believed_and_checked(tokenizer, ids, tmp_path):
    path, own = tmp_path / "a.npy", compute_fingerprint(load_tokenizer(tokenizer))
    known = {"vocab_size": 400, "source": "here"}
    for tokenizer_of, end, message in [
        ("0" * 64, 0, "token ids of another tokenizer"),
        ("gpt-neox-20b", 0, r"token ids of another tokenizer \(gpt-neox-20b\)"),
        (own, 3, "its documents end with id 3, but end-of-text of .* is 0"),
    ]:
        write_token_file(path, [ids], **known, tokenizer=tokenizer_of, end_of_text=end)
        assert_refused(path, tmp_path / "to", message, tokenizer=tokenizer)
    write_token_file(path, [ids], **known, tokenizer=own, end_of_text=0)
    path.write_bytes(b"\7" + path.read_bytes()[1:])
    assert_refused(path, tmp_path / "to", r"a\.npy: not what its record says \(another SHA-256\)", tokenizer=tokenizer)


def test_end_of_text_that_is_not_marked_special_is_no_text(tokenizer, ids, tmp_path):
    spec = json.loads(tokenizer.read_text())
    spec["added_tokens"][0]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    ids.astype("<u2").tofile(tmp_path / "a.npy")
    corpus = prepare(tmp_path / "a.npy", tmp_path / "to", tokenizer=tmp_path / "tokenizer.json", **SETTINGS)
    assert corpus.bytes == sum(len(text.encode()) for text in DOCUMENTS)


def test_a_file_is_read_once_and_the_tokenizer_s_table_made_once(tokenizer, ids, tmp_path, monkeypatch):
    own = {
        "vocab_size": 400,
        "tokenizer": compute_fingerprint(load_tokenizer(tokenizer)),
        "source": "here",
        "end_of_text": 0,
    }
    (tmp_path / "source").mkdir()
    tables, table = [], token_sources.count_token_bytes
    for name in "ab":
        write_token_file(tmp_path / "source" / f"{name}.npy", [ids], **own)
    monkeypatch.setattr(token_sources, "sha256_of", lambda path: pytest.fail("read to be hashed"))
    monkeypatch.setattr(token_sources, "count_token_bytes", lambda tokenizer: tables.append(1) or table(tokenizer))
    prepare(tmp_path / "source", tmp_path / "set", tokenizer=tokenizer, **SETTINGS)
    assert tables == [1]


def test_a_file_without_end_of_text_is_one_document_and_said_to_be(tokenizer, tmp_path, capsys):
    np.full(100, 7, "<u2").tofile(tmp_path / "a.npy")
    corpus = prepare(tmp_path / "a.npy", tmp_path / "to", tokenizer=tokenizer, **SETTINGS)
    assert (corpus.documents, corpus.tokens) == (1, 101)
    assert "a.npy: end-of-text, id 0, is not in it: taken for one document" in capsys.readouterr().err
