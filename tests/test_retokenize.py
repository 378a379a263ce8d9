"""Conversion of token files to another tokenizer, without loss of text."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from stackexp.data import readers, retokenize
from stackexp.data.retokenize import Retokenizer, TextCounts
from stackexp.data.token_files import TokenFile, read_record, write_record, write_token_file
from stackexp.data.tokenizer import (
    END_OF_TEXT,
    KnownTokenizer,
    compute_fingerprint,
    get_vocab_size,
    train_tokenizer,
    treat_special_tokens_as_text,
)

STDLIB = Path(os.__file__).parent
TEXTS = [(STDLIB / name).read_text() for name in ("ast.py", "bisect.py", "heapq.py", "keyword.py")]
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


class InMemoryFile:
    """A stand-in for a TokenFile."""

    def __init__(self, tokens: np.ndarray):
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)


def convert_ids(ids: np.ndarray, old: Tokenizer, new: Tokenizer) -> np.ndarray:
    parts = make_retokenizer(old, new).encode(InMemoryFile(ids), 0, TextCounts(), lambda count: None)
    return np.concatenate(list(parts))


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=6),
    block=st.integers(1, 9),
    piece=st.integers(4, 30),
    last_ends=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_the_text_does_not_depend_on_where_files_and_documents_are_cut(texts, block, piece, last_ends):
    ids = encode(OLD, texts)
    ids = ids if last_ends or not texts[-1] else ids[:-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retokenize, "BLOCK_TOKENS", block)
        patch.setattr(readers, "PIECE_CHARACTERS", piece)
        new = convert_ids(ids, OLD, NEW)
        old = convert_ids(new, NEW, OLD)
    assert decode_documents(NEW, new.tolist()) == decode_documents(OLD, ids.tolist())
    assert decode_documents(OLD, old.tolist()) == decode_documents(OLD, ids.tolist())


def test_empty_and_unfinished_documents_are_kept(tmp_path):
    text = "for x in y:\n"
    ids = np.array([0, 0, *OLD.encode(text).ids, 0, *OLD.encode("pass").ids])
    new = convert(write(tmp_path / "a.npy", ids), tmp_path / "new")
    assert read_ids(new) == [0, 0, *NEW.encode(text).ids, 0, *NEW.encode("pass").ids]
    assert read_record(new).documents == 4


def test_runs_of_spaces_and_other_added_tokens_are_kept(tmp_path):
    texts = ["a" + " " * n + "b" for n in range(1, 60)] + ["<|endoftext|>", "  "]
    source = write(tmp_path / "a.npy", encode(NEOX, texts), NEOX)
    assert {50_254, 50_276} <= set(read_ids(source))
    new = convert(source, tmp_path / "new", NEOX)
    assert read_ids(new) == encode(NEW, texts).tolist()
    assert read_ids(convert(new, tmp_path / "old", NEW, NEOX)) == read_ids(source)


@pytest.mark.parametrize("known_from", ["file", "record", "option"])
def test_the_end_of_text_id_is_found(tmp_path, capsys, known_from):
    """OLMo's V2 ends documents with the last id, which is also the token of two spaces."""
    ids = encode(NEOX, ["one", "two", "three  four"], end=50_276)
    ids = ids if known_from == "file" else ids[:-1]
    options = {"end_of_text": 50_276} if known_from == "record" else {}
    source = write(tmp_path / "a.npy", ids, NEOX, **options)
    new = convert(source, tmp_path / "new", NEOX, end=50_276 if known_from == "option" else None)
    expected = encode(NEW, ["one", "two", "three", "four"]).tolist()
    assert read_ids(new) == (expected if known_from == "file" else expected[:-1])
    note = "id 50276 ends the documents of a.npy, but is also the token '  '"
    assert (note in capsys.readouterr().err) == (known_from != "option")


def test_an_end_of_text_id_beyond_the_tokenizer_is_accepted(tmp_path):
    """50279 ends documents of OLMo's tokenizer, which has three more tokens than GPT-NeoX-20B's file."""
    source = tmp_path / "a.npy"
    source.write_bytes(encode(NEOX, ["one", "two"], end=50_279).astype("<u2").tobytes())
    assert read_ids(convert(source, tmp_path / "new", NEOX)) == encode(NEW, ["one", "two"]).tolist()


def test_a_file_without_end_of_text_is_reported(tmp_path, capsys):
    convert(write(tmp_path / "a.npy", np.array(OLD.encode("one text").ids)), tmp_path / "new")
    assert "a.npy: contains no end-of-text id 0, so it is one document" in capsys.readouterr().err
    convert(write(tmp_path / "a.npy", encode(OLD, ["a", "b"])), tmp_path / "new")
    assert "note" not in capsys.readouterr().err


def test_invalid_utf8_is_replaced_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(retokenize, "BLOCK_TOKENS", 1)  # characters are split over blocks
    byte = {token: OLD.token_to_id(token) for token in ("ð", "Ł")}  # the bytes F0 and 9F
    good, broken = OLD.encode("é🙂\ufffd").ids, [OLD.token_to_id("a"), byte["ð"], byte["Ł"]]
    ids = np.array([*good, 0, *broken, 0, *good, 0, *broken[1:], *OLD.encode("b").ids])
    source = write(tmp_path / "a.npy", ids)
    new = convert(source, tmp_path / "new")
    assert decode_documents(NEW, read_ids(new)) == ["é🙂\ufffd", "a\ufffd", "é🙂\ufffd", "\ufffdb"]
    record = read_record(new)
    assert (record.documents, record.replaced_documents) == (4, 2)
    assert record.text_bytes == 2 * 9 + 4 + 4
    assert read_record(source).text_bytes == 2 * 9 + 3 + 3


def test_text_bytes_are_added_to_the_record_of_the_source(tmp_path, capsys, monkeypatch):
    source = write(tmp_path / "a.npy", encode(OLD, DOCUMENTS), documents=7)
    before = read_record(source)
    with monkeypatch.context() as patch:

        def fail(path: Path, record: object) -> None:
            raise IsADirectoryError(21, "Is a directory")

        patch.setattr(retokenize, "write_record", fail)
        convert(source, tmp_path / "other")
    assert "cannot add the bytes of text to the record of" in capsys.readouterr().err
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
    convert(source, tmp_path / "third", end=0)  # the record may mean another id
    assert read_record(source) == before


def test_text_that_the_new_tokenizer_loses_is_reported(tmp_path, capsys):
    new = Tokenizer(models.BPE({END_OF_TEXT: 0, "a": 1, "b": 2}, []))
    convert(write(tmp_path / "a.npy", encode(OLD, ["ab é", "b"])), tmp_path / "new", new=new)
    assert "a.npy: 3 of 6 bytes of text are lost" in capsys.readouterr().err
    convert(write(tmp_path / "b.npy", encode(OLD, ["ab", "b"])), tmp_path / "new", new=new)
    assert "are lost" not in capsys.readouterr().err


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
