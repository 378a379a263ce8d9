"""Token files from one tokenizer to another: nothing of the text is lost, and nothing is done twice."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import kill, wait_until
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from stackexp.cli import main
from stackexp.data import readers, retokenize
from stackexp.data.evaluation_sets import KnownTokenizer
from stackexp.data.retokenize import Counts, Retokenizer
from stackexp.data.token_files import TokenFile, read_record, sha256_of, write_record, write_token_file
from stackexp.data.tokenizer import (
    END_OF_TEXT,
    compute_fingerprint,
    get_vocab_size,
    load_tokenizer,
    train_tokenizer,
    treat_special_tokens_as_text,
)
from stackexp.errors import RunError

STDLIB = Path(os.__file__).parent
TEXTS = [(STDLIB / name).read_text() for name in ("ast.py", "bisect.py", "heapq.py", "keyword.py")]
ODD = ["naïve 東京 🙂\r\n", "<|endoftext|>", "", "x", "tabs\tand  two,   three spaces\n\n\n", "a real \ufffd"]
DOCUMENTS = [TEXTS[0], *ODD, *TEXTS[1:]]
OLD = train_tokenizer(TEXTS[:1], 400)
NEW = train_tokenizer([*TEXTS[2:], *ODD], 600)


def neox_like() -> Tokenizer:
    """Laid out as GPT-NeoX-20B's: <|endoftext|> is 0, <|padding|> 1, 50254..50276 are runs of 24..2 spaces, as text."""
    vocabulary = {token: i + (i > 0) for token, i in OLD.get_vocab().items()} | {"<|padding|>": 1}
    vocabulary |= {f"filler{n}": n for n in range(len(vocabulary), 50_254)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT, "<|padding|>"])
    tokenizer.add_tokens([" " * n for n in range(24, 1, -1)])
    return treat_special_tokens_as_text(tokenizer)


NEOX = neox_like()


def ids_of(tokenizer: Tokenizer, documents: list[str], end: int = 0) -> np.ndarray:
    encodings = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    return np.array([i for encoding in encodings for i in [*encoding.ids, end]], np.int64)


def write(path: Path, ids: np.ndarray, made_by: Tokenizer = OLD, **record: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {"tokenizer": compute_fingerprint(made_by), "source": "test"} | record
    write_token_file(path, [ids], vocab_size=get_vocab_size(made_by), **fields)
    return path


def convert(source: Path, folder: Path, old: Tokenizer = OLD, new: Tokenizer = NEW, end: int | None = None) -> Path:
    """The new file of a source file."""
    retokenizer(old, new, end).retokenize(source, folder)
    return folder / source.name


def retokenizer(old: Tokenizer = OLD, new: Tokenizer = NEW, end: int | None = None) -> Retokenizer:
    return Retokenizer(KnownTokenizer(old, Path("old.json")), new, end)


def ids_in(path: Path) -> list[int]:
    return TokenFile(path).tokens.tolist()


@pytest.mark.parametrize("raw", [True, False])
def test_there_and_back(tmp_path, raw):
    source = tmp_path / "a.npy"
    if raw:
        source.write_bytes(ids_of(OLD, DOCUMENTS).astype("<u2").tobytes())
    else:
        np.save(source, ids_of(OLD, DOCUMENTS))
    there = convert(source, tmp_path / "new")
    assert ids_in(there) == ids_of(NEW, DOCUMENTS).tolist()
    back = convert(there, tmp_path / "old", NEW, OLD)
    assert ids_in(back) == ids_of(OLD, DOCUMENTS).tolist()
    record = read_record(there)
    assert (record.tokenizer, record.end_of_text, record.vocab_size) == (
        compute_fingerprint(NEW),
        0,
        get_vocab_size(NEW),
    )
    assert (record.documents, record.replaced_documents) == (len(DOCUMENTS), 0)
    assert record.text_bytes == sum(len(text.encode()) for text in DOCUMENTS) == read_record(back).text_bytes


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=6),
    ids_at_once=st.integers(1, 9),
    piece=st.integers(4, 30),
    last_ends=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_wherever_files_and_documents_are_cut(texts, ids_at_once, piece, last_ends):
    ids = ids_of(OLD, texts)
    ids = ids if last_ends or not texts[-1] else ids[:-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retokenize, "IDS_AT_ONCE", ids_at_once)
        patch.setattr(readers, "PIECE_CHARACTERS", piece)
        new = encoded(ids, OLD, NEW)
        back = encoded(new, NEW, OLD)
    assert documents_in(NEW, new.tolist()) == documents_in(OLD, ids.tolist()) == documents_in(OLD, back.tolist())


