"""`data retokenize` on folders: errors before anything is written, resume after a kill, and the command line."""

from pathlib import Path

import numpy as np
import pytest
from processes import kill, wait_until
from test_retokenize import DOCUMENTS, NEW, ODD_TEXTS, OLD, TEXTS, convert, encode, make_retokenizer, write
from tokenizers import Tokenizer, decoders, models

from stackexp.cli import main
from stackexp.data.token_files import read_record
from stackexp.data.tokenizer import compute_fingerprint, load_tokenizer
from stackexp.errors import RunError
from stackexp.files import compute_sha256


def write_folder(folder: Path, count: int = 3, **record: object) -> dict[str, bytes]:
    """Write token files below `folder` and return the expected contents of the new files."""
    expected = {}
    for n in range(count):
        name, texts = f"v{n % 2}/set{n}.{'bin' if n % 3 else 'npy'}", [f"text {n}", *ODD_TEXTS[n % 4 :], TEXTS[2]]
        write(folder / name, encode(OLD, texts), **record)
        expected[name] = encode(NEW, texts).astype("<u2").tobytes()
    return expected


@pytest.mark.parametrize("tokenizer", ["", "gpt-neox-20b"])
def test_files_of_another_tokenizer_are_refused_before_anything_is_written(tmp_path, tokenizer):
    write_folder(tmp_path / "from")
    record = {"tokenizer": tokenizer} if tokenizer else {}
    write(tmp_path / "from" / "z.npy", encode(NEW, ["text"]), NEW, **record)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    with pytest.raises(RunError, match=r"z\.npy: token ids of another tokenizer \(.*\) than old\.json; set --from"):
        convert(tmp_path / "from", tmp_path / "new")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == before


def test_a_file_that_differs_from_its_record_is_refused(tmp_path):
    source = write(tmp_path / "a.npy", encode(OLD, ["one", "two"]))
    convert(source, tmp_path / "new")
    source.write_bytes(encode(OLD, ["two", "one"]).astype("<u2").tobytes())
    assert compute_sha256(source) != read_record(source).sha256
    with pytest.raises(RunError, match=r"a\.npy: its SHA-256 differs from its record"):
        convert(source, tmp_path / "new")


@pytest.mark.parametrize(
    ("ids", "position", "largest"),
    [([5, 6, 400, 7], 2, 399), ([5, -1], 1, 399), ([60_000], 0, 399), ([1, 350], 1, 450)],
)
def test_an_unknown_id_is_refused(tmp_path, ids, position, largest):
    old = OLD
    if largest == 450:  # a vocabulary with a gap at 350
        vocabulary = {t: i for t, i in OLD.get_vocab().items() if i != 350} | {"filler": 450}
        old = Tokenizer(models.BPE(vocabulary, []))
        old.decoder = decoders.ByteLevel()
    np.save(tmp_path / "a.npy", np.array(ids))
    message = rf"a\.npy: id .* at position {position} is not in .* largest id is {largest};"
    with pytest.raises(RunError, match=message):
        convert(tmp_path / "a.npy", tmp_path / "new", old)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".lock"]


def test_only_changed_files_are_converted_again(tmp_path, capsys):
    source, to = tmp_path / "from", tmp_path / "to"
    write_folder(source, tokenizer="unknown")

    def list_written(old: Tokenizer = OLD, new: Tokenizer = NEW, end: int | None = None) -> list[str]:
        before = {path: path.stat().st_mtime_ns for path in to.rglob("*.json")}
        make_retokenizer(old, new, end).retokenize(source, to)
        return sorted(path.name for path in to.rglob("*.json") if before.get(path) != path.stat().st_mtime_ns)

    everything = ["set0.npy.json", "set1.bin.json", "set2.bin.json"]
    assert list_written() == everything
    assert list_written() == []
    assert "set1.bin: already converted" in capsys.readouterr().err
    (to / "v1/set1.bin").write_bytes(b"cut")
    assert list_written() == ["set1.bin.json"]
    write(source / "v0/set2.bin", encode(OLD, [TEXTS[3]]), tokenizer="unknown")
    assert list_written() == ["set2.bin.json"]
    assert list_written(new=OLD) == everything
    assert list_written(old=NEW, new=OLD) == everything
    assert list_written(old=NEW, new=OLD, end=OLD.token_to_id("e")) == everything


