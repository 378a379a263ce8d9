"""Token files: formats, records, atomic writes, chunks, and their preparation."""

import io
import json
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
from corpora import TEXTS, prepare_set
from evaluation_files import open_one
from hypothesis import given
from hypothesis import strategies as st

from stackexp.cli import main
from stackexp.data.shards import TokenSet
from stackexp.data.sources import UnreadableSourceError
from stackexp.data.token_files import Chunks, TokenFile, get_record_path, write_token_file
from stackexp.data.tokenizer import KnownTokenizer, compute_fingerprint, load_tokenizer, train_tokenizer
from stackexp.errors import RunError


def write(path, ids, dtype="<u2"):
    path.write_bytes(np.array(ids, dtype).tobytes())
    return path


def make_record(**fields):
    return {"vocab_size": 300, "tokenizer": "t", "source": "here"} | fields


@given(st.integers(0, 300), st.integers(2, 40))
def test_chunks_drop_the_remainder_like_olmo(length, context_length):
    chunks = Chunks(np.arange(length), context_length, score_remainder=False)
    assert len(chunks) == length // context_length
    assert {len(chunk) for chunk in chunks} <= {context_length}
    assert np.array_equal(np.concatenate([[], *chunks]), np.arange(length // context_length * context_length))


@given(st.integers(0, 300), st.integers(2, 40))
def test_chunks_with_the_remainder_score_each_token_except_the_first_once(length, context_length):
    chunks = list(Chunks(np.arange(length), context_length, score_remainder=True))
    scored = [int(token) for chunk in chunks for token in chunk[1:]]
    assert scored == list(range(1, length))
    assert all(2 <= len(chunk) <= context_length for chunk in chunks)


@given(st.integers(0, 300), st.integers(2, 40), st.booleans(), st.integers(1, 20))
def test_a_limit_keeps_evenly_spaced_chunks(length, context_length, score_remainder, limit):
    whole = list(Chunks(np.arange(length), context_length, score_remainder))
    chunks = list(Chunks(np.arange(length), context_length, score_remainder, limit))
    assert len(chunks) == min(limit, len(whole))
    kept = [chunk[0] for chunk in chunks]
    expected = [whole[i * len(whole) // len(chunks)][0] for i in range(len(chunks))]
    assert kept == expected


@pytest.mark.parametrize("dtype", ["uint16", "<i8", "int32"])
def test_a_real_npy_is_flattened(tmp_path, dtype):
    np.save(tmp_path / "set.npy", np.arange(6, dtype=dtype).reshape(2, 3))
    file = TokenFile(tmp_path / "set.npy")
    assert isinstance(file.tokens, np.memmap)
    assert file.tokens.tolist() == [0, 1, 2, 3, 4, 5]


def test_bytes_after_the_array_of_an_npy_are_refused(tmp_path):
    (tmp_path / "two.npy").write_bytes(save_array(np.arange(10, dtype="<u2")) + save_array(np.arange(5, dtype="<u2")))
    with pytest.raises(RunError, match=r"two\.npy: 138 bytes follow the array, such as another array; write one per"):
        TokenFile(tmp_path / "two.npy")


def save_array(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"abc", "not a whole number of uint16"),
        (np.array([20240520, 1, 9], "<i4").tobytes() + bytes(1012), "its header has 9 token ids"),
        (b"\x93NUMPY nonsense", "cannot be read"),
        (save_array(np.zeros((4, 3), np.uint16).T), r"uint16 \[3, 4\] in Fortran order; write it as a 1-d array"),
        (save_array(np.zeros(3)), "expected token ids, found float64"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64, "text, .* run `git lfs pull`"),
        (b"<html><body>404: the file was not found on this server</body></html>", "contains text, not token ids"),
    ],
)
def test_the_error_names_a_broken_file(tmp_path, content, message):
    (tmp_path / "set.npy").write_bytes(content)
    with pytest.raises(RunError, match=rf"set\.npy.*{message}"):
        TokenFile(tmp_path / "set.npy")


LARGE = np.random.default_rng(0).integers(0, 100_000, 1000)


@pytest.mark.parametrize("dtype", ["<u4", "<i8"])
@pytest.mark.parametrize("ids", [LARGE, LARGE % 20], ids=["large", "tiny"])
def test_raw_ids_of_more_than_two_bytes_are_refused_without_their_type(tmp_path, ids, dtype):
    path = write(tmp_path / "part-0.npy", ids, dtype)
    size = np.dtype(dtype).itemsize
    message = rf"part-0\.npy: its ids seem to have {size} bytes, because every second uint16 is tiny; give --dtype"
    with pytest.raises(RunError, match=message):
        TokenFile(path)
    with pytest.raises(RunError, match=message):
        TokenFile(write(tmp_path / "few-part-0.npy", ids[1:5], dtype))
    if size == 8:
        with pytest.raises(RunError, match="its ids seem to have 8 bytes, because every second uint32 is 0; give"):
            TokenFile(path, dtype="uint32")
    odd = write(tmp_path / "odd.npy", [5, 0, 6, 0, 7, 0, 8, 0, 9])
    assert len(TokenFile(odd)) == 9, "no whole number of wider ids"
    with pytest.raises(RunError, match=r"raw ids of a vocabulary of 100,000, of unknown type; give --dtype"):
        TokenFile(path, vocab_size=100_000)
    name = np.dtype(dtype).name
    assert TokenFile(path, dtype=name, vocab_size=100_000).tokens.tolist() == ids.tolist()


@pytest.mark.parametrize(
    "ids", [[1] * 50 + [300], [7] * 100, [0] * 99, LARGE % 65_536, LARGE % 40, [5, 0] * 9 + [9, 1]]
)
def test_raw_ids_of_two_bytes_are_read(tmp_path, ids):
    assert TokenFile(write(tmp_path / "a.npy", ids)).tokens.tolist() == list(ids)


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "<u2"), (20240801, "<u4")])
def test_header_of_llm_c_is_recognized(tmp_path, magic, dtype):
    ids = np.arange(50_000, 50_100, dtype=dtype)
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(ids)
    (tmp_path / "train.bin").write_bytes(header.tobytes() + ids.tobytes())
    file = TokenFile(tmp_path / "train.bin", vocab_size=100_000)
    assert file.tokens.tolist() == ids.tolist() == np.concatenate(list(file.read_blocks(100_000))).tolist()
    blocks = file.read_blocks(100_000, end=50_000)  # llm.c writes end-of-text before each document
    assert np.concatenate(list(blocks)).tolist() == ids[1:].tolist()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_a_written_file_reads_back_with_and_without_its_record(tmp_path, vocab_size, dtype):
    path = tmp_path / "set.npy"
    parts = [np.array([1, 2]), np.array([], int), np.array([vocab_size - 1])]
    record = write_token_file(path, iter(parts), **make_record(vocab_size=vocab_size))
    file = TokenFile(path)
    assert file.tokens.dtype == dtype
    assert file.tokens.tolist() == [1, 2, vocab_size - 1]
    assert file.record == record
    assert (record.tokens, record.bytes) == (3, path.stat().st_size)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["set.npy", "set.npy.json"]
    get_record_path(path).unlink()  # not needed to read what was written
    assert TokenFile(path).tokens.tolist() == [1, 2, vocab_size - 1]
    if dtype == "uint32":
        assert np.load(path).tolist() == [1, 2, vocab_size - 1]


