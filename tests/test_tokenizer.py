"""Training, loading and fingerprints of tokenizers, and bytes per token."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from stackexp.data import tokenizer as tok
from stackexp.data.readers import Piece
from stackexp.errors import RunError

TEXTS = ["def main(argv):\n    return 0\n", "naïve café, 東京, 🙂", "for i in range(10): print(i)\r\n"] * 20


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return tok.train_tokenizer(TEXTS, 305)


def test_training_is_deterministic_and_gives_the_requested_size(trained):
    assert tok.get_vocab_size(trained) == 305
    assert trained.token_to_id("<|endoftext|>") == 0 == tok.get_end_of_text_id(trained)
    assert tok.train_tokenizer(iter(TEXTS), 305).to_str() == trained.to_str()


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None, max_examples=200)
def test_decoding_restores_any_text_and_token_bytes_sum_to_its_size(trained, text):
    ids = trained.encode(text, add_special_tokens=False).ids
    assert trained.decode(ids, skip_special_tokens=False) == text
    assert tok.count_token_bytes(trained)[ids].sum() == len(text.encode())


def test_end_of_text_within_a_text_is_encoded_as_characters(trained, tmp_path):
    trained.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (trained, tok.load_tokenizer(tmp_path / "tokenizer.json")):
        ids = tokenizer.encode("a<|endoftext|>b").ids
        assert 0 not in ids
        assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_token_bytes_of_a_sentencepiece_alphabet(tmp_path):
    vocabulary = {"<unk>": 0, "</s>": 1, "<0xC3>": 2, "<0xA9>": 3, "▁caf": 4, "▁": 5, "é": 6}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    assert tok.count_token_bytes(tokenizer).tolist() == [0, 0, 1, 1, 4, 1, 2]
    assert tok.get_end_of_text_id(tokenizer) == 1


def test_end_of_text_that_is_not_special_becomes_special_on_loading(trained, tmp_path):
    spec = json.loads(trained.to_str())
    spec["added_tokens"][0]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = tok.load_tokenizer(tmp_path / "tokenizer.json")
    assert 0 not in tokenizer.encode("a<|endoftext|>b").ids
    assert json.loads(tokenizer.to_str())["added_tokens"][0]["special"]
    tokenizer.add_tokens(["    "])
    assert tok.count_token_bytes(tokenizer).tolist() == [*tok.count_token_bytes(trained).tolist(), 4]


def test_a_special_token_ends_documents_before_an_ordinary_tag(tmp_path):
    """In Gemma's vocabulary, </s> is an HTML tag."""
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "</s>": 2, "</u>": 3, "a": 4}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(RunError, match=r"no end-of-text token; add <\|endoftext\|> to its added_tokens"):
        tok.get_end_of_text_id(tokenizer)
    tokenizer.add_tokens(["</s>", "</u>"])
    assert tok.get_end_of_text_id(tokenizer) == 2
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tok.load_tokenizer(tmp_path / "tokenizer.json")
    assert tok.get_end_of_text_id(tokenizer) == 1
    [block] = tok.tokenize_pieces([Piece("a </s> a", True)], tokenizer)
    assert block.ids.tolist() == [4, 2, 4, 1]


PIECES = ["<unk>", "</s>", "<", "/s>", "a", "\u2581"]
VOCABULARY = {piece: n for n, piece in enumerate(PIECES)}
SPELLINGS = {
    "Unigram": models.Unigram([(piece, -float(n)) for n, piece in enumerate(PIECES)], unk_id=0),
    "WordLevel": models.WordLevel(VOCABULARY, unk_token="<unk>"),
    "WordPiece": models.WordPiece(VOCABULARY, unk_token="<unk>"),
    "BPE": models.BPE(VOCABULARY, [], unk_token="<unk>", ignore_merges=True),
}


