"""Decode token ids to text document by document, in parts of any size."""

import codecs
import json
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer

from stackexp.data.readers import Piece, cut_into_pieces
from stackexp.data.tokenizer import is_byte_level

Part = tuple[np.ndarray, bool]
"""Token ids [N] of a document, and whether the document ends with them."""


class DocumentDecoder:
    """A decoder of one token file. The counts cover the documents decoded so far."""

    def __init__(self, tokenizer: Tokenizer):
        self.documents, self.replaced_documents = 0, 0
        self._decoder: _ByteLevelDecoder | _WholeDocumentDecoder
        self._decoder = _ByteLevelDecoder(tokenizer) if is_byte_level(tokenizer) else _WholeDocumentDecoder(tokenizer)

    @property
    def num_bytes(self) -> int:
        """The bytes of text that the ids encode, before invalid UTF-8 is replaced."""
        return self._decoder.num_bytes

    def decode(self, parts: Iterator[Part]) -> Iterator[Piece]:
        """Yield the text of all documents in pieces. The last piece does not end a document if its ids do not."""
        has_ended = False

        def decode_document(part: Part | None) -> Iterator[str]:
            nonlocal has_ended
            while part:
                ids, has_ended = part
                yield self._decoder.decode(ids, has_ended)
                part = None if has_ended else next(parts, None)
            if not has_ended:
                yield self._decoder.decode(np.array([], np.int64), True)

        for part in parts:
            for piece in cut_into_pieces(decode_document(part)):
                yield Piece(piece.text, piece.ends_document and has_ended)
            self.documents += 1
            self.replaced_documents += self._decoder.has_replaced
            self._decoder.has_replaced = False


class _ByteLevelDecoder:
    """An exact incremental decoder for byte-level tokenizers. Bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, tokenizer: Tokenizer):
        self._bytes = _list_token_bytes(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self.has_replaced, self.num_bytes = False, 0

    def decode(self, ids: np.ndarray, ends_document: bool) -> str:
        data = b"".join(map(self._bytes.__getitem__, ids.tolist()))
        self.num_bytes += len(data)
        try:
            text = self._utf8.decode(data, ends_document)
        except UnicodeDecodeError:
            self.has_replaced, self._utf8.errors = True, "replace"
            text = self._utf8.decode(data, ends_document)
        if ends_document:
            self._utf8.reset()
            self._utf8.errors = "strict"
        return text


class _WholeDocumentDecoder:
    """The tokenizer's own decoder, which needs the full document in memory.

    `has_replaced` is True if the text contains U+FFFD, even where the ids spell that character.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self.has_replaced, self.num_bytes = False, 0

    def decode(self, ids: np.ndarray, ends_document: bool) -> str:
        self._ids += ids.tolist()
        if not ends_document:
            return ""
        text = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        self._ids, self.has_replaced = [], "\ufffd" in text
        self.num_bytes += len(text.encode())
        return text


def _list_token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the bytes of each id of a byte-level tokenizer; for an added token, the bytes of its content."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    table = {}
    for token, index in tokenizer.get_vocab(with_added_tokens=False).items():
        is_encoded = alphabet.keys() >= set(token)
        table[index] = bytes(map(alphabet.__getitem__, token)) if is_encoded else token.encode()
    added = json.loads(tokenizer.to_str())["added_tokens"]
    return table | {token["id"]: token["content"].encode() for token in added}
