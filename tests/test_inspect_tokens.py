"""`data inspect` of token files and of MDS shards from other programs."""

import json
from pathlib import Path

import numpy as np
import pytest
from corpora import TEXTS

from stackexp.cli import main
from stackexp.data.token_files import write_token_file
from stackexp.data.tokenizer import compute_fingerprint, load_tokenizer, train_tokenizer

DOCUMENTS = [*TEXTS, "x", "yes"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_tokenizer(TEXTS, 400).to_str())
    return path


@pytest.fixture(scope="module")
def ids(tokenizer) -> list[list[int]]:
    """Return the ids of each document, with end-of-text."""
    loaded = load_tokenizer(tokenizer)
    return [[*loaded.encode(text).ids, 0] for text in DOCUMENTS]


def inspect(capsys, path: Path, *options: object, code: int = 0) -> dict:
    """Return the JSON output of `data inspect` for one dataset."""
    assert main(["data", "inspect", str(path), "--json", *map(str, options)]) == code
    [found] = json.loads(capsys.readouterr().out)
    return found


def test_token_file_without_a_record(tokenizer, ids, tmp_path, capsys):
    tokens = np.concatenate(ids)
    tokens.astype("<u2").tofile(tmp_path / "a.npy")
    found = inspect(capsys, tmp_path / "a.npy", "--tokenizer", tokenizer, "--samples", 1)
    assert (found["tokens"], found["documents"], found["largest_id"]) == (len(tokens), len(ids), tokens.max())
    assert (found["checked"], found["damage"]) == (0, [])
    np.full(9, 400, "<u2").tofile(tmp_path / "large.npy")
    found = inspect(capsys, tmp_path / "large.npy", "--tokenizer", tokenizer, code=1)
    assert "token id 400 is outside the vocabulary of 400" in found["damage"][0]


def test_token_file_is_verified_by_its_record(tokenizer, ids, tmp_path, capsys):
    fingerprint, path = compute_fingerprint(load_tokenizer(tokenizer)), tmp_path / "a.npy"
    record = {"vocab_size": 400, "tokenizer": fingerprint, "source": "here", "end_of_text": 0, "text_bytes": 5}
    write_token_file(path, [np.concatenate(ids)], **record)
    found = inspect(capsys, path)
    assert (found["checked"], found["documents"], found["bytes"]) == (1, len(ids), 5)
    assert found["lengths"]["longest"] == max(map(len, ids))
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    assert "the SHA-256 differs from the record" in inspect(capsys, path, code=1)["damage"][0]
    path.write_bytes(b"\1\2")
    assert "a.npy: 2 bytes" in inspect(capsys, path, code=1)["damage"][0]


def test_mds_shards_with_an_unusual_hash(tokenizer, ids, tmp_path, capsys):
    from streaming import MDSWriter

    columns = {"tokens": "ndarray:int32"}
    with MDSWriter(out=str(tmp_path / "mds"), columns=columns, size_limit=1 << 13, hashes=["xxh64"]) as writer:
        for document in ids:
            for begin in range(0, len(document), 500):
                writer.write({"tokens": np.array(document[begin : begin + 500], np.int32)})
    found = inspect(capsys, tmp_path / "mds", "--tokenizer", tokenizer, "--samples", 1)
    shards = sorted((tmp_path / "mds").glob("*.mds"))
    assert found["kind"] == "MDS shards"
    assert found["checked"] == found["shards"] == len(shards) > 3
    assert (found["tokens"], found["documents"]) == (sum(map(len, ids)), len(ids))
    shards[1].write_bytes(shards[1].read_bytes()[:-1] + b"\7")
    shards[2].write_bytes(b"")
    found = inspect(capsys, tmp_path / "mds", code=1)
    assert [line.split(": ")[0] for line in found["damage"]] == [str(shards[1]), str(shards[2])]


def test_mds_shards_of_text(tmp_path, capsys):
    from streaming import MDSWriter

    with MDSWriter(out=str(tmp_path / "mds"), columns={"text": "str"}) as writer:
        for text in ("one", "naïve 東京"):
            writer.write({"text": text})
    found = inspect(capsys, tmp_path / "mds")
    assert (found["bytes"], found["documents"]) == (3 + len("naïve 東京".encode()), 2)
    assert set(found["samples"].values()) == {"one", "naïve 東京"}
    assert found["lengths"]["unit"] == "bytes"