class InMemory:
    """In place of a TokenFile."""

    def __init__(self, tokens: np.ndarray):
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)


def encoded(ids: np.ndarray, old: Tokenizer, new: Tokenizer) -> np.ndarray:
    return np.concatenate(list(retokenizer(old, new).encoded(InMemory(ids), 0, Counts(), lambda count: None)))


def documents_in(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Their text; what follows the last end is the last."""
    ends = [-1, *(n for n, i in enumerate(ids) if i == 0), len(ids)]
    parts = [ids[a + 1 : b] for a, b in itertools.pairwise(ends)]
    return [tokenizer.decode(part, skip_special_tokens=False) for part in parts]


def test_an_end_at_the_beginning_and_none_at_the_end_stay_so(tmp_path):
    text = "for x in y:\n"
    ids = np.array([0, 0, *OLD.encode(text).ids, 0, *OLD.encode("pass").ids])
    new = convert(write(tmp_path / "a.npy", ids), tmp_path / "new")
    assert ids_in(new) == [0, 0, *NEW.encode(text).ids, 0, *NEW.encode("pass").ids]
    assert read_record(new).documents == 4


def test_runs_of_spaces_and_other_added_tokens_survive(tmp_path):
    texts = ["a" + " " * n + "b" for n in range(1, 60)] + ["<|endoftext|>", "  "]
    source = write(tmp_path / "a.npy", ids_of(NEOX, texts), NEOX)
    assert {50_254, 50_276} <= set(ids_in(source))
    new = convert(source, tmp_path / "new", NEOX)
    assert ids_in(new) == ids_of(NEW, texts).tolist()
    assert ids_in(convert(new, tmp_path / "back", NEW, NEOX)) == ids_in(source)


def test_a_special_token_within_a_document_is_its_text(tmp_path):
    tokenizer = Tokenizer.from_str(OLD.to_str())
    tokenizer.add_special_tokens(["|||EMAIL|||"])
    ids = np.array([*OLD.encode("to ").ids, tokenizer.token_to_id("|||EMAIL|||"), 0])
    new = convert(write(tmp_path / "a.npy", ids, tokenizer), tmp_path / "new", tokenizer)
    assert NEW.decode(ids_in(new)[:-1]) == "to |||EMAIL|||"


@pytest.mark.parametrize("known_from", ["file", "record", "option"])
def test_the_id_that_ends_documents_is_looked_for(tmp_path, capsys, known_from):
    """OLMo's V2 was written with the last id, which is also the token of two spaces."""
    texts, options = ["one", "two", "three  four"], {}
    ids = ids_of(NEOX, texts, end=50_276)
    if known_from == "record":
        options = {"end_of_text": 50_276}
    if known_from != "file":
        ids = ids[:-1]
    source = write(tmp_path / "a.npy", ids, NEOX, **options)
    new = convert(source, tmp_path / "new", NEOX, end=50_276 if known_from == "option" else None)
    expected = ids_of(NEW, ["one", "two", "three", "four"]).tolist()
    assert ids_in(new) == (expected if known_from == "file" else expected[:-1])
    assert ("id 50276 ends the documents of a.npy, but is also the tokenizer's '  '" in capsys.readouterr().err) == (
        known_from != "option"
    )


def test_what_ends_no_document_is_remarked_on(tmp_path, capsys):
    convert(write(tmp_path / "a.npy", np.array(OLD.encode("one text").ids)), tmp_path / "new")
    assert "a.npy: id 0, which ends a document, is not in it: taken for one document" in capsys.readouterr().err
    convert(write(tmp_path / "a.npy", ids_of(OLD, ["a", "b"])), tmp_path / "new")
    assert "note" not in capsys.readouterr().err


def test_an_end_beyond_the_tokenizer_is_fine(tmp_path):
    """50279 ends documents where OLMo's tokenizer has three tokens more than GPT-NeoX-20B's file."""
    source = tmp_path / "a.npy"
    source.write_bytes(ids_of(NEOX, ["one", "two"], end=50_279).astype("<u2").tobytes())
    assert ids_in(convert(source, tmp_path / "new", NEOX)) == ids_of(NEW, ["one", "two"]).tolist()


def test_what_is_no_utf8_is_replaced_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(retokenize, "IDS_AT_ONCE", 1)  # characters come in parts
    byte = {token: OLD.token_to_id(token) for token in ("ð", "Ł")}  # the bytes F0 and 9F
    good, broken = OLD.encode("é🙂\ufffd").ids, [OLD.token_to_id("a"), byte["ð"], byte["Ł"]]
    ids = np.array([*good, 0, *broken, 0, *good, 0, *broken[1:], *OLD.encode("b").ids])
    source = write(tmp_path / "a.npy", ids)
    new = convert(source, tmp_path / "new")
    assert documents_in(NEW, ids_in(new)) == ["é🙂\ufffd", "a\ufffd", "é🙂\ufffd", "\ufffdb"]
    record = read_record(new)
    assert (record.documents, record.replaced_documents) == (4, 2)
    assert record.text_bytes == 2 * 9 + 4 + 4
    assert read_record(source).text_bytes == 2 * 9 + 3 + 3


def test_the_record_of_the_source_learns_the_bytes_of_its_text(tmp_path, capsys, monkeypatch):
    source = write(tmp_path / "a.npy", ids_of(OLD, DOCUMENTS), documents=7)
    before = read_record(source)

    def refuse(*_) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(retokenize, "write_record", refuse)
        convert(source, tmp_path / "other")
    assert "a.npy stays without the bytes of its text (Permission denied)" in capsys.readouterr().err
    assert read_record(source) == before
    new = convert(source, tmp_path / "new")
    after = read_record(source)
    assert after.text_bytes == read_record(new).text_bytes
    assert (after.sha256, after.documents) == (before.sha256, 7)
    for text_bytes in (None, 7):  # as after a kill between the two records, or an earlier version's mistake
        write_record(source, replace(before, text_bytes=text_bytes))
        convert(source, tmp_path / "new")
        assert read_record(source) == after
    write_record(source, before)
    convert(source, tmp_path / "third", end=0)  # which ends a document here, but who knows
    assert read_record(source) == before


@pytest.mark.parametrize("whose", ["", "gpt-neox-20b"])
def test_a_file_of_another_tokenizer_is_refused_before_anything_is_written(tmp_path, whose):
    folder_of_files(tmp_path / "from")
    record = {"tokenizer": whose} if whose else {}
    write(tmp_path / "from" / "z.npy", ids_of(NEW, ["text"]), NEW, **record)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    with pytest.raises(RunError, match=r"z\.npy: token ids of another tokenizer \(.*\) than old\.json; give"):
        convert(tmp_path / "from", tmp_path / "new")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == before


def test_a_file_that_is_not_what_its_record_says_is_refused(tmp_path):
    source = write(tmp_path / "a.npy", ids_of(OLD, ["one", "two"]))
    convert(source, tmp_path / "new")
    source.write_bytes(ids_of(OLD, ["two", "one"]).astype("<u2").tobytes())
    assert sha256_of(source) != read_record(source).sha256
    with pytest.raises(RunError, match=r"a\.npy: not what its record says"):
        convert(source, tmp_path / "new")


def test_what_the_new_tokenizer_has_no_token_for_is_remarked_on(tmp_path, capsys):
    new = Tokenizer(models.BPE({END_OF_TEXT: 0, "a": 1, "b": 2}, []))
    convert(write(tmp_path / "a.npy", ids_of(OLD, ["ab é", "b"])), tmp_path / "new", new=new)
    assert "a.npy: 3 of 6 bytes of text are not in its tokens" in capsys.readouterr().err
    convert(write(tmp_path / "b.npy", ids_of(OLD, ["ab", "b"])), tmp_path / "new", new=new)
    assert "not in its tokens" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ids", "position", "largest"),
    [([5, 6, 400, 7], 2, 399), ([5, -1], 1, 399), ([60_000], 0, 399), ([1, 350], 1, 450)],
)
def test_an_id_of_another_tokenizer_is_named(tmp_path, ids, position, largest):
    old = OLD
    if largest == 450:  # a gap below it
        vocabulary = {t: i for t, i in OLD.get_vocab().items() if i != 350} | {"filler": 450}
        old = Tokenizer(models.BPE(vocabulary, []))
        old.decoder = decoders.ByteLevel()
    np.save(tmp_path / "a.npy", np.array(ids))
    with pytest.raises(RunError, match=rf"a\.npy: id .* at position {position} is not of .* largest is {largest};"):
        convert(tmp_path / "a.npy", tmp_path / "new", old)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".lock"]


