"""Named sets of tokens to validate and test on, whatever they are stored as.

A place that data.validation or data.test names is one set, or a folder of sets, a group:

    a folder that `data prepare` made       its sequences, one after the other
    .npy, .bin                              token ids, see data/token_files.py
    a folder of other people's MDS shards   column `tokens` or `text`, read once into the cache
    .jsonl, .jsonl.gz, .jsonl.zst, .txt     tokenised once, into the cache
    a folder of several of these            the sets <name>/<stem>; a folder in it that holds a single one is that set

A set is cut into chunks of the context length (`Chunks`). Nothing is loaded whole.
"""

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from stackexp.config.data import DataConfig
from stackexp.data import olmo
from stackexp.data.converted_sets import UNKNOWN, mds_tokens, text_tokens
from stackexp.data.shards import TokenSet
from stackexp.data.sources import JSON_LINES_SUFFIXES, TEXT_SUFFIXES, TOKEN_SUFFIXES
from stackexp.data.token_files import Chunks, TokenFile, sha256_of
from stackexp.data.tokenizer import compute_fingerprint, get_vocab_size, load_tokenizer
from stackexp.errors import RunError

log = logging.getLogger(__name__)

LISTED = (
    *TOKEN_SUFFIXES,
    ".txt",
    ".text",
    *JSON_LINES_SUFFIXES,
)  # sets in a folder of sets; not README.md
BLOCK = 1 << 24  # ids looked through at a time


