"""Token files: formats, records, atomic writes, and the tokens that chunks score."""

import json
import resource

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackexp.data.token_files import Chunks, TokenFile, get_record_path, write_token_file
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


@pytest.mark.parametrize("dtype", ["uint16", "<i8", "int32"])
def test_a_real_npy_is_flattened(tmp_path, dtype):
    np.save(tmp_path / "set.npy", np.arange(6, dtype=dtype).reshape(2, 3))
    file = TokenFile(tmp_path / "set.npy")
    assert isinstance(file.tokens, np.memmap)
    assert file.tokens.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"abc", "not a whole number of uint16"),
        (b"\x93NUMPY nonsense", "cannot be read"),
    ],
)
def test_the_error_names_a_broken_file(tmp_path, content, message):
    (tmp_path / "set.npy").write_bytes(content)
    with pytest.raises(RunError, match=rf"set\.npy.*{message}"):
        TokenFile(tmp_path / "set.npy")


def test_an_array_in_fortran_order_is_refused(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(12, dtype=np.uint16).reshape(4, 3).T)
    with pytest.raises(RunError, match=r"found uint16 \[3, 4\] in Fortran order; write it as a 1-d array of integers"):
        TokenFile(tmp_path / "ids.npy")


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


def test_a_file_whose_length_differs_from_its_record_is_refused(tmp_path):
    path = tmp_path / "set.npy"
    write_token_file(path, [np.array([1, 2, 3])], **make_record())
    write(path, [1, 2])
    with pytest.raises(RunError, match="4 bytes, but its record has 6"):
        TokenFile(path)


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"sha": "x"})])
def test_the_error_names_a_corrupt_record(tmp_path, text):
    path = write(tmp_path / "set.npy", [1])
    get_record_path(path).write_text(text)
    with pytest.raises(RunError, match=r"set\.npy\.json: corrupt; delete it"):
        TokenFile(path)


def test_the_error_names_an_unreadable_record(tmp_path):
    path = write(tmp_path / "set.npy", [1])
    get_record_path(path).mkdir()
    with pytest.raises(RunError, match=r"set\.npy\.json: cannot be read \(Is a directory\)"):
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