def test_a_tokenizer_that_is_not_byte_level(tmp_path):
    pieces = ["<unk>", "</s>", "▁", "a", "b", "c", "▁a", "▁b", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    tokenizer = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, [("▁", "a"), ("▁", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    ids = np.array([6, 7, 5, 1, 1, 6, 8, 9, 10, 11, 1, 4, 0, 1, 3, 8])
    new = convert(write(tmp_path / "a.npy", ids, tokenizer), tmp_path / "new", tokenizer)
    assert documents_in(NEW, ids_in(new)) == ["a bc", "", "a🙂", "b<unk>", "a\ufffd"]
    assert read_record(new).replaced_documents == 1


def folder_of_files(folder: Path, count: int = 3, **record: object) -> dict[str, bytes]:
    """Token files below `folder`; what the new ones must hold."""
    expected = {}
    for n in range(count):
        name, texts = f"v{n % 2}/set{n}.{'bin' if n % 3 else 'npy'}", [f"text {n}", *ODD[n % 4 :], TEXTS[2]]
        write(folder / name, ids_of(OLD, texts), **record)
        expected[name] = ids_of(NEW, texts).astype("<u2").tobytes()
    return expected


def test_a_folder_keeps_its_names(tmp_path):
    expected = folder_of_files(tmp_path / "from")
    (tmp_path / "from" / "README.md").write_text("")
    (tmp_path / "from" / ".hidden.npy").write_text("")
    records = retokenizer().retokenize(tmp_path / "from", tmp_path / "to")
    assert records.keys() == expected.keys()
    assert {name: (tmp_path / "to" / name).read_bytes() for name in expected} == expected


def test_only_what_changed_is_done_again(tmp_path, capsys):
    source, to = tmp_path / "from", tmp_path / "to"
    folder_of_files(source, tokenizer="unknown")

    def written(old: Tokenizer = OLD, new: Tokenizer = NEW, end: int | None = None) -> list[str]:
        before = {path: path.stat().st_mtime_ns for path in to.rglob("*.json")}
        retokenizer(old, new, end).retokenize(source, to)
        return sorted(path.name for path in to.rglob("*.json") if before.get(path) != path.stat().st_mtime_ns)

    everything = ["set0.npy.json", "set1.bin.json", "set2.bin.json"]
    assert written() == everything
    assert written() == []
    assert "set1.bin: already there" in capsys.readouterr().err
    (to / "v1/set1.bin").write_bytes(b"cut")
    assert written() == ["set1.bin.json"]
    write(source / "v0/set2.bin", ids_of(OLD, [TEXTS[3]]), tokenizer="unknown")
    assert written() == ["set2.bin.json"]
    assert written(new=OLD) == everything
    assert written(old=NEW, new=OLD) == everything
    assert written(old=NEW, new=OLD, end=OLD.token_to_id("e")) == everything


def test_a_kill_loses_one_file_at_most(tmp_path, program, capsys):
    expected = folder_of_files(tmp_path / "from", 12)
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
    assert main([str(argument) for argument in command]) == 0
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert {name: (to / name).read_bytes() for name in expected} == expected
    assert capsys.readouterr().err.count("already there") == len(done)
    assert [path.name for path in to.rglob(".*")] == [".lock"]


def test_the_verb(tmp_path, capsys):
    for name, tokenizer in {"old": OLD, "new": NEW}.items():
        tokenizer.save(str(tmp_path / f"{name}.json"))
    source = write(tmp_path / "set.npy", ids_of(OLD, DOCUMENTS))
    tokenizers = ["--from", str(tmp_path / "old.json"), "--tokenizer", str(tmp_path / "new.json")]
    assert main(["data", "retokenize", str(source), "--to", str(tmp_path / "new"), *tokenizers]) == 0
    out = capsys.readouterr().out
    size, count = sum(len(text.encode()) for text in DOCUMENTS), len(ids_of(NEW, DOCUMENTS))
    row = ["set.npy", str(len(DOCUMENTS)), f"{count:,}", f"{size:,}", f"{size / count:.3f}"]
    assert row in [line.split() for line in out.splitlines()]
    assert f"data.validation.NAME={tmp_path / 'new'}" in out
    record = read_record(tmp_path / "new" / "set.npy")
    assert record.tokenizer == compute_fingerprint(load_tokenizer(tmp_path / "new.json"))  # as validate compares them


NEW_TO_NEW = ["--from", "new.json", "--tokenizer", "new.json"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "required: SOURCE, --to, --from, --tokenizer"),
        (["a.npy", "--to", "x", "--tokenizer", "new.json"], 2, "required: --from"),
        (["a.npy", "b.npy", "--to", "x", *NEW_TO_NEW], 2, "unexpected argument b.npy"),
        (["a.npy", "--to", "x", *NEW_TO_NEW, "--end-of-txt", "5"], 2, "--end-of-txt; did you mean '--end-of-text'?"),
        (["a.npy", "--to", "x", *NEW_TO_NEW, "--end-of-text", "-1"], 2, "--end-of-text -1: ids are not negative"),
        (["a.npy", "--to", "x", *NEW_TO_NEW, "--end-of-text", "599"], 1, "a.npy: holds no id 599; --end-of-text is"),
        (["a.npy", "--to", "x", "--from", "a.npy", "--tokenizer", "new.json"], 1, "a.npy: not a readable tokenizer"),
        (["a.npy", "--to", "x", "--from", "old.json", "--tokenizer", "new.json"], 1, "a.npy: token ids of another"),
        (["none", "--to", "x", *NEW_TO_NEW], 1, "none: no such file or folder"),
        (["empty", "--to", "x", *NEW_TO_NEW], 1, "empty: holds no token files"),
        ([".", "--to", "x", *NEW_TO_NEW], 1, "x: holds the files to read"),
        (["a.npy", "--to", ".", *NEW_TO_NEW], 1, ".: holds the files to read"),
        (["a.npy", "--to", "b.txt", *NEW_TO_NEW], 1, "b.txt: cannot be written"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    OLD.save("old.json"), NEW.save("new.json")
    write(Path("a.npy"), ids_of(NEW, ["text"]), NEW)
    Path("b.txt").write_text("")
    Path("empty").mkdir()
    assert main(["data", "retokenize", *arguments]) == code
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert message in line
    assert not Path("x").exists()


PEAK = """
import sys
from stackexp.cli import main
assert main(sys.argv[1:]) == 0
[line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]  # ru_maxrss begins at the parent's
print("peak", line.split()[1])
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_document(tmp_path):
    """One document of 8 million tokens, as of 2 million: the same peak."""
    OLD.save(str(tmp_path / "old.json"))
    text = np.array(OLD.encode(TEXTS[0]).ids, "<u2")
    peaks = []
    for millions in (2, 8):
        source = tmp_path / f"{millions}.npy"
        source.write_bytes(np.tile(text, millions * 10**6 // len(text)).tobytes())
        tokenizers = ["--from", tmp_path / "old.json", "--tokenizer", tmp_path / "old.json"]
        command = ["data", "retokenize", source, "--to", tmp_path / "new", *tokenizers]
        ended = subprocess.run([sys.executable, "-c", PEAK, *command], check=True, stdout=subprocess.PIPE, text=True)
        peaks.append(int(ended.stdout.split()[-1]))
    assert peaks[1] < peaks[0] + (32 << 10), peaks  # KiB; the file's own pages are 12 MiB more
