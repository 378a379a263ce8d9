"""Conversion of token files to another tokenizer without loss of text, resume after a kill, and the command line."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from corpora import TEXTS
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import kill, wait_until
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from stackexp.data import token_files
from stackexp.data.retokenize import DocumentDecoder, Retokenizer
from stackexp.data.token_files import TokenFile, read_record, write_token_file
from stackexp.data.tokenizer import (
    END_OF_TEXT,
    KnownTokenizer,
    compute_fingerprint,
    get_vocab_size,
    load_tokenizer,
    tokenize_pieces,
    train_tokenizer,
    treat_special_tokens_as_text,
)
from stackexp.errors import RunError

ODD_TEXTS = ["naïve 東京 🙂\r\n", "<|endoftext|>", "", "x", "tabs\tand  two,   three spaces\n\n\n", "a real \ufffd"]
DOCUMENTS = [TEXTS[0], *ODD_TEXTS, *TEXTS[1:]]
OLD = train_tokenizer(TEXTS[:1], 400)
NEW = train_tokenizer([*TEXTS[2:], *ODD_TEXTS], 600)


def make_neox_tokenizer() -> Tokenizer:
    """Make a tokenizer with GPT-NeoX-20B's special ids; 50254..50276 are runs of 24..2 spaces."""
    vocabulary = {token: i + (i > 0) for token, i in OLD.get_vocab().items()} | {"<|padding|>": 1}
    vocabulary |= {f"filler{n}": n for n in range(len(vocabulary), 50_254)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT, "<|padding|>"])
    tokenizer.add_tokens([" " * n for n in range(24, 1, -1)])
    return treat_special_tokens_as_text(tokenizer)


NEOX = make_neox_tokenizer()


def encode(tokenizer: Tokenizer, documents: list[str], end: int = 0) -> np.ndarray:
    encodings = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    return np.array([i for encoding in encodings for i in [*encoding.ids, end]], np.int64)


