"""Byte-level BPE tokenizers: training, loading, encoding documents, and the number of text bytes per token."""

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stackexp.data.readers import Piece, TokenBlock
from stackexp.errors import RunError, first_line

END_OF_TEXT = "<|endoftext|>"
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # of other tokenizers
BATCH_PIECES, BATCH_CHARACTERS = 1024, 1 << 21  # limits of one tokenizer call


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a lossless byte-level BPE of at most `vocab_size` tokens.

    Id 0 is <|endoftext|>, ids 1 to 256 are the bytes. The result depends on the texts and `vocab_size` alone.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return treat_special_tokens_as_text(tokenizer)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a Hugging Face tokenizer.json. Raises RunError if it is missing, corrupt or has no end-of-text token."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises plain Exception
        raise RunError(f"{path}: not a readable tokenizer.json ({first_line(e)}); correct the path") from e
    get_end_of_text_id(tokenizer, path)
    return treat_special_tokens_as_text(tokenizer)


def treat_special_tokens_as_text(tokenizer: Tokenizer) -> Tokenizer:
    """Encode "<|endoftext|>" within a text as ordinary characters, and neither truncate nor pad."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def get_end_of_text_id(tokenizer: Tokenizer, path: Path | str = "tokenizer") -> int:
    """Return the id of the token that ends a document. Raises RunError if there is none."""
    for name in _END_OF_TEXT_NAMES:
        if (token := tokenizer.token_to_id(name)) is not None:
            return token
    raise RunError(f"{path}: no end-of-text token; add {END_OF_TEXT} to its added_tokens")


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


def count_token_bytes(tokenizer: Tokenizer, size: int | None = None) -> np.ndarray:
    """Return the bytes of text per token, int64 [size]; 0 for special tokens and unused ids.

    Supports byte-level vocabularies (one character per byte) and SentencePiece's, which write a space as U+2581 and a
    single byte as <0x0A>. `size` defaults to the vocabulary size.
    """
    byte_level = is_byte_level(tokenizer)
    table = np.zeros(size or get_vocab_size(tokenizer), np.int64)
    for token, index in tokenizer.get_vocab(with_added_tokens=False).items():
        if byte_level:
            table[index] = len(token)
        elif len(token) == 6 and token.startswith("<0x"):
            table[index] = 1
        else:
            table[index] = len(token.replace("\u2581", " ").encode())
    for added in json.loads(tokenizer.to_str())["added_tokens"]:
        table[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return table


def tokenize_pieces(pieces: Iterable[Piece | TokenBlock], tokenizer: Tokenizer) -> Iterator[TokenBlock]:
    """Yield the tokens of all documents in order, in batches; each document ends with end-of-text.

    Token blocks among the pieces pass through unchanged, so an input holds either text or tokens.
    """
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        if isinstance(piece, TokenBlock):
            yield piece
            continue
        batch.append(piece)
        characters += len(piece.text)
        if len(batch) == BATCH_PIECES or characters >= BATCH_CHARACTERS:
            yield _encode(batch, tokenizer)
            batch, characters = [], 0
    if batch:
        yield _encode(batch, tokenizer)


def _encode(batch: list[Piece], tokenizer: Tokenizer) -> TokenBlock:
    end, ids = get_end_of_text_id(tokenizer), array("I")
    encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
    for piece, encoding in zip(batch, encodings, strict=True):
        ids.extend(encoding.ids)
        if piece.ends_document:
            ids.append(end)
    documents = sum(piece.ends_document for piece in batch)
    return TokenBlock(np.array(ids, np.uint32), documents, sum(len(piece.text.encode()) for piece in batch))