@pytest.mark.parametrize(
    ("ids", "message"), [([300], "token id 300, outside the vocabulary of 300"), ([], "no tokens")]
)
def test_invalid_tokens_are_not_written(tmp_path, ids, message):
    with pytest.raises(RunError, match=message):
        write_token_file(tmp_path / "set.npy", [np.array(ids, int)], **make_record())
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_previous_file_and_record(tmp_path):
    path = tmp_path / "set.npy"
    record = write_token_file(path, [np.array([1, 2, 3])], **make_record())

    def broken():
        yield np.array([4])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_token_file(path, broken(), **make_record())
    assert TokenFile(path).record == record
    assert TokenFile(path).tokens.tolist() == [1, 2, 3]
    write(path, [1, 2])
    with pytest.raises(RunError, match="4 bytes, but its record has 6"):
        TokenFile(path)


def test_a_large_file_is_not_loaded_into_memory(tmp_path):
    """A sparse file of 6 GB is opened and cut with little memory."""
    path = tmp_path / "large.npy"
    with open(path, "wb") as file:
        file.seek((6 << 30) - 2)
        file.write(np.uint16(7).tobytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chunks = Chunks(TokenFile(path).tokens, 2048, score_remainder=False)
    assert chunks[len(chunks) - 1][-1] == 7
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


# Preparation

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


def write_megatron(path, ids, dtype="<i4", append_eod=True):
    """Write ids as Megatron's preprocess_data.py does: path.bin and path.idx, a sequence per document."""
    documents = [d if append_eod else d[:-1] for d in np.split(ids, np.flatnonzero(ids == 0) + 1) if len(d)]
    lengths = np.array([len(document) for document in documents], "<i4")
    np.concatenate(documents).astype(dtype).tofile(path)
    starts = np.concatenate([[0], lengths.cumsum()[:-1]]).astype("<i8") * np.dtype(dtype).itemsize
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, {"<i4": 4, "<u2": 8}[dtype], len(lengths), len(lengths) + 1)
    bounds = np.arange(len(lengths) + 1, dtype="<i8")
    path.with_suffix(".idx").write_bytes(header + lengths.tobytes() + starts.tobytes() + bounds.tobytes())


