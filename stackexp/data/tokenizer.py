"""Tokenizers: training, loading, encoding documents, and the text bytes of each token."""

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from stackexp.data import olmo
from stackexp.data.readers import Piece, TokenBlock
from stackexp.errors import RunError, first_line

UNKNOWN_TOKENIZER = "unknown"  # recorded for ids without a tokenizer
END_OF_TEXT = "<|endoftext|>"
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # names in common tokenizers
BATCH_PIECES, BATCH_CHARACTERS = 1024, 1 << 21  # limits of one tokenizer call
PIECE_CHARACTERS = 1 << 18  # longer documents are encoded in pieces where that does not change their ids
CONTEXT_CHARACTERS = 1 << 10  # on each side of a cut; `_find_cut` encodes only these
CUTS = re.compile(r"(?<=\w)(?=[ \n]\w)")  # candidates for cuts: before a space or a line feed between words
MAX_PIECE_CHARACTERS = 1 << 26
TRAINING_WORD_CHARACTERS = 1000  # quadratic time for longer words, in text without spaces


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a lossless byte-level BPE of at most `vocab_size` tokens.

    Id 0 is <|endoftext|>, ids 1 to 256 are the bytes. The result depends only on the texts and `vocab_size`.
    """
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = pre_tokenizers.Split(Regex(f".{{1,{TRAINING_WORD_CHARACTERS}}}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, parts])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words
    return treat_special_tokens_as_text(tokenizer)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a Hugging Face tokenizer.json. Raises RunError if it is missing, corrupt or has no end-of-text token."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises plain Exception
        raise RunError(f"{path}: not a readable tokenizer.json ({first_line(e)}); correct the path") from e
    get_end_of_text_id(tokenizer, path)
    return treat_special_tokens_as_text(_mark_end_of_text_special(tokenizer))


def _mark_end_of_text_special(tokenizer: Tokenizer) -> Tokenizer:
    """Mark end-of-text as special if it is an added token. Otherwise "<|endoftext|>" in a text would end a document."""
    spec, end = json.loads(tokenizer.to_str()), get_end_of_text_id(tokenizer)
    token = next((token for token in spec["added_tokens"] if token["id"] == end), None)
    if token is None or token["special"]:
        return tokenizer
    token["special"] = True
    return Tokenizer.from_str(json.dumps(spec))


def treat_special_tokens_as_text(tokenizer: Tokenizer) -> Tokenizer:
    """Make a tokenizer encode "<|endoftext|>" in a text as ordinary characters, and neither truncate nor pad."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def get_end_of_text_id(tokenizer: Tokenizer, path: Path | str = "tokenizer") -> int:
    """Return the id of the token that ends a document. Raises RunError if there is none.

    A special token comes first: </s> is an HTML tag in Gemma's vocabulary, which ends documents with <eos>.
    """
    added = {token.content: (not token.special, i) for i, token in tokenizer.get_added_tokens_decoder().items()}
    found = [added[name] for name in _END_OF_TEXT_NAMES if name in added]
    if not found:
        raise RunError(f"{path}: no end-of-text token; add {END_OF_TEXT} to its added_tokens")
    return min(found, key=lambda token: token[0])[1]


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text as in training data: without special tokens, and without end-of-text."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return _spell_end_of_text(tokenizer, ids, get_end_of_text_id(tokenizer))


def _spell_end_of_text(tokenizer: Tokenizer, ids: list[int], end: int) -> list[int]:
    """Replace end-of-text in the ids of a text by the ids of its name, encoded in two parts.

    Unigram models and word lists have its name in their vocabulary, so a text with "</s>" would end a document there.
    """
    if end not in ids:
        return ids
    name = tokenizer.id_to_token(end)
    spelled = [i for part in (name[0], name[1:]) for i in tokenizer.encode(part, add_special_tokens=False).ids]
    return [i for token in ids for i in (spelled if token == end else [token])]