@dataclass(frozen=True)
class KnownTokenizer:
    """The tokenizer of what a model was trained on, and the file it was read from."""

    tokenizer: Tokenizer
    path: Path

    @classmethod
    def read(cls, path: Path) -> "KnownTokenizer":
        return cls(load_tokenizer(path), path)

    @cached_property
    def fingerprint(self) -> str:
        return compute_fingerprint(self.tokenizer)

    @cached_property
    def vocab_size(self) -> int:
        return get_vocab_size(self.tokenizer)

    @cached_property
    def is_neox(self) -> bool:
        """Whether its ids are GPT-NeoX-20B's, maybe with a few more at the end, as in both of OLMo's."""
        end, padding = (self.tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|padding|>"))
        return end in (0, 50_279) and padding == 1 and 50_254 <= self.vocab_size <= olmo.EMBEDDING_SIZE

    def contradicts(self, whose: str) -> bool:
        """Whether ids of the tokenizer `whose`, a fingerprint or a name, are known to be another's."""
        if whose == olmo.TOKENIZER:
            return not self.is_neox
        return whose not in (UNKNOWN, self.fingerprint)


@dataclass(frozen=True)
class EvaluationSet:
    """One set, opened. `bytes_per_token` of text, where its record tells; `identity` changes with what it holds."""

    name: str
    path: Path
    chunks: Chunks
    bytes_per_token: float | None
    identity: str


class Concatenated:
    """The sequences of a prepared set as one array of token ids [N], of which slices are read on demand."""

    def __init__(self, tokens: TokenSet):
        self.sequences, self.length = tokens, tokens.corpus.context_length

    def __len__(self) -> int:
        return len(self.sequences) * self.length

    def __getitem__(self, part: slice) -> np.ndarray:
        begin, end, _ = part.indices(len(self))
        first = begin // self.length
        rows = [self.sequences[i] for i in range(first, -(-end // self.length))]
        return np.concatenate(rows)[begin - first * self.length : end - first * self.length]


# Which sets there are


def expand(name: str, path: Path, whole: bool = True) -> dict[str, Path]:
    """The sets at a place: {name: path}, or of a folder of sets {name/<stem>: path}.

    Raises RunError if there are none. Warns where sets of V2 or V3 are missing: its averages are over the others; but
    not if the `whole` is not asked for.
    """
    if not path.exists():
        raise RunError(_missing(name, path))
    if path.is_file() or _is_set(path):
        return {name: path}
    found = _sets_in(name, path)
    if not found:
        known = " ".join(dict.fromkeys(LISTED))
        raise RunError(f"{path}: holds no sets; expected prepared sets, MDS shards or files that end in {known}")
    missing = [n for n in olmo.NAMES.get(name, ()) if f"{name}/{n}" not in found]
    if missing and whole:
        log.warning("%s: %d sets are missing: %s; %s", name, len(missing), ", ".join(missing), _fetch(name, path))
    return found


def _sets_in(name: str, folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for entry in sorted(folder.iterdir()):
        upwards = entry.is_symlink() and entry.is_dir() and folder.resolve().is_relative_to(entry.resolve())
        if upwards or entry.name.startswith("."):
            continue
        stem = f"{name}/{_stem(entry)}"
        if entry.is_dir() and not _is_set(entry):
            inside = _sets_in(stem, entry)
            inside = dict.fromkeys([stem], *inside.values()) if len(inside) == 1 else inside  # 4chan/val.npy
        else:
            inside = {stem: entry} if entry.is_dir() or entry.name.lower().endswith(LISTED) else {}
        if twice := found.keys() & inside.keys():
            raise RunError(f"{folder}: {found[min(twice)].name} and {entry.name} are both {min(twice)}; rename one")
        found |= inside
    return found


def _is_set(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("corpus.json", "plan.json", "index.json"))


def _stem(path: Path) -> str:
    """The name without its suffix; a folder's is its name."""
    suffixes = [] if path.is_dir() else [s for s in LISTED if path.name.lower().endswith(s)]
    return path.name[: -len(max(suffixes, key=len))] if suffixes else path.name


def _missing(name: str, path: Path) -> str:
    if name in olmo.NAMES:
        return f"{path}: no such folder; {_fetch(name, path)}"
    command = f"python -m stackexp data prepare SOURCE --to {path} --tokenizer TOKENIZER.json"
    return f"{path}: no such file or folder, set {name}; correct the path, or make it with: {command}"


def _fetch(version: str, path: Path) -> str:
    """The command for missing files of V2 or V3; in another vocabulary they are re-encoded afterwards."""
    original = olmo.DEFAULT_FOLDER / version
    if path == original:
        return f"fetch them with: python -m stackexp data fetch {version}"
    retokenize = f"data retokenize {original} --to {path} --from GPT-NEOX-TOKENIZER.json --tokenizer TOKENIZER.json"
    return f"fetch them with: python -m stackexp data fetch {version}; in another vocabulary then: {retokenize}"


# Opening one


def open_set(name: str, path: Path, config: DataConfig, tokenizer: KnownTokenizer | None) -> EvaluationSet:
    """The set at `path`, cut into chunks. `tokenizer`: the model's, None if it is not known.

    Raises RunError if it is missing or damaged, has ids that the model has not, was made with another tokenizer, or
    is too short for one chunk.
    """
    if path.is_dir() and any((path / file).is_file() for file in ("corpus.json", "plan.json")):
        tokens, bytes_per_token, identity = _open_prepared(path, config, tokenizer)
    else:
        file = _token_file(path, config, tokenizer)
        _check_file(path, file, config, tokenizer)
        tokens, record = file.tokens, file.record
        bytes_per_token = record.text_bytes / record.tokens if record and record.text_bytes else None
        stat = file.path.stat()
        identity = record.sha256 if record else f"{stat.st_size} bytes of {stat.st_mtime_ns}"
    chunks = Chunks(tokens, config.context_length, config.score_remainder)
    if not len(chunks):
        few = f"{path}: {len(tokens)} tokens do not fill one chunk of data.context_length {config.context_length}"
        raise RunError(f"{few}; lower it, or score what there is with data.score_remainder=true (--score-remainder)")
    return EvaluationSet(name, path, chunks, bytes_per_token, identity)


def _open_prepared(path: Path, config: DataConfig, tokenizer: KnownTokenizer | None) -> tuple[Concatenated, float, str]:
    opened = TokenSet(path, f"--tokenizer {tokenizer.path if tokenizer else 'TOKENIZER.json'}")
    corpus = opened.corpus
    if tokenizer and tokenizer.contradicts(corpus.tokenizer):
        raise RunError(
            f"{path}: made with another tokenizer than {tokenizer.path.parent}; prepare it with "
            f"--tokenizer {tokenizer.path}, or re-encode it with data retokenize"
        )
    if corpus.vocab_size > config.vocab_size:
        raise RunError(
            f"{path}: its tokenizer has {corpus.vocab_size} tokens, but data.vocab_size is {config.vocab_size}; "
            f"set data.vocab_size={corpus.vocab_size}"
        )
    identity = sha256_of(path / "index.json")  # it holds the shards' hashes
    return Concatenated(opened), corpus.bytes / max(corpus.tokens, 1), identity


def _token_file(path: Path, config: DataConfig, tokenizer: KnownTokenizer | None) -> TokenFile:
    """The token file at `path`, or the one in the cache that stands for it."""
    name = path.name.lower()
    if path.is_dir():
        return mds_tokens(path, config.vocab_size, tokenizer and tokenizer.tokenizer)
    if name.endswith(TOKEN_SUFFIXES):
        return TokenFile(path)
    if not name.endswith(TEXT_SUFFIXES + JSON_LINES_SUFFIXES):
        known = " ".join(TOKEN_SUFFIXES + TEXT_SUFFIXES + JSON_LINES_SUFFIXES)
        raise RunError(f"{path}: neither token ids nor text, going by its name; known are {known}")
    return text_tokens(path, tokenizer and tokenizer.tokenizer)


def _check_file(path: Path, file: TokenFile, config: DataConfig, tokenizer: KnownTokenizer | None) -> None:
    """Raise RunError, naming the remedy, if its ids are not those of the model's vocabulary."""
    target = tokenizer.path if tokenizer else "TOKENIZER.json"
    command = f"data retokenize {path} --to FOLDER --from ITS-TOKENIZER.json --tokenizer {target}"
    remedy = f"re-encode it with: python -m stackexp {command}"
    record, whose = file.record, file.record.tokenizer if file.record else UNKNOWN
    if tokenizer and tokenizer.contradicts(whose):
        theirs = "GPT-NeoX-20B's" if whose == olmo.TOKENIZER else "another tokenizer's"
        raise RunError(f"{path}: token ids of {theirs}, not of {target}; {remedy}")
    limit, why = config.vocab_size, f"data.vocab_size is {config.vocab_size:,}"
    if tokenizer and not tokenizer.is_neox and tokenizer.vocab_size < limit:
        limit, why = tokenizer.vocab_size, f"{target} has {tokenizer.vocab_size:,} tokens"
    if record and record.vocab_size <= limit:
        return
    low, high = _extremes(file.tokens)
    if low < 0:
        raise RunError(f"{path}: token id {low}; ids are not negative: make the file again")
    if high >= limit:
        raise RunError(f"{path}: token id {high:,}, but {why}; {remedy}")


def _extremes(tokens: np.ndarray) -> tuple[int, int]:
    blocks = [tokens[begin : begin + BLOCK] for begin in range(0, len(tokens), BLOCK)]
    return min(int(block.min()) for block in blocks), max(int(block.max()) for block in blocks)