def test_a_kill_loses_one_file_at_most(tmp_path, program, capsys):
    expected = write_folder(tmp_path / "from", 12)
    old, new, to = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "to"
    OLD.save(str(old)), NEW.save(str(new))
    command = ["data", "retokenize", tmp_path / "from", "--to", to, "--from", old, "--tokenizer", new]
    process = program.start(*command)
    try:
        wait_until(lambda: len(list(to.rglob("*.json"))) >= 2, process, 60)
    finally:
        kill(process)
    done = {path: path.stat().st_mtime_ns for path in to.rglob("*.json")}
    assert 2 <= len(done) < 12
    (to / "v1").mkdir(exist_ok=True)
    (to / "v1/.set9.npy.json.1-1").write_text("cut")  # in case the kill did not hit the writing of a record
    assert main([str(argument) for argument in command]) == 0
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert {name: (to / name).read_bytes() for name in expected} == expected
    assert capsys.readouterr().err.count("already converted") == len(done)
    assert [path.name for path in to.rglob(".*")] == [".lock"]


def test_the_verb_prints_a_table(tmp_path, capsys):
    for name, tokenizer in {"old": OLD, "new": NEW}.items():
        tokenizer.save(str(tmp_path / f"{name}.json"))
    source = write(tmp_path / "set.npy", encode(OLD, DOCUMENTS))
    tokenizers = ["--from", str(tmp_path / "old.json"), "--tokenizer", str(tmp_path / "new.json")]
    assert main(["data", "retokenize", str(source), "--to", str(tmp_path / "new"), *tokenizers]) == 0
    out = capsys.readouterr().out
    size, count = sum(len(text.encode()) for text in DOCUMENTS), len(encode(NEW, DOCUMENTS))
    row = ["set.npy", str(len(DOCUMENTS)), f"{count:,}", f"{size:,}", f"{size / count:.3f}"]
    assert row in [line.split() for line in out.splitlines()]
    assert f"data.validation.NAME={tmp_path / 'new'}" in out
    record = read_record(tmp_path / "new" / "set.npy")
    assert record.tokenizer == compute_fingerprint(load_tokenizer(tmp_path / "new.json"))  # as validate compares them


NEW_TO_NEW = ["--from", "new.json", "--tokenizer", "new.json"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["a.npy", "--to", "x", *NEW_TO_NEW, "--end-of-text", "-1"], 2, "--end-of-text: expected an integer >= 0"),
        (
            ["a.npy", "--to", "x", *NEW_TO_NEW, "--end-of-text", "599"],
            1,
            "a.npy: contains no id 599; set --end-of-text",
        ),
        (["a.npy", "--to", "x", "--from", "a.npy", "--tokenizer", "new.json"], 1, "a.npy: not a readable tokenizer"),
        (["none", "--to", "x", *NEW_TO_NEW], 1, "none: no such file or folder"),
        (["empty", "--to", "x", *NEW_TO_NEW], 1, "empty: nothing to read (found no files)"),
        ([".", "--to", "x", *NEW_TO_NEW], 1, "x: contains the source files"),
        (["a.npy", "--to", ".", *NEW_TO_NEW], 1, ".: contains the source files"),
        (["a.npy", "--to", "b.txt", *NEW_TO_NEW], 1, "b.txt: cannot be written"),
    ],
)
def test_errors_are_one_line(arguments, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    OLD.save("old.json"), NEW.save("new.json")
    write(Path("a.npy"), encode(NEW, ["text"]), NEW)
    Path("b.txt").write_text("")
    Path("empty").mkdir()
    assert main(["data", "retokenize", *arguments]) == code
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert message in line
    assert not Path("x").exists()