WRITERS = {
    "megatron.bin": write_megatron,
    "megatron16.bin": lambda path, ids: write_megatron(path, ids, "<u2"),
    "without-eod.bin": lambda path, ids: write_megatron(path, ids, append_eod=False),
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
        [path.read_bytes() for path in sorted(folder.glob("unit.*/shard*"))] for folder in (text_set, tmp_path / "set")
    ]
    assert units[0] == units[1] != []
    assert corpus.documents == len(DOCUMENTS)
    assert corpus.bytes == sum(len(text.encode()) for text in DOCUMENTS)
    assert corpus.sources == [name]
    assert TokenSet(tmp_path / "set").corpus == corpus


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


@pytest.mark.parametrize("wrong", [400, 65_535, -1])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, ids, tmp_path, wrong):
    np.save(tmp_path / "a.npy", np.concatenate([ids, [wrong], ids]))
    message = rf"a\.npy: token id {wrong:,} at position {len(ids):,} is outside the vocabulary of 400"
    assert_refused(tmp_path / "a.npy", tmp_path / "to", message, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("other", "message"),
    [
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


def test_raw_uint32_ids_are_prepared_with_their_type(tokenizer, ids, text_set, tmp_path):
    ids.astype("<u4").tofile(tmp_path / "a.npy")
    assert_refused(tmp_path / "a.npy", tmp_path / "to", "its ids seem to have 4 bytes", tokenizer=tokenizer)
    corpus = prepare_set(tmp_path / "a.npy", tmp_path / "set", tokenizer=tokenizer, dtype="uint32")
    assert (corpus.tokens, corpus.documents) == (len(ids), len(DOCUMENTS))
    assert np.array_equal(TokenSet(tmp_path / "set")[3], TokenSet(text_set)[3])


def damage_index(path: Path, begin: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[begin : begin + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: damage_index(path, 0, b"TNTIDX\0\0\0"), "a.idx: not an index of Megatron; rename it"),
        (lambda path: path.write_bytes(b"x"), "a.idx: not an index of Megatron"),
        (lambda path: damage_index(path, 9, b"\2"), "version 2 with ids of type 4 is not supported"),
        (lambda path: damage_index(path, 17, b"\7"), "version 1 with ids of type 7 is not supported"),
        (lambda path: damage_index(path, 18, b"\xff" * 8), "a.idx: cut short"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "a.idx: cut short"),
        (lambda path: damage_index(path, 34, b"\xff\xff\xff\xff"), "its sequences are not those of a.bin"),
        (lambda path: damage_index(path, path.stat().st_size - 8, b"\x63"), "its sequences are not those of a.bin"),
        (lambda path: path.with_suffix(".bin").write_bytes(b"1234"), "its sequences are not those of a.bin"),
    ],
)
def test_a_damaged_index_of_megatron_is_one_line(tokenizer, ids, tmp_path, change, message):
    write_megatron(tmp_path / "a.bin", ids)
    change(tmp_path / "a.idx")
    assert_refused(tmp_path / "a.bin", tmp_path / "to", message, tokenizer=tokenizer)


@pytest.mark.parametrize(("name", "index"), [("a.bin", "a.idx"), ("a.BIN", "a.idx"), ("a.BIN", "a.IDX")])
def test_other_readers_of_token_files_read_megatron(tokenizer, ids, tmp_path, capsys, name, index):
    folder = tmp_path / "source"
    folder.mkdir()
    write_megatron(folder / name, ids, append_eod=False)
    (folder / "a.idx").rename(folder / index)
    assert np.array_equal(TokenFile(folder / name).tokens, ids[ids != 0])
    command = ["data", "retokenize", str(folder), "--to", str(tmp_path / "to")]
    assert main([*command, "--from", str(tokenizer), "--tokenizer", str(tokenizer)]) == 0
    assert np.array_equal(TokenFile(tmp_path / "to" / name).tokens, ids)
    prepare_set(folder, tmp_path / "set", tokenizer=tokenizer)
    assert "not read" not in capsys.readouterr().err, "the index is not a source that was skipped"
    (folder / index).rename(folder / "elsewhere")
    with pytest.raises(RunError, match="other"):
        prepare_set(folder, tmp_path / "set", tokenizer=tokenizer)


def test_a_source_that_disappears_is_a_read_error(tokenizer, tmp_path):
    np.full(100, 7, "<u2").tofile(tmp_path / "a.npy")
    file = TokenFile(tmp_path / "a.npy")
    (tmp_path / "a.npy").unlink()
    with pytest.raises(UnreadableSourceError, match=r"a\.npy: cannot be read \(No such file or directory\)"):
        list(file.read_blocks(300))


def test_megatron_documents_without_end_of_text_are_not_scored(tokenizer, ids, tmp_path):
    known = KnownTokenizer.read(tokenizer)
    write_megatron(tmp_path / "with.bin", ids)
    assert np.array_equal(open_one(tmp_path / "with.bin", known, vocab_size=known.vocab_size).chunks.tokens, ids)
    write_megatron(tmp_path / "without.bin", ids, append_eod=False)
    command = f"data prepare {tmp_path}/without.bin --to FOLDER --tokenizer {tokenizer}"
    with pytest.raises(RunError, match=f"has documents without end-of-text; run: python -m stackexp {command}"):
        open_one(tmp_path / "without.bin", known, vocab_size=known.vocab_size)


def test_an_end_of_text_that_does_not_fit_the_type_of_megatrons_ids_is_added(tmp_path):
    path = tmp_path / "bytes.bin"
    np.arange(250, 256, dtype="u1").tofile(path)
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 1, 2, 3)
    lengths, starts, bounds = np.array([4, 2], "<i4"), np.array([0, 4], "<i8"), np.arange(3, dtype="<i8")
    path.with_suffix(".idx").write_bytes(header + lengths.tobytes() + starts.tobytes() + bounds.tobytes())
    (ids,) = TokenFile(path).read_blocks(257, end=256)
    assert ids.tolist() == [250, 251, 252, 253, 256, 254, 255, 256]