def write(path: Path, ids: np.ndarray, made_by: Tokenizer = OLD, **record: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {"tokenizer": compute_fingerprint(made_by), "source": "test"} | record
    write_token_file(path, [ids], vocab_size=get_vocab_size(made_by), **fields)
    return path


def make_retokenizer(old: Tokenizer = OLD, new: Tokenizer = NEW, end: int | None = None) -> Retokenizer:
    return Retokenizer(KnownTokenizer(old, Path("old.json")), new, end)


def convert(source: Path, folder: Path, old: Tokenizer = OLD, new: Tokenizer = NEW, end: int | None = None) -> Path:
    """Convert a file and return the path of the new file."""
    make_retokenizer(old, new, end).retokenize(source, folder)
    return folder / source.name


def read_ids(path: Path) -> list[int]:
    return TokenFile(path).tokens.tolist()


def decode_documents(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    ends = [-1, *(n for n, i in enumerate(ids) if i == 0), len(ids)]
    parts = [ids[a + 1 : b] for a, b in itertools.pairwise(ends)]
    return [tokenizer.decode(part, skip_special_tokens=False) for part in parts]


@pytest.mark.parametrize("is_raw", [True, False])
def test_a_round_trip_restores_the_ids(tmp_path, is_raw):
    source = tmp_path / "a.npy"
    ids = encode(OLD, DOCUMENTS)
    source.write_bytes(ids.astype("<u2").tobytes()) if is_raw else np.save(source, ids)
    new = convert(source, tmp_path / "new")
    assert read_ids(new) == encode(NEW, DOCUMENTS).tolist()
    old = convert(new, tmp_path / "old", NEW, OLD)
    assert read_ids(old) == ids.tolist()
    record = read_record(new)
    fields = (record.tokenizer, record.end_of_text, record.vocab_size)
    assert fields == (compute_fingerprint(NEW), 0, get_vocab_size(NEW))
    assert (record.documents, record.replaced_documents) == (len(DOCUMENTS), 0)
    assert record.text_bytes == sum(len(text.encode()) for text in DOCUMENTS) == read_record(old).text_bytes


def convert_ids(path: Path, ids: np.ndarray, old: Tokenizer, new: Tokenizer) -> np.ndarray:
    np.save(path, ids)
    pieces = DocumentDecoder(KnownTokenizer(old, Path("old.json"))).decode(TokenFile(path), end=0)
    return np.concatenate([block.ids for block in tokenize_pieces(pieces, new)])


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=6),
    block=st.integers(1, 9),
    last_ends=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_the_text_does_not_depend_on_blocks(tmp_path_factory, texts, block, last_ends):
    ids = encode(OLD, texts)
    ids = ids if last_ends or not texts[-1] else ids[:-1]
    path = tmp_path_factory.mktemp("ids") / "a.npy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "BLOCK_TOKENS", block)
        new = convert_ids(path, ids, OLD, NEW)
        old = convert_ids(path, new, NEW, OLD)
    assert decode_documents(NEW, new.tolist()) == decode_documents(OLD, ids.tolist())
    assert decode_documents(OLD, old.tolist()) == decode_documents(OLD, ids.tolist())


def test_runs_of_spaces_and_other_added_tokens_are_kept(tmp_path):
    texts = ["a" + " " * n + "b" for n in range(1, 60)] + ["<|endoftext|>", "  "]
    source = write(tmp_path / "a.npy", encode(NEOX, texts), NEOX)
    assert {50_254, 50_276} <= set(read_ids(source))
    new = convert(source, tmp_path / "new", NEOX)
    assert read_ids(new) == encode(NEW, texts).tolist()
    assert read_ids(convert(new, tmp_path / "old", NEW, NEOX)) == read_ids(source)


@pytest.mark.parametrize("known_from", ["file", "record", "option"])
def test_the_end_of_text_id_is_found(tmp_path, known_from):
    """OLMo's V2 ends documents with the last id, which is also the token of two spaces."""
    ids = encode(NEOX, ["one", "two", "three  four"], end=50_276)
    ids = ids if known_from == "file" else ids[:-1]
    options = {"end_of_text": 50_276} if known_from == "record" else {}
    source = write(tmp_path / "a.npy", ids, NEOX, **options)
    new = convert(source, tmp_path / "new", NEOX, end=50_276 if known_from == "option" else None)
    expected = encode(NEW, ["one", "two", "three", "four"]).tolist()
    assert read_ids(new) == (expected if known_from == "file" else expected[:-1])


def test_an_end_of_text_id_beyond_the_tokenizer_is_accepted(tmp_path):
    """50279 ends documents of OLMo's tokenizer, which has three more tokens than GPT-NeoX-20B's file."""
    source = tmp_path / "a.npy"
    source.write_bytes(encode(NEOX, ["one", "two"], end=50_279).astype("<u2").tobytes())
    assert read_ids(convert(source, tmp_path / "new", NEOX)) == encode(NEW, ["one", "two"]).tolist()


def test_invalid_utf8_is_replaced_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "BLOCK_TOKENS", 1)  # characters are split over blocks
    byte = {token: OLD.token_to_id(token) for token in ("ð", "Ł")}  # the bytes F0 and 9F
    good, broken = OLD.encode("é🙂\ufffd").ids, [OLD.token_to_id("a"), byte["ð"], byte["Ł"]]
    ids = np.array([*good, 0, *broken, 0, *good, 0, *broken[1:], *OLD.encode("b").ids])
    source = write(tmp_path / "a.npy", ids)
    new = convert(source, tmp_path / "new")
    assert decode_documents(NEW, read_ids(new)) == ["é🙂\ufffd", "a\ufffd", "é🙂\ufffd", "\ufffdb"]
    record = read_record(new)
    assert (record.documents, record.replaced_documents) == (4, 2)
    assert record.text_bytes == 2 * 9 + 4 + 4


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
    assert decode_documents(NEW, read_ids(new)) == ["a bc", "", "a🙂", "b<unk>", "a\ufffd"]
    assert read_record(new).replaced_documents == 1


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
def test_raw_ids_of_more_than_two_bytes_require_their_type(tmp_path, dtype, capture, invoke):
    OLD.save(str(tmp_path / "old.json")), NEW.save(str(tmp_path / "new.json"))
    (tmp_path / "a.npy").write_bytes(encode(OLD, DOCUMENTS).astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    command = ["data", "retokenize", f"{tmp_path}/a.npy", "--to", f"{tmp_path}/to", "--from", f"{tmp_path}/old.json"]
    command += ["--tokenizer", f"{tmp_path}/new.json"]
    assert f"a.npy: its ids seem to have {np.dtype(dtype).itemsize} bytes" in invoke(*command, expect=1)
    invoke(*command, "--dtype", dtype)
    assert read_ids(tmp_path / "to" / "a.npy") == encode(NEW, DOCUMENTS).tolist()
    assert "already converted" in capture(*command, "--dtype", dtype).err
    other = {"uint32": "int32", "int64": "uint64"}[dtype]
    assert "already converted" not in capture(*command, "--dtype", other).err, "perhaps other ids"
    assert "its ids seem to have" in invoke(*command, "--dtype", "uint16", expect=1)


# Folders and the command line


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
    with pytest.raises(RunError, match=r"z\.npy: ids of another tokenizer \(.*\) than old\.json; set --from"):
        convert(tmp_path / "from", tmp_path / "new")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("ids", "message"),
    [([5, 6, 400, 7], "400 at position 2"), ([5, -1], "-1 at position 1"), ([350, 450], "350 is not in old.json")],
)
def test_an_unknown_id_is_refused(tmp_path, ids, message):
    old = OLD
    if 450 in ids:  # a vocabulary with a gap at 350
        vocabulary = {t: i for t, i in OLD.get_vocab().items() if i != 350} | {"filler": 450}
        old = Tokenizer(models.BPE(vocabulary, []))
        old.decoder = decoders.ByteLevel()
        old.add_special_tokens(["<|endoftext|>"])
    np.save(tmp_path / "a.npy", np.array(ids))
    with pytest.raises(RunError, match=rf"a\.npy: token id {message}.*set --from"):
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
    (to / "v0/set2.bin").write_bytes((to / "v0/set2.bin").read_bytes()[::-1])
    assert list_written() == ["set2.bin.json"]
    write(source / "v0/set2.bin", encode(OLD, [TEXTS[3]]), tokenizer="unknown")
    assert list_written() == ["set2.bin.json"]
    assert list_written(new=OLD) == everything
    assert list_written(old=NEW, new=OLD) == everything
    assert list_written(old=NEW, new=OLD, end=OLD.token_to_id("e")) == everything


