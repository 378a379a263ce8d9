"""`data inspect` of prepared sets and token files, and its command line."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from corpora import TEXTS, json_lines, prepare_set

from stackexp.data.inspection import measure_documents
from stackexp.data.shards import TokenSet
from stackexp.data.token_files import write_token_file
from stackexp.data.tokenizer import compute_fingerprint, load_tokenizer

DOCUMENTS = [*TEXTS, "x", "yes"]
CHANGED = "corrupt: the SHA-256 differs from the record"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Prepare four units; documents cross the ends of shards and units, and one line is bad."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "source").mkdir()
    for n in range(4):
        lines = json_lines(DOCUMENTS[n::4]) + (b"nonsense\n" if n == 2 else b"")
        (folder / "source" / f"{n}.jsonl").write_bytes(lines)
    prepare_set(folder / "source", folder / "set", vocab_size=400, unit_bytes=1)
    return folder / "set"


@pytest.fixture
def copy(prepared, tmp_path) -> Path:
    return shutil.copytree(prepared, tmp_path / "set")


@pytest.fixture
def inspect(capture):
    """`inspect(path, *options)` returns the JSON output of `data inspect` for one dataset."""

    def run(path: Path, *options: object, code: int = 0) -> dict:
        [found] = json.loads(capture("data inspect --json", path, *options, expect=code).out)
        return found

    return run


def test_counts_lengths_and_samples_of_a_prepared_set(prepared, inspect):
    found = inspect(prepared, "--samples", 2)
    token_set, tokenizer = TokenSet(prepared), load_tokenizer(prepared / "tokenizer.json")
    lengths = [len(tokenizer.encode(text).ids) + 1 for text in DOCUMENTS]
    expected = {
        "kind": "prepared set",
        "tokens": sum(lengths),
        "documents": len(DOCUMENTS),
        "bytes": sum(len(text.encode()) for text in DOCUMENTS),
        "sequences": token_set.corpus.sequences,
        "tokenizer": token_set.corpus.tokenizer,
        "vocab_size": 400,
        "bad_lines": 1,
        "damage": [],
    }
    assert {name: found[name] for name in expected} == expected
    assert found["checked"] == found["shards"] == len(list(prepared.rglob("*.mds")))
    ids = np.concatenate([token_set[i] for i in range(len(token_set))])
    counted = (ids == 0).sum() + (ids[-1] != 0)  # the last one may be cut
    assert found["mean_length"] * counted == pytest.approx(sum(lengths) - found["dropped_tokens"])
    assert len(found["samples"]) == 2
    for location, text in found["samples"].items():
        index = int(location.removeprefix("sequence ").replace(",", ""))
        assert text == tokenizer.decode(token_set[index].tolist(), skip_special_tokens=False)
    assert inspect(prepared, "--samples", 2) == found
    assert inspect(prepared, "--samples", 2, "--seed", 1)["samples"] != found["samples"]


def test_text_output(prepared, invoke):
    printed = invoke("data inspect", prepared)
    for text in ("prepared set", "median length", "sequence ", "verified files"):
        assert text in printed
    assert "DAMAGED" not in printed


def test_replaced_tokenizer_and_damaged_shards_are_reported(copy, inspect, capture):
    other = json.loads((copy / "tokenizer.json").read_text())
    other["added_tokens"][0]["lstrip"] = True
    (copy / "tokenizer.json").write_text(json.dumps(other))
    found = inspect(copy, code=1)
    assert "not the tokenizer the set was made with" in found["damage"][0]
    assert found["checked"] == found["shards"]
    index = json.loads((copy / "index.json").read_text())
    shards = [copy / shard["raw_data"]["basename"] for shard in index["shards"]]
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    data = bytearray(shards[1].read_bytes())
    data[-7] ^= 1
    shards[1].write_bytes(data)
    shards[2].unlink()
    shards[3].write_bytes(shards[3].read_bytes() + b"x")
    printed = capture("data inspect --samples 1000", copy, expect=1).out
    lines = [line.strip() for line in printed.splitlines() if ".mds" in line and "DAMAGED" in line]
    reasons = ("cut short: ", CHANGED, "missing", "too long: ")
    for line, shard, reason in zip(lines, shards[:4], reasons, strict=True):
        assert line.startswith(f"DAMAGED {shard}: {reason}")


def test_datasets_in_a_folder_are_inspected_one_by_one(prepared, tmp_path, capture):
    shutil.copytree(prepared, tmp_path / "all" / "first")
    np.zeros(5, "<u2").tofile(tmp_path / "all" / "second.npy")
    (tmp_path / "all" / "third.txt").write_text("text")
    next((tmp_path / "all" / "first").rglob("*.mds")).unlink()
    (tmp_path / "all" / "other").mkdir()
    (tmp_path / "all" / "other" / "index.json").write_text('{"shards": [{"column_names": [], "samples": 1}]}')
    found = json.loads(capture("data inspect --json", tmp_path / "all", expect=1).out)
    assert [(Path(one["path"]).name, one["kind"], len(one["damage"])) for one in found] == [
        ("first", "prepared set", 1),
        ("other", "cannot be read", 1),
        ("second.npy", "token file", 0),
        ("third.txt", "text", 0),
    ]
    assert "holds no finished set" in found[1]["damage"][0]


def test_path_without_a_dataset_is_a_one_line_error(prepared, tmp_path, invoke):
    (tmp_path / "a.txt").write_text("text")
    shutil.copytree(prepared, tmp_path / "unfinished")
    (tmp_path / "unfinished" / "corpus.json").unlink()
    (tmp_path / "mds").mkdir()
    (tmp_path / "mds" / "index.json").write_text("{")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "missing": "no such file or folder",
        "a.txt": "text, not tokens; tokenize it with: python -m stackexp data prepare",
        "unfinished": "not finished, 4 units so far; run the same data prepare command to resume",
        "mds": "holds no finished set",
        "empty": "empty",
    }.items():
        line = invoke("data inspect", tmp_path / name, expect=1)
        assert message in line


# Token files


@pytest.fixture(scope="module")
def ids(prepared) -> list[list[int]]:
    """Return the ids of each document, with end-of-text."""
    tokenizer = load_tokenizer(prepared / "tokenizer.json")
    return [[*tokenizer.encode(text).ids, 0] for text in DOCUMENTS]


def test_token_file_without_a_record(prepared, ids, tmp_path, inspect):
    tokens = np.concatenate(ids)
    tokens.astype("<u2").tofile(tmp_path / "a.npy")
    found = inspect(tmp_path / "a.npy", "--tokenizer", prepared / "tokenizer.json", "--samples", 1)
    assert (found["tokens"], found["documents"], found["largest_id"]) == (len(tokens), len(ids), tokens.max())
    assert (found["checked"], found["damage"]) == (0, [])
    np.full(9, 400, "<u2").tofile(tmp_path / "large.npy")
    found = inspect(tmp_path / "large.npy", "--tokenizer", prepared / "tokenizer.json", code=1)
    assert "token id 400 is outside the vocabulary of 400" in found["damage"][0]


def test_token_file_is_verified_by_its_record(prepared, ids, tmp_path, inspect):
    fingerprint, path = compute_fingerprint(load_tokenizer(prepared / "tokenizer.json")), tmp_path / "a.npy"
    record = {"vocab_size": 400, "tokenizer": fingerprint, "source": "here", "end_of_text": 0, "text_bytes": 5}
    write_token_file(path, [np.concatenate(ids)], **record)
    found = inspect(path)
    assert (found["checked"], found["documents"], found["bytes"]) == (1, len(ids), 5)
    assert found["longest"] == max(map(len, ids))
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    assert "the SHA-256 differs from the record" in inspect(path, code=1)["damage"][0]
    path.write_bytes(b"\1\2")
    assert "a.npy: 2 bytes" in inspect(path, code=1)["damage"][0]


def test_documents_of_files_with_a_header_or_an_index(prepared, ids, tmp_path, inspect):
    tokens, path = np.concatenate(ids).astype("<u2"), tmp_path / "a.bin"
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())
    assert "documents" not in inspect(path), "the ids that end documents in raw files are OLMo's"
    options = ["--tokenizer", prepared / "tokenizer.json"]
    path.write_bytes(header.tobytes() + np.roll(tokens, 1).tobytes())  # as llm.c writes it
    assert inspect(path, *options)["documents"] == len(ids)
    path.write_bytes(np.concatenate([document[:-1] for document in ids]).astype("<u2").tobytes())
    lengths = np.array([len(document) - 1 for document in ids])
    starts = np.cumsum([0, *2 * lengths[:-1]])
    index = struct.pack("<QBQQ", 1, 8, len(ids), len(ids) + 1) + lengths.astype("<i4").tobytes()
    index += starts.astype("<i8").tobytes() + np.arange(len(ids) + 1, dtype="<i8").tobytes()
    path.with_suffix(".idx").write_bytes(b"MMIDIDX\0\0" + index)
    found = inspect(path, *options)
    assert (found["documents"], found["longest"]) == (len(ids), max(lengths) + 1)


# Lengths


def test_document_lengths_do_not_depend_on_block_size():
    tokens = np.random.default_rng(0).integers(0, 9, 3000)
    ends = np.flatnonzero(tokens == 0)
    assert tokens[-1] != 0, "the last document must have no end"
    expected = np.diff(np.append(ends, len(tokens) - 1), prepend=-1)
    for size in (1, 7, 1000, 5000):
        found = measure_documents((tokens[begin : begin + size] for begin in range(0, len(tokens), size)), 0)
        assert found["documents"] == len(expected)
        assert found["mean_length"] == pytest.approx(expected.mean())
        for name, share in (("median_length", 0.5), ("90th_percentile_length", 0.9), ("longest", 1)):
            assert found[name] == np.quantile(expected, share, method="inverted_cdf")
