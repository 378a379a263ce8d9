"""Byte-level BPE: training, loading, and how many bytes of text each token stands for."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stackexp.errors import RunError, first_line

END_OF_TEXT = "<|endoftext|>"
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # of other people's tokenizers


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens; id 0 is <|endoftext|>, 1..256 are the bytes.

    Lossless: decoding gives every text back. The result depends on the texts and `vocab_size` alone.
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
    """Load any Hugging Face tokenizer.json. Raises RunError if it is missing, broken or has no end-of-text token."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises plain Exception
        raise RunError(f"{path}: not a readable tokenizer.json ({first_line(e)})") from e
    get_end_of_text_id(tokenizer, path)
    return treat_special_tokens_as_text(tokenizer)


def treat_special_tokens_as_text(tokenizer: Tokenizer) -> Tokenizer:
    """Make "<|endoftext|>" inside a text ordinary characters: only we write the token that ends a document."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def get_end_of_text_id(tokenizer: Tokenizer, path: Path | str = "tokenizer") -> int:
    """The id of the token that ends a document. Raises RunError if there is none."""
    for name in _END_OF_TEXT_NAMES:
        if (token := tokenizer.token_to_id(name)) is not None:
            return token
    raise RunError(f"{path}: no end-of-text token; add {END_OF_TEXT} to its added_tokens")


def get_vocab_size(tokenizer: Tokenizer) -> int:
    """The largest token id plus one: the smallest embedding that fits (ids may have gaps)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def compute_fingerprint(tokenizer: Tokenizer) -> str:
    """sha256 of the tokenizer's canonical JSON: equal for equal tokenizers, however their file is formatted."""
    canonical = json.dumps(json.loads(tokenizer.to_str()), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether each character of a token stands for one byte, as in GPT-2's, GPT-NeoX's and our own."""
    spec = json.loads(tokenizer.to_str())
    return '"ByteLevel"' in json.dumps([spec["decoder"], spec["pre_tokenizer"]])


def count_token_bytes(tokenizer: Tokenizer, size: int | None = None) -> np.ndarray:
    """Bytes of text each token stands for, int64 [size]; 0 for special tokens and ids that are not used.

    Understands the two alphabets in use: byte-level (one character per byte) and SentencePiece's (a space is
    written as U+2581, a lone byte as <0x0A>).
    """
    spec = json.loads(tokenizer.to_str())
    byte_level = is_byte_level(tokenizer)
    table = np.zeros(size or get_vocab_size(tokenizer), np.int64)
    for token, index in tokenizer.get_vocab(with_added_tokens=False).items():
        if byte_level:
            table[index] = len(token)
        elif len(token) == 6 and token.startswith("<0x"):
            table[index] = 1
        else:
            table[index] = len(token.replace("\u2581", " ").encode())
    for added in spec["added_tokens"]:
        table[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return table