def get_vocab_size(tokenizer: Tokenizer) -> int:
    """Return the largest token id plus one. Ids may have gaps, so this may exceed the number of tokens."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def compute_fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of the tokenizer's canonical JSON, which does not depend on the layout of its file."""
    canonical = json.dumps(json.loads(tokenizer.to_str()), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Return True if each character of a token represents one byte, as in GPT-2, GPT-NeoX and `train_tokenizer`."""
    spec = json.loads(tokenizer.to_str())
    return '"ByteLevel"' in json.dumps([spec["decoder"], spec["pre_tokenizer"]])


def list_token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the text of each id as bytes; for an added token, the bytes of its content.

    Supports byte-level vocabularies (one character per byte) and SentencePiece's, which write a space as U+2581 and a
    single byte as <0x0A>.
    """
    alphabet = _list_byte_characters() if is_byte_level(tokenizer) else {}
    table = {}
    for token, index in tokenizer.get_vocab(with_added_tokens=False).items():
        if alphabet.keys() >= set(token):
            table[index] = bytes(map(alphabet.__getitem__, token))
        elif re.fullmatch("<0x[0-9A-F]{2}>", token):
            table[index] = bytes.fromhex(token[3:5])
        else:
            table[index] = token.replace("\u2581", " ").encode()
    added = json.loads(tokenizer.to_str())["added_tokens"]
    return table | {token["id"]: token["content"].encode() for token in added}


def _list_byte_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level token represents."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


@lru_cache(maxsize=2)
def count_token_bytes(tokenizer: Tokenizer, size: int | None = None) -> np.ndarray:
    """Return the bytes of text per token, int64 [size]; 0 for end-of-text, special tokens and unused ids.

    `size` defaults to the vocabulary size. Callers share the array and must not change it.
    """
    table = np.zeros(size or get_vocab_size(tokenizer), np.int64)
    for index, data in list_token_bytes(tokenizer).items():
        table[index] = len(data)
    table[[token["id"] for token in json.loads(tokenizer.to_str())["added_tokens"] if token["special"]]] = 0
    table[get_end_of_text_id(tokenizer)] = 0  # even if it is not marked special
    return table


CHECKED_TOKENS = 1 << 16
SAMPLE_TEXTS = (
    "The CAT sat on the mat; it wasn't 3.14 times as   wide.\n\tEnd ",
    " Grüße, naïve cafe\u0301 — ﬁ ½ ™",
    "日本語のテキスト。",
    "Привет, мир! مرحبا 👩\u200d👧",
)


def has_exact_bytes(tokenizer: Tokenizer) -> bool:
    """Return True if the byte counts of a text's tokens add up to its size, checked on texts of several scripts.

    They do not if the tokenizer normalizes the text, adds a space, has no token for a character, or marks tokens within
    a word.
    """
    table = count_token_bytes(tokenizer)
    encodings = tokenizer.encode_batch(SAMPLE_TEXTS, add_special_tokens=False)
    sizes = [len(text.encode()) for text in SAMPLE_TEXTS]
    return [int(table[encoding.ids].sum()) for encoding in encodings] == sizes


def decodes_exactly(tokenizer: Tokenizer, ids: np.ndarray) -> bool:
    """Return True if the byte counts of token ids [N] add up to the size of the decoded text.

    Only the start of each document within the first CHECKED_TOKENS is checked. Documents that decode to an incomplete
    character are skipped; the result is False if all are.
    """
    ids, end = np.asarray(ids[:CHECKED_TOKENS]), get_end_of_text_id(tokenizer)
    table = count_token_bytes(tokenizer, max(get_vocab_size(tokenizer), int(ids.max()) + 1))
    documents = [part[part != end][:1000] for part in np.split(ids, np.flatnonzero(ids == end))]
    texts = tokenizer.decode_batch([document.tolist() for document in documents], skip_special_tokens=False)
    whole = [(document, text) for document, text in zip(documents, texts, strict=True) if text and "\ufffd" not in text]
    return bool(whole) and all(int(table[document].sum()) == len(text.encode()) for document, text in whole)


def tokenize_pieces(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[TokenBlock]:
    """Yield the tokens of all documents in order, in batches; each document ends with end-of-text.

    The ids are those of the whole documents, even if these come in pieces. Raises RunError if a document is too long to
    be encoded at once and cannot be cut.
    """
    batch: list[Piece] = []
    characters = 0
    for piece in _cut_documents(pieces, tokenizer):
        batch.append(piece)
        characters += len(piece.text)
        if len(batch) == BATCH_PIECES or characters >= BATCH_CHARACTERS:
            yield _encode(batch, tokenizer)
            batch, characters = [], 0
    if batch:
        yield _encode(batch, tokenizer)


def _cut_documents(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[Piece]:
    """Yield documents in pieces of about PIECE_CHARACTERS, cut only where that does not change the ids."""
    text, searched = "", 0  # the rest of the document, and the length that has been searched for cuts
    for piece in pieces:
        text, begin = text + piece.text, 0
        while len(text) > searched + PIECE_CHARACTERS:
            searched += PIECE_CHARACTERS
            if cut := _find_cut(text, max(begin + 1, searched - PIECE_CHARACTERS), searched, tokenizer):
                yield Piece(text[begin:cut], False)
                begin = cut
            elif searched - begin >= MAX_PIECE_CHARACTERS:
                raise RunError(
                    f"the document {text[:60]!r}... has {searched - begin:,} characters that this tokenizer cannot "
                    "encode in pieces; split the document"
                )
        text, searched = text[begin:], searched - begin
        if piece.ends_document:
            yield Piece(text, True)
            text, searched = "", 0
    if text:  # a document without an end
        yield Piece(text, False)


def _find_cut(text: str, begin: int, end: int, tokenizer: Tokenizer) -> int | None:
    """Return the last position before `end` where cutting a text does not change its ids, or None.

    Tries the last four candidates. At a cut, the pre-tokenizer must split, and both sides encoded separately must have
    the ids that they have together. Only CONTEXT_CHARACTERS on each side are encoded. Tokenizers that change the
    beginning of each text, such as Llama 2's, have no cuts.
    """
    for match in reversed(list(CUTS.finditer(text, max(begin, end - 4 * CONTEXT_CHARACTERS), end))[-4:]):
        cut = match.start()
        left, right = text[max(0, cut - CONTEXT_CHARACTERS) : cut], text[cut : cut + CONTEXT_CHARACTERS]
        both, first, second = (tokenizer.encode(part, add_special_tokens=False) for part in (left + right, left, right))
        border = len(first.ids)
        is_split = both.word_ids[border - 1 : border] != both.word_ids[border : border + 1]
        if is_split and both.ids == first.ids + second.ids:
            return cut
    return None


def _encode(batch: list[Piece], tokenizer: Tokenizer) -> TokenBlock:
    end, ids = get_end_of_text_id(tokenizer), array("I")
    encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
    for piece, encoding in zip(batch, encodings, strict=True):
        ids.extend(_spell_end_of_text(tokenizer, encoding.ids, end))
        if piece.ends_document:
            ids.append(end)
    documents = sum(piece.ends_document for piece in batch)
    return TokenBlock(np.array(ids, np.uint32), documents, sum(len(piece.text.encode()) for piece in batch))


@dataclass(frozen=True)
class KnownTokenizer:
    """A tokenizer and the file it was loaded from."""

    tokenizer: Tokenizer
    path: Path

    @classmethod
    def read(cls, path: Path) -> "KnownTokenizer":
        """Load a tokenizer.json. Raises RunError if it is not one."""
        return cls(load_tokenizer(path), path)

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of the tokenizer's canonical JSON."""
        return compute_fingerprint(self.tokenizer)

    @cached_property
    def vocab_size(self) -> int:
        """The largest id + 1."""
        return get_vocab_size(self.tokenizer)

    @cached_property
    def is_neox(self) -> bool:
        """True for GPT-NeoX-20B's ids, including OLMo's two tokenizers, which add a few ids at the end."""
        end, padding = (self.tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|padding|>"))
        return end in olmo.END_OF_TEXT and padding == 1 and 50_254 <= self.vocab_size <= olmo.EMBEDDING_SIZE

    def differs_from(self, recorded: str) -> bool:
        """Return True if the tokenizer in a record (a fingerprint or a name) differs from this one."""
        if recorded == olmo.TOKENIZER:
            return not self.is_neox
        return recorded not in (UNKNOWN_TOKENIZER, self.fingerprint)
