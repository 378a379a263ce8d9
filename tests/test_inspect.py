"""`data inspect`: what a set holds, and which of its files are damaged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from corpora import TEXTS, json_lines, prepare_set

from stackexp.data.shards import TokenSet
from stackexp.data.token_files import write_token_file
from stackexp.data.tokenizer import compute_fingerprint, load_tokenizer
from stackexp.data.units import TAIL
from stackexp.errors import ConfigError, RunError
from stackexp.reports.data.lengths import Documents, Lengths
from stackexp.verbs.data_inspect import main

DOCUMENTS = [*TEXTS, "x", "yes"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Four units of work, their documents across the ends of shards and units, and a bad line."""
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


@pytest.fixture(scope="module")
def ids(prepared) -> list[list[int]]:
    """The ids of each document, with end-of-text."""
    tokenizer = load_tokenizer(prepared / "tokenizer.json")
    return [[*tokenizer.encode(text).ids, 0] for text in DOCUMENTS]


def as_json(capsys, *arguments: object, expect: int = 0) -> list[dict]:
    assert main([*map(str, arguments), "--json"]) == expect
    return json.loads(capsys.readouterr().out)


def test_a_prepared_set(prepared, ids, capsys):
    [found] = as_json(capsys, prepared, "--samples", 2)
    corpus = TokenSet(prepared).corpus
    lengths = [len(document) for document in ids]
    assert found["kind"] == "prepared set"
    assert {n: found[n] for n in ("tokens", "documents", "bytes", "sequences", "tokenizer", "vocab_size")} == {
        "tokens": sum(lengths),
        "documents": len(DOCUMENTS),
        "bytes": sum(len(text.encode()) for text in DOCUMENTS),
        "sequences": corpus.sequences,
        "tokenizer": corpus.tokenizer,
        "vocab_size": 400,
    }
    assert found["bad_lines"] == 1
    assert found["checked"] == found["shards"] == len(list(prepared.rglob("*.mds")))
    assert found["damage"] == []
    assert found["lengths"]["mean"] == pytest.approx(np.mean(lengths)), "also of those that two units share"
    assert found["lengths"]["longest"] == max(lengths)
    assert sum(found["lengths"]["documents"]) == len(lengths)
    opened, tokenizer = TokenSet(prepared), load_tokenizer(prepared / "tokenizer.json")
    assert len(found["samples"]) == 2
    for place, text in found["samples"].items():
        index = int(place.removeprefix("sequence ").replace(",", ""))
        assert text == tokenizer.decode(opened[index].tolist(), skip_special_tokens=False)
    assert as_json(capsys, prepared, "--samples", 2) == [found], "the same again"
    assert as_json(capsys, prepared, "--samples", 2, "--seed", 1)[0]["samples"] != found["samples"]


def test_what_is_printed(prepared, capsys):
    assert main([str(prepared)]) == 0
    printed = capsys.readouterr().out
    for text in (
        "prepared set",
        "document length in tokens: median",
        "█",
        "of the text",
        "sequence ",
        "as their index",
    ):
        assert text in printed
    assert "DAMAGED" not in printed


def test_the_figure_is_drawn_only_if_asked_for(prepared, tmp_path, capsys):
    assert main([str(prepared), "--figure", str(tmp_path / "figures" / "lengths.png")]) == 0
    assert (tmp_path / "figures" / "lengths.png").read_bytes()[:4] == b"\x89PNG"
    assert capsys.readouterr().out.endswith("lengths.png\n")


def test_all_damaged_shards_are_named(copy, capsys):
    shards = sorted(copy.glob("unit.*/*.mds"))
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    data = bytearray(shards[1].read_bytes())
    data[-7] ^= 1
    shards[1].write_bytes(data)
    shards[2].unlink()
    shards[3].write_bytes(shards[3].read_bytes() + b"x")
    assert main([str(copy), "--samples", "1000"]) == 1
    printed = capsys.readouterr().out.splitlines()
    named = [line.strip().removeprefix("DAMAGED ") for line in printed if "DAMAGED" in line]
    reasons = ("cut short: ", "corrupt: another SHA256 than recorded", "missing", "too long: ")
    assert len(named) == 4
    for line, shard, reason in zip(named, shards, reasons, strict=True):
        assert line.startswith(f"{shard}: {reason}")


