"""Read token files as sources of a prepared set: ids are kept, and each document ends with end-of-text."""

import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from stackexp.data.readers import TokenBlock
from stackexp.data.sources import TOKEN_SUFFIXES, Source
from stackexp.data.token_files import REMEDY, TokenFile
from stackexp.data.tokenizer import KnownTokenizer, count_token_bytes, get_end_of_text_id, get_vocab_size
from stackexp.errors import RunError

BLOCK = 1 << 20  # ids read at a time


def check_token_sources(sources: list[Source], path: Path, tokenizer: Path | None) -> None:
    """Raise RunError if only some sources are token files, if one is incomplete, or if one needs another tokenizer."""
    tokens = [source for source in sources if source.has_tokens]
    texts = [source for source in sources if not source.has_tokens]
    if not tokens:
        return
    if texts:
        raise RunError(
            f"{path}: contains both token ids ({tokens[0].name}) and text ({texts[0].name}); prepare them separately "
            "and train on both with data.streams"
        )
    if tokenizer is None:
        suffixes = " and ".join(TOKEN_SUFFIXES)
        raise RunError(
            f"{sources[0].path}: {suffixes} files hold token ids; name the tokenizer that made them with --tokenizer"
        )
    known = KnownTokenizer.read(tokenizer)
    end = get_end_of_text_id(known.tokenizer)
    remedy = "give the tokenizer that made them, or convert them with data retokenize"
    for source in sources:
        record = TokenFile(source.path).record
        if record and known.contradicts(record.tokenizer):
            name = record.tokenizer[:16]
            raise RunError(f"{source.path}: token ids of another tokenizer ({name}) than {tokenizer}; {remedy}")
        if record and record.end_of_text not in (None, end):
            raise RunError(
                f"{source.path}: documents end with id {record.end_of_text}, but end-of-text of {tokenizer} is {end}; "
                f"{remedy}"
            )


def read_tokens(source: Source, tokenizer: Tokenizer, advance: Callable[[int], object]) -> Iterator[TokenBlock]:
    """Yield the ids of a token file in order, adding end-of-text if it does not end with it.

    `advance` is called with the number of bytes read since the last call. Raises RunError for an id outside the
    vocabulary, or if the file differs from its record.
    """
    file, path = TokenFile(source.path), Path(source.path)
    end, vocab_size, text_bytes = get_end_of_text_id(tokenizer), get_vocab_size(tokenizer), count_token_bytes(tokenizer)
    digest, position, documents, last = hashlib.sha256(), 0, 0, end
    with open(path, "rb") as raw:  # not the memory map: its pages would count as this process's memory
        digest.update(raw.read(file.tokens.offset))
        while len(ids := np.fromfile(raw, file.tokens.dtype, BLOCK)):
            digest.update(ids.data)
            if len(outside := np.flatnonzero((ids >= vocab_size) | (ids < 0))):
                first = outside[0]
                raise RunError(
                    f"{path}: token id {ids[first]} at position {position + first}, outside the vocabulary of "
                    f"{vocab_size}; give the tokenizer that made the file"
                )
            ends = int((ids == end).sum())
            yield TokenBlock(ids, ends, int(text_bytes[ids].sum()))
            documents, position, last = documents + ends, position + len(ids), ids[-1]
            advance(ids.nbytes)
    if file.record and file.record.sha256 != digest.hexdigest():
        raise RunError(f"{path}: differs from its record (another SHA-256); {REMEDY}")
    if last != end:
        yield TokenBlock(np.array([end], file.tokens.dtype), 1, 0)
    if not documents:
        message = f"{path}: contains no end-of-text (id {end}), so it is read as one document"
        print(message, file=sys.stderr, flush=True)
