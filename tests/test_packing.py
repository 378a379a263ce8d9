"""Best-fit packing: every token once, full sequences, documents that fit stay whole."""

from collections import Counter

import numpy as np
import pytest
from corpora import TEXTS, json_lines, prepare_set, read_files
from hypothesis import given, settings
from hypothesis import strategies as st

from stackexp.data import packing
from stackexp.data.packing import BestFitPacker, fit_best

T, END = 8, 0
LENGTHS = st.lists(st.integers(1, 30), max_size=40)


def build_stream(lengths, has_end=True):
    """Return one stream of documents with these lengths. All token ids except END are unique."""
    ids = iter(range(1, 10_000))
    stream = [token for length in lengths for token in [*(next(ids) for _ in range(length - 1)), END]]
    return np.array(stream if has_end else stream[:-1], np.int64)


def pack(stream, step=None):
    """Return the sequences, the rest and the packer."""
    sequences = []
    packer = BestFitPacker(sequences.append, T, END)
    for begin in range(0, len(stream), step or max(len(stream), 1)):
        packer.write(stream[begin : begin + (step or len(stream))])
    return sequences, packer.close(), packer


def count_cut(documents, sequences, rest):
    """Return the number of documents with tokens in several sequences, with `rest` as one more sequence."""
    owner = {token: number for number, part in enumerate([*sequences, rest]) for token in part.tolist() if token != END}
    return sum(len({owner[token] for token in document.tolist() if token != END}) > 1 for document in documents)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.booleans(), st.sampled_from([1 << 22, 20]))
def test_every_token_is_written_once_and_documents_that_fit_stay_whole(lengths, has_end, window):
    stream = build_stream(lengths, has_end or not lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW_TOKENS", window)
        sequences, rest, packer = pack(stream)
        again, rest_again, _ = pack(stream, step=3)
    assert all(len(sequence) == T for sequence in sequences)
    assert len(rest) < T
    assert Counter(np.concatenate([*sequences, rest]).tolist()) == Counter(stream.tolist())
    assert all(np.array_equal(*pair) for pair in zip([*sequences, rest], [*again, rest_again], strict=True))
    documents = [document for document in np.split(stream, np.flatnonzero(stream == END) + 1) if len(document)]
    whole = [document for document in documents if len(document) <= T]
    visible = [document for document in documents if len(document) > T + 1]  # END is not one of the unique ids
    assert count_cut(visible, sequences, rest) == len(visible)
    assert count_cut(documents, sequences, rest) <= packer.cut
    flat = np.concatenate([*sequences, rest]).tolist()
    for document in whole:  # also if it is cut, its tokens keep their order
        positions = [flat.index(token) for token in document.tolist() if token != END]
        assert positions == sorted(positions)


def test_documents_go_where_they_fit_best():
    documents = [np.full(length, length) for length in (5, 4, 3, 2, 2)]
    assert [[len(d) for d in group] for group in fit_best(documents, T)] == [[5, 3], [4, 2, 2]]
    sequences, rest, packer = pack(build_stream([5, 4, 3, 2, 2]))
    assert len(sequences) == 2
    assert not len(rest)
    assert (packer.cut, packer.cut_by_concatenation) == (0, 1)


def test_remainders_of_long_documents_fill_the_gaps():
    sequences, rest, packer = pack(build_stream([19, 6, 7]))  # 19 = 8 + 8 + 3
    assert [len(sequence) for sequence in sequences] == [8, 8, 8, 8]
    assert sequences[0].tolist() == list(range(1, 9))
    assert sequences[2].tolist()[:7] == build_stream([19, 6, 7])[25:].tolist(), "the fullest group first"
    assert (packer.cut, len(rest)) == (1, 0)


@pytest.fixture(scope="module")
def short_texts(tmp_path_factory):
    """A file of 400 documents of different lengths."""
    folder = tmp_path_factory.mktemp("source")
    text, lengths = "".join(TEXTS), np.random.default_rng(0).integers(20, 500, 400)
    starts = np.random.default_rng(1).integers(0, len(text) - 500, 400)
    texts = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    for number in range(4):
        (folder / f"{number}.jsonl").write_bytes(json_lines(texts[number::4]))
    return folder


def test_a_prepared_set_has_the_same_tokens_and_fewer_cut_documents(short_texts, tmp_path, invoke):
    options = {"context_length": 512, "unit_bytes": 30_000}
    joined = prepare_set(short_texts, tmp_path / "joined", **options)
    tokenizer = tmp_path / "joined" / "tokenizer.json"
    packed = prepare_set(short_texts, tmp_path / "packed", packing="best_fit", tokenizer=tokenizer, **options)
    assert (packed.tokens, packed.documents, packed.sequences) == (joined.tokens, joined.documents, joined.sequences)
    assert joined.cut_documents == 0
    assert 0 < packed.cut_documents < packed.cut_by_concatenation / 5
    many = [str(short_texts), "--to", str(tmp_path / "many"), "--tokenizer", str(tokenizer), "--packing", "best_fit"]
    printed = invoke("data prepare", *many, "--context-length", "512", "--unit-bytes", "30000", "--workers", "2")
    assert f"{packed.cut_documents:,} documents cut; concatenation would cut" in printed
    assert read_files(tmp_path / "many") == read_files(tmp_path / "packed")
    for name, is_counted in (("joined", False), ("packed", True)):
        assert ("cut documents" in invoke("data inspect", tmp_path / name)) == is_counted
    error = invoke("data prepare", *many[:-2], "--context-length", "512", "--unit-bytes", "30000", expect=1)
    assert "another packing (best_fit, not concatenate)" in error