@pytest.mark.parametrize("model", SPELLINGS)
def test_a_vocabulary_with_end_of_text_does_not_end_documents(tmp_path, model):
    tokenizer = Tokenizer(SPELLINGS[model])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tok.load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode("a </s>", add_special_tokens=False).ids == [4, 1], "which the library does"
    assert tok.encode_text(tokenizer, "a </s> a") == [4, 2, 3, 4]
    [block] = tok.tokenize_pieces([Piece("a </s>", True), Piece("a", True)], tokenizer)
    assert (block.ids.tolist(), block.documents) == ([4, 2, 3, 1, 4, 1], 2)


def make_sentencepiece(prepends: bool) -> Tokenizer:
    """Make a tokenizer with U+2581 for spaces, which adds one to each text (Llama 2), or splits at them (Unigram)."""
    characters = sorted({character for text in TEXTS for character in text} - {" "})
    pieces = ["<unk>", "</s>", "\u2581", *characters, *(f"\u2581{character}" for character in characters)]
    merges = [("\u2581", character) for character in characters]
    tokenizer = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    if prepends:
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tok.treat_special_tokens_as_text(tokenizer)


FAMILIES = {
    "byte-level": (lambda: tok.train_tokenizer(TEXTS, 305), True),
    "Llama 2": (lambda: make_sentencepiece(prepends=True), False),
    "Metaspace": (lambda: make_sentencepiece(prepends=False), True),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", [7, 1000, 10**6])
def test_ids_are_those_of_the_whole_document(monkeypatch, family, part):
    monkeypatch.setattr(tok, "PIECE_CHARACTERS", 200)
    monkeypatch.setattr(tok, "CONTEXT_CHARACTERS", 40)
    build, has_cuts = FAMILIES[family]
    tokenizer, document = build(), "".join(TEXTS)
    starts = range(0, len(document), part)
    pieces = [Piece(document[i : i + part], i + part >= len(document)) for i in starts]
    cut = [piece.text for piece in tok._cut_documents(pieces, tokenizer)]
    assert "".join(cut) == document
    assert (len(cut) > 5) == has_cuts
    [block] = tok.tokenize_pieces(pieces, tokenizer)
    expected = tokenizer.encode(document, add_special_tokens=False).ids
    assert block.ids.tolist() == [*expected, tok.get_end_of_text_id(tokenizer)]
    assert (block.documents, block.bytes) == (1, len(document.encode()))


def test_document_that_cannot_be_cut_is_refused_above_the_limit(monkeypatch, trained):
    monkeypatch.setattr(tok, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(tok, "MAX_PIECE_CHARACTERS", 1000)
    assert sum(len(block.ids) for block in tok.tokenize_pieces([Piece("東" * 900, True)], trained))
    with pytest.raises(RunError, match=r"the document .* characters that .* cannot encode in pieces; split"):
        list(tok.tokenize_pieces([Piece("東" * 2000, True)], trained))


def test_training_on_text_without_spaces_is_not_quadratic():
    start = time.process_time()
    tokenizer = tok.train_tokenizer(["東京都" * 200_000, "x" * 300_000], 400)
    assert time.process_time() - start < 20
    assert len(tokenizer.encode("東京都" * 8).ids) <= 10
    assert np.array(tokenizer.encode("x" * 3000).ids).size < 30


def test_fingerprint_ignores_the_layout_of_the_file(trained, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(trained.to_str()), indent=3))
    assert tok.compute_fingerprint(tok.load_tokenizer(path)) == tok.compute_fingerprint(trained)
    assert tok.compute_fingerprint(tok.train_tokenizer(TEXTS, 310)) != tok.compute_fingerprint(trained)


@pytest.mark.parametrize("content", [None, '{"model": "nonsense"}', Tokenizer(models.BPE({"a": 0}, [])).to_str()])
def test_unusable_tokenizer_is_a_one_line_error(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RunError, match=r"tokenizer\.json: (not a readable|.*no end-of-text token)") as error:
        tok.load_tokenizer(path)
    assert "\n" not in str(error.value)
