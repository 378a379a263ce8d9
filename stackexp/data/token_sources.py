"""Token files as the source of a prepared set: their ids as they are; each document ends with end-of-text."""

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from stackexp.data.readers import TokenBlock
from stackexp.data.sources import TOKEN_SUFFIXES, Source
from stackexp.data.token_files import REMEDY, TokenFile, sha256_of
from stackexp.data.tokenizer import count_token_bytes, get_end_of_text_id, get_vocab_size
from stackexp.errors import RunError

BLOCK = 1 << 20  # ids read at a time


def of_tokens(sources: list[Source], place: Path) -> bool:
    """Whether the sources are token files. Raises RunError if they are both those and text."""
    tokens = [source for source in sources if source.has_tokens]
    if tokens and len(tokens) < len(sources):
        text = next(source for source in sources if not source.has_tokens)
        raise RunError(
            f"{place}: holds token ids ({tokens[0].name}) and text ({text.name}); prepare them apart, "
            "and train on both with data.streams"
        )
    return bool(tokens)


def check_token_sources(sources: list[Source], tokenizer: Path | None) -> None:
    """Raise RunError if a token file is not whole, or known to be of another tokenizer than the given."""
    if tokenizer is None:
        suffixes = " and ".join(TOKEN_SUFFIXES)
        raise RunError(
            f"{sources[0].path}: {suffixes} files hold token ids; name the tokenizer that made them with --tokenizer"
        )
    from stackexp.data.evaluation_sets import KnownTokenizer  # not needed where there is text

    known = KnownTokenizer.read(tokenizer)
    end = get_end_of_text_id(known.tokenizer)
    for source in sources:
        record = TokenFile(source.path).record
        if record and known.contradicts(record.tokenizer):
            raise RunError(
                f"{source.path}: token ids of another tokenizer ({record.tokenizer[:16]}) than {tokenizer}; "
                "give the one that made them, or re-encode them with data retokenize"
            )
        if record and record.end_of_text not in (None, end):
            raise RunError(
                f"{source.path}: its documents end with id {record.end_of_text}, but end-of-text of {tokenizer} is "
                f"{end}; give the tokenizer that made them, or re-encode them with data retokenize"
            )


@functools.lru_cache(maxsize=1)
def _text_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text each token stands for, [size]; end-of-text stands for none, whether it is marked special or not."""
    table = count_token_bytes(tokenizer)
    table[get_end_of_text_id(tokenizer)] = 0
    return table


def read_tokens(source: Source, tokenizer: Tokenizer, advance: Callable[[int], None]) -> Iterator[TokenBlock]:
    """The ids of a token file in order, with end-of-text at its end.

    Raises RunError for an id outside the tokenizer's vocabulary, and if the file is not what its record says.
    """
    path, size, end, table = (
        source.path,
        get_vocab_size(tokenizer),
        get_end_of_text_id(tokenizer),
        _text_bytes(tokenizer),
    )
    file, digest, position, documents, last = TokenFile(path), hashlib.sha256(), 0, 0, end
    other = RunError(f"{path}: not what its record says (another SHA-256); {REMEDY}")
    with open(path, "rb") as raw:  # not through the memory map, whose pages would count as ours
        digest.update(raw.read(file.tokens.offset))
        while len(ids := np.fromfile(raw, file.tokens.dtype, BLOCK)):
            digest.update(ids)
            outside = np.flatnonzero((ids >= size) | (ids < 0))
            if len(outside):
                first = outside[0]
                if file.record and file.record.sha256 != sha256_of(Path(path)):
                    raise other
                raise RunError(
                    f"{path}: token id {ids[first]} at position {position + first}, outside the vocabulary of {size}; "
                    "give the tokenizer that made the file"
                )
            ends = int((ids == end).sum())
            yield TokenBlock(ids, ends, int(table[ids].sum()))
            documents, position, last = documents + ends, position + len(ids), ids[-1]
            advance(ids.nbytes)
    if file.record and file.record.sha256 != digest.hexdigest():
        raise other
    if last != end:
        yield TokenBlock(np.array([end], ids.dtype), 1, 0)
    if not documents:
        print(f"{path}: end-of-text, id {end}, is not in it: taken for one document", file=sys.stderr, flush=True)