def test_a_kill_loses_one_file_at_most(tmp_path, program, capture):
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
    assert capture(*command).err.count("already converted") == len(done)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert {name: (to / name).read_bytes() for name in expected} == expected
    assert [path.name for path in to.rglob(".*")] == [".lock"]


def test_the_verb_prints_a_table(tmp_path, invoke):
    for name, tokenizer in {"old": OLD, "new": NEW}.items():
        tokenizer.save(str(tmp_path / f"{name}.json"))
    source = write(tmp_path / "set.npy", encode(OLD, DOCUMENTS))
    tokenizers = ["--from", str(tmp_path / "old.json"), "--tokenizer", str(tmp_path / "new.json")]
    out = invoke("data retokenize", source, "--to", tmp_path / "new", *tokenizers)
    size, count = sum(len(text.encode()) for text in DOCUMENTS), len(encode(NEW, DOCUMENTS))
    row = ["set.npy", str(len(DOCUMENTS)), f"{count:,}", f"{size:,}", f"{size / count:.3f}"]
    assert row in [line.split() for line in out.splitlines()]
    assert f"data.validation.NAME={tmp_path / 'new'}" in out
    record = read_record(tmp_path / "new" / "set.npy")
    assert record.tokenizer == compute_fingerprint(load_tokenizer(tmp_path / "new.json"))  # as validate compares them


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("a.npy --to x --end-of-text -1", 2, "--end-of-text: expected an integer >= 0"),
        ("a.npy --to x --end-of-text 599", 1, "a.npy: contains no id 599; set --end-of-text"),
        ("a.npy --to x --from a.npy", 1, "a.npy: not a readable tokenizer"),
        ("none --to x", 1, "none: no such file or folder"),
        ("empty --to x", 1, "empty: nothing to read"),
        (". --to x", 1, "x: contains the source files"),
        ("a.npy --to b.txt", 1, "b.txt: cannot be written"),
    ],
)
def test_errors_are_one_line(arguments, code, message, empty_folder, invoke):
    OLD.save("old.json"), NEW.save("new.json")
    write(Path("a.npy"), encode(NEW, ["text"]), NEW)
    Path("b.txt").write_text("")
    Path("empty").mkdir()
    line = invoke("data retokenize --from new.json --tokenizer new.json", *arguments.split(), expect=code)
    assert message in line
    assert not Path("x").exists()