def test_damaged_ends_of_units_are_named(copy, capsys):
    cut, changed, gone, lost = (copy / f"unit.0000{n}" for n in range(4))
    (cut / TAIL).write_bytes((cut / TAIL).read_bytes()[:-1])
    (changed / TAIL).write_bytes((changed / TAIL).read_bytes()[:-1] + b"\1")
    (gone / TAIL).unlink()
    (lost / "unit.json").write_text("{")
    [found] = as_json(capsys, copy, expect=1)
    other = "corrupt: another SHA256 than recorded"
    assert found["damage"] == [
        f"{cut / TAIL}: {other}",
        f"{changed / TAIL}: {other}",
        f"{gone / TAIL}: missing",
        f"{lost}/unit.json: missing or corrupt",
    ]
    for folder in (cut, changed, lost):
        (folder / TAIL).unlink()
    [found] = as_json(capsys, copy)
    assert found["lengths"]["longest"], "a copy without any is no damage"


def test_a_unit_too_short_for_a_sequence(prepared, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(TEXTS[1])
    (tmp_path / "b.txt").write_text("short")
    prepare_set(tmp_path, tmp_path / "set", tokenizer=prepared / "tokenizer.json", unit_bytes=1)
    [found] = as_json(capsys, tmp_path / "set")
    assert sum(found["lengths"]["documents"]) == found["documents"] == 2


def test_a_tokenizer_that_is_not_the_index_s(copy, capsys):
    other = json.loads((copy / "tokenizer.json").read_text())
    other["added_tokens"][0]["lstrip"] = True
    (copy / "tokenizer.json").write_text(json.dumps(other))
    [found] = as_json(capsys, copy, expect=1)
    assert "not the tokenizer the set was made with" in found["damage"][0]
    assert found["checked"] == found["shards"], "the shards are compared all the same"


def test_a_count_that_is_wrong(copy, capsys):
    record = json.loads((copy / "corpus.json").read_text())
    (copy / "corpus.json").write_text(json.dumps(record | {"documents": 9}))
    [found] = as_json(capsys, copy, expect=1)
    assert found["damage"] == [f"{copy}/corpus.json: 9 documents, found 7"]


def test_token_files(prepared, ids, tmp_path, capsys):
    tokens, own = np.concatenate(ids), prepared / "tokenizer.json"
    tokens.astype("<u2").tofile(tmp_path / "bare.npy")
    [found] = as_json(capsys, tmp_path / "bare.npy", "--tokenizer", own, "--samples", 1)
    assert (found["tokens"], found["documents"], found["largest_id"]) == (len(tokens), len(ids), tokens.max())
    assert (found["checked"], found["damage"]) == (0, [])
    record = {
        "vocab_size": 400,
        "tokenizer": compute_fingerprint(load_tokenizer(own)),
        "source": "here",
        "end_of_text": 0,
    }
    write_token_file(tmp_path / "known.npy", [tokens], **record, text_bytes=5)
    [found] = as_json(capsys, tmp_path / "known.npy")
    assert (found["checked"], found["documents"], found["bytes"]) == (1, len(ids), 5)
    assert found["lengths"]["longest"] == max(map(len, ids))
    (tmp_path / "known.npy").write_bytes(b"\1" + (tmp_path / "known.npy").read_bytes()[1:])
    [found] = as_json(capsys, tmp_path / "known.npy", expect=1)
    assert "another SHA-256 than in its record" in found["damage"][0]
    (tmp_path / "known.npy").write_bytes(b"\1\2")
    [found] = as_json(capsys, tmp_path / "known.npy", expect=1)
    assert "2 bytes, not the" in found["damage"][0]
    np.full(9, 400, "<u2").tofile(tmp_path / "large.npy")
    [found] = as_json(capsys, tmp_path / "large.npy", "--tokenizer", own, expect=1)
    assert "token id 400, outside the vocabulary of 400" in found["damage"][0]


@pytest.fixture
def foreign(ids, tmp_path) -> Path:
    """MDS as mosaicml-streaming writes it: several small shards, with a hash that hashlib does not know."""
    from streaming import MDSWriter

    columns = {"tokens": "ndarray:int32"}
    with MDSWriter(out=str(tmp_path / "mds"), columns=columns, size_limit=1 << 13, hashes=["xxh64"]) as writer:
        for document in ids:
            for begin in range(0, len(document), 500):
                writer.write({"tokens": np.array(document[begin : begin + 500], np.int32)})
    return tmp_path / "mds"


def test_other_people_s_shards(foreign, prepared, ids, capsys):
    [found] = as_json(capsys, foreign, "--tokenizer", prepared / "tokenizer.json", "--samples", 1)
    shards = sorted(foreign.glob("*.mds"))
    assert found["kind"] == "MDS shards"
    assert found["checked"] == found["shards"] == len(shards) > 3
    assert (found["tokens"], found["documents"]) == (sum(map(len, ids)), len(ids))
    shards[1].write_bytes(shards[1].read_bytes()[:-1] + b"\7")
    shards[2].write_bytes(b"")
    [found] = as_json(capsys, foreign, expect=1)
    assert [line.split(": ")[0] for line in found["damage"]] == [str(shards[1]), str(shards[2])]


def test_shards_of_text(tmp_path, capsys):
    from streaming import MDSWriter

    with MDSWriter(out=str(tmp_path / "mds"), columns={"text": "str"}) as writer:
        for text in ("one", "naïve 東京"):
            writer.write({"text": text})
    [found] = as_json(capsys, tmp_path / "mds")
    assert (found["bytes"], found["documents"]) == (3 + len("naïve 東京".encode()), 2)
    assert set(found["samples"].values()) == {"one", "naïve 東京"}
    assert found["lengths"]["unit"] == "bytes"


def test_a_folder_of_sets(prepared, tmp_path, capsys):
    shutil.copytree(prepared, tmp_path / "all" / "first")
    np.zeros(5, "<u2").tofile(tmp_path / "all" / "second.npy")
    (tmp_path / "all" / "third.txt").write_text("text")
    found = as_json(capsys, tmp_path / "all")
    assert [(Path(one["path"]).name, one["kind"]) for one in found] == [
        ("first", "prepared set"),
        ("second.npy", "token file"),
        ("third.txt", "text"),
    ]
    next((tmp_path / "all" / "first").rglob("*.mds")).unlink()
    (tmp_path / "all" / "other").mkdir()
    (tmp_path / "all" / "other" / "index.json").write_text('{"shards": [{"column_names": [], "samples": 1}]}')
    found = as_json(capsys, tmp_path / "all", expect=1)
    assert [len(one["damage"]) for one in found] == [1, 1, 0, 0], "two are damaged, all are shown"
    assert "index.json: missing or corrupt" in found[1]["damage"][0]


def test_what_is_no_set_is_one_line(prepared, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    shutil.copytree(prepared, tmp_path / "unfinished")
    (tmp_path / "unfinished" / "corpus.json").unlink()
    (tmp_path / "mds").mkdir()
    (tmp_path / "mds" / "index.json").write_text("{")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "missing": "no such file or folder",
        "a.txt": "text; to see its tokens: python -m stackexp data prepare",
        "unfinished": "not finished, 4 units of work so far; the same data prepare command goes on",
        "mds": r"index\.json: missing or corrupt",
        "empty": "holds no sets",
    }.items():
        with pytest.raises(RunError, match=message) as error:
            main([str(tmp_path / name)])
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "expected PATH"),
        ("a b", "unexpected argument b"),
        ("a --samples -1", "--samples: expected an integer >= 0, found -1"),
        ("a --figure x.jpeg", r"--figure: expected a name that ends in \.png"),
        ("a --sample 3", "samples"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    with pytest.raises(ConfigError, match=message):
        main(arguments.split())


def test_lengths_do_not_depend_on_where_blocks_end():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 9, 3000)
    ends = np.flatnonzero(tokens == 0)
    expected = np.diff(np.append(ends, len(tokens) - 1), prepend=-1)
    assert tokens[-1] != 0, "else the last document is whole"
    for size in (1, 7, 1000, 5000):
        documents = Documents(0)
        for begin in range(0, len(tokens), size):
            documents.add(tokens[begin : begin + size])
        documents.close()
        counts, sums, edges = documents.lengths.coarse()
        assert counts.tolist() == np.histogram(expected, edges)[0].tolist()
        assert sums.sum() == len(tokens)


def test_quantiles():
    lengths = Lengths()
    values = np.random.default_rng(0).lognormal(6, 1.5, 5000).astype(int) + 1
    lengths.add(values)
    for share in (0.1, 0.5, 0.9):
        assert lengths.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.05)