def test_file_without_end_of_text_is_one_document_with_a_warning(tokenizer, tmp_path, capsys):
    np.full(100, 7, "<u2").tofile(tmp_path / "a.npy")
    corpus = prepare_set(tmp_path / "a.npy", tmp_path / "to", tokenizer=tokenizer)
    assert (corpus.documents, corpus.tokens) == (1, 101)
    assert "a.npy: contains no end-of-text (id 0), so it is read as one document" in capsys.readouterr().err


def test_a_damaged_record_is_reported(tmp_path):
    path = write(tmp_path / "set.npy", range(9))
    record = {"sha256": "0", "bytes": 18, "tokens": 9, "vocab_size": 9, "tokenizer": "", "source": ""}
    changes = ({"tokens": "9"}, {"bytes": None}, {"text_bytes": {}}, {"tokenizer": 3.5}, {"sha": "x"})
    for text in ("{", "[]", *(json.dumps(record | change) for change in changes)):
        get_record_path(path).write_text(text)
        with pytest.raises(RunError, match=r"set\.npy\.json: corrupt; delete it"):
            TokenFile(path)
    get_record_path(path).write_text(json.dumps(record | {"tokens": 8}))
    with pytest.raises(RunError, match="9 ids, but its record has 8"):
        TokenFile(path)


def test_a_header_of_npy_that_python_cannot_tokenize_is_reported(tmp_path):
    path = tmp_path / "set.npy"
    np.save(path, np.arange(9, dtype=np.uint16))
    path.write_bytes(path.read_bytes().replace(b")", b" "))
    with pytest.raises(RunError, match=r"set\.npy: cannot be read \("):
        TokenFile(path)
