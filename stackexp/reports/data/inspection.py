"""What a set of tokens holds, and whether its files are as they were written: `data inspect`."""

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from stackexp.data.evaluation_sets import KnownTokenizer, expand
from stackexp.data.shards import TokenSet, token_dtype
from stackexp.data.sources import JSON_LINES_SUFFIXES, TEXT_SUFFIXES, TOKEN_SUFFIXES
from stackexp.data.token_files import FileRecord, TokenFile, find_end_of_text, read_record, sha256_of
from stackexp.data.tokenizer import get_end_of_text_id
from stackexp.data.units import TAIL, read_unit
from stackexp.errors import RunError
from stackexp.reports.data.lengths import Documents, Lengths

BLOCK = 1 << 22  # ids read at a time
SAMPLE = 256  # ids, or characters, of a sample that is shown


@dataclass
class Inspection:
    """What was found. `damage`: a line for each file that is not as it was written; `checked` files were compared."""

    path: Path
    kind: str
    facts: dict[str, str] = field(default_factory=dict)  # shown as they are
    figures: dict = field(default_factory=dict)  # the same as numbers, for JSON
    lengths: Lengths | None = None
    unit: str = "tokens"  # of the lengths
    context_length: int | None = None
    samples: dict[str, str] = field(default_factory=dict)  # where -> text
    checked: int = 0
    unchecked: str = ""  # why files were not
    damage: list[str] = field(default_factory=list)

    def as_dict(self) -> dict:
        found = {"path": str(self.path), "kind": self.kind, **self.figures, "checked": self.checked}
        if self.lengths and self.lengths.total:
            counts, _, edges = self.lengths.coarse()
            summary = {"median": self.lengths.quantile(0.5), "mean": self.lengths.mean, "longest": self.lengths.longest}
            found["lengths"] = summary | {"unit": self.unit, "from": edges[:-1].tolist(), "documents": counts.tolist()}
        return found | {"damage": self.damage, "samples": self.samples}


@dataclass(frozen=True)
class Wish:
    """What the user wants to see."""

    samples: int = 3
    seed: int = 0
    tokenizer: KnownTokenizer | None = None  # of ids that came without
    progress: bool = False

    def choose(self, count: int) -> list[int]:
        """Which of `count` things are shown."""
        chosen = np.random.default_rng(self.seed).choice(count, min(self.samples, count), replace=False)
        return sorted(chosen.tolist())


def inspect(path: Path, wish: Wish) -> list[Inspection]:
    """Look at a prepared set, a token file, other people's MDS shards, or each set in a folder of those.

    Raises RunError if there is nothing of the kind.
    """
    if (path / "plan.json").exists() and not (path / "corpus.json").exists():
        count = len(list(path.glob("unit.*")))
        raise RunError(f"{path}: not finished, {count} units of work so far; the same data prepare command goes on")
    found = expand(path.name, path)
    if not path.is_dir() and path.name.lower().endswith(TEXT_SUFFIXES + JSON_LINES_SUFFIXES):
        raise RunError(f"{path}: text; to see its tokens: python -m stackexp data prepare {path} --to FOLDER ...")
    if len(found) == 1:
        return [_inspect(place, wish) for place in found.values()]
    return [_inspect_one_of_several(place, wish) for place in found.values()]


def _inspect_one_of_several(path: Path, wish: Wish) -> Inspection:
    try:
        return _inspect(path, wish)
    except RunError as error:  # the others are shown all the same
        return Inspection(path, "cannot be read", damage=[str(error)])


def _inspect(path: Path, wish: Wish) -> Inspection:
    if path.is_file():
        if path.name.lower().endswith(TOKEN_SUFFIXES):
            return _token_file(path, wish)
        size = path.stat().st_size
        return Inspection(path, "text", {"size": f"{size:,} bytes, not tokenised"}, {"file_bytes": size})
    if (path / "corpus.json").exists():
        return _prepared(path, wish)
    from stackexp.reports.data.mds_shards import inspect_shards

    return inspect_shards(path, wish)


# Prepared sets


def _prepared(path: Path, wish: Wish) -> Inspection:
    opened = TokenSet(path, cache=True)  # which leaves it to us what is whole
    corpus, shards = opened.corpus, json.loads((path / "index.json").read_text(encoding="utf-8"))["shards"]
    found = Inspection(path, "prepared set", context_length=corpus.context_length)
    tokenizer = None
    try:
        tokenizer = opened.load_tokenizer()
    except RunError as error:
        found.damage.append(str(error))
    found.figures = {name: getattr(corpus, name) for name in ("tokens", "documents", "bytes", "sequences")}
    found.figures |= {"tokenizer": corpus.tokenizer, "vocab_size": corpus.vocab_size, "bad_lines": corpus.bad_lines}
    found.figures |= {"context_length": corpus.context_length, "shards": len(shards)}
    sources = f"{corpus.sources[0]} ... {corpus.sources[-1]}" if len(corpus.sources) > 1 else "".join(corpus.sources)
    found.facts = {
        "tokens": f"{corpus.tokens:,}, of which the last {corpus.dropped_tokens:,} fill no sequence",
        "documents": f"{corpus.documents:,}, and {corpus.bad_lines:,} bad lines left out",
        "bytes": f"{corpus.bytes:,}, {corpus.bytes / max(corpus.tokens, 1):.2f} of each token",
        "sequences": f"{corpus.sequences:,} of {corpus.context_length:,} tokens; shards: {len(shards):,}",
        "tokenizer": f"{corpus.tokenizer[:16]}, {corpus.vocab_size:,} tokens, tokenizer.json",
    }
    if corpus.sources:
        found.facts["sources"] = f"{len(corpus.sources):,}: {sources}"
    documents = Documents(get_end_of_text_id(tokenizer)) if tokenizer else None
    broken, tails = set(), _tails(found)
    whole = bool(tails)
    for number, data in enumerate(whole_shards(found, [shard["raw_data"] for shard in shards], wish)):
        if data is None:
            broken.add(number)
        elif documents and not (whole and _unit(shards[number]) == "tails"):
            documents.add(_sequences(data, shards[number], opened))
            if number + 1 == len(shards) or _unit(shards[number + 1]) != _unit(shards[number]):
                documents.add(tails.pop(_unit(shards[number]), np.empty(0)))
    if documents and not found.damage:
        for tail in tails.values():  # of units too short for a sequence
            documents.add(tail)
        documents.close()
        found.lengths = documents.lengths
        if whole and found.lengths.total != corpus.documents:
            found.damage.append(f"{path}/corpus.json: {corpus.documents:,} documents, found {found.lengths.total:,}")
    if tokenizer:
        _sample_sequences(found, opened, broken, tokenizer, wish)
    return found


def _sequences(data: bytes, shard: dict, opened: TokenSet) -> np.ndarray:
    """The tokens of a shard, flat: they are the end of its file."""
    dtype, count = token_dtype(opened.corpus.vocab_size), shard["samples"] * opened.corpus.context_length
    return np.frombuffer(data, dtype, count, len(data) - count * dtype.itemsize)


def _unit(shard: dict) -> str:
    return shard["raw_data"]["basename"].rpartition("/")[0]


def _tails(found: Inspection) -> dict[str, np.ndarray]:
    """The ends of the units, which make their documents whole; {} of a copy that was made without them."""
    folders = sorted(found.path.glob("unit.*"))
    if not any((folder / TAIL).exists() for folder in folders):
        return {}
    tails = {}
    for folder in folders:
        try:
            entry = {"hashes": {"sha256": read_unit(folder).hashes[TAIL]}}
        except (OSError, ValueError, TypeError, KeyError):
            found.damage.append(f"{folder / 'unit.json'}: missing or corrupt")
            continue
        data, problem = read_whole(folder / TAIL, entry)
        if problem:
            found.damage.append(f"{folder / TAIL}: {problem}")
        else:
            tails[folder.name] = np.load(io.BytesIO(data))
    return tails


def _sample_sequences(found: Inspection, opened: TokenSet, broken: set[int], tokenizer: Tokenizer, wish: Wish) -> None:
    for index in wish.choose(len(opened)):
        if int(np.searchsorted(opened.begins, index, side="right")) - 1 not in broken:
            text = tokenizer.decode(opened[index][:SAMPLE].tolist(), skip_special_tokens=False)
            found.samples[f"sequence {index:,}"] = text


# Shards and their hashes


def whole_shards(found: Inspection, entries: list[dict], wish: Wish) -> Iterator[bytes | None]:
    """What is in the file of each entry of an index; None if that is damaged, which is noted."""
    for entry in tqdm(entries, desc="checking shards", unit="shard", disable=not wish.progress):
        data, problem = read_whole(found.path / entry["basename"], entry)
        if problem:
            found.damage.append(f"{found.path / entry['basename']}: {problem}")
        else:
            found.checked += 1
        yield data


def read_whole(path: Path, entry: dict) -> tuple[bytes, None] | tuple[None, str]:
    """What is in a file, or how it differs from what an index says of it: `bytes` and `hashes`, if they are given."""
    try:
        size = path.stat().st_size
        if size != (expected := entry.get("bytes", size)):
            return None, f"{'cut short' if size < expected else 'too long'}: {size:,} bytes, not {expected:,}"
        data = path.read_bytes()
    except OSError as e:
        return None, "missing" if isinstance(e, FileNotFoundError) else f"cannot be read ({e.strerror})"
    for name, expected in (entry.get("hashes") or {}).items():
        if digest(data, name) != expected:
            return None, f"corrupt: another {name.upper()} than recorded"
    return data, None


def digest(data: bytes, algorithm: str) -> str:
    """A hash by hashlib, or by what mosaicml-streaming has beside."""
    if algorithm in hashlib.algorithms_available:
        return hashlib.new(algorithm, data).hexdigest()
    from streaming.base.hashing import get_hash

    return get_hash(algorithm, data)


# Token files


def _token_file(path: Path, wish: Wish) -> Inspection:
    found = Inspection(path, "token file")
    record = read_record(path)
    try:
        file = TokenFile(path)
    except RunError as error:
        found.damage.append(str(error))
        return found
    known, tokens = wish.tokenizer, file.tokens
    if record is None:
        found.unchecked = f"it has no record, {path.name}.json"
    elif sha256_of(path) != record.sha256:
        found.damage.append(f"{path}: corrupt: another SHA-256 than in its record")
    else:
        found.checked = 1
    end = record.end_of_text if record and record.end_of_text is not None else None
    if end is None:
        end = get_end_of_text_id(known.tokenizer) if known else find_end_of_text(tokens)
    documents, highest = Documents(-1 if end is None else end), 0
    for begin in tqdm(range(0, len(tokens), BLOCK), desc="reading", disable=not wish.progress):
        block = np.asarray(tokens[begin : begin + BLOCK])
        documents.add(block)
        highest = max(highest, int(block.max()))
    documents.close()
    found.figures = {"tokens": len(tokens), "largest_id": highest, "end_of_text": end, "dtype": tokens.dtype.name}
    found.facts = {"tokens": f"{len(tokens):,} {tokens.dtype.name}, the largest id is {highest:,}"}
    if end is None:
        found.facts["documents"] = "not known: no id that ends one (name its tokenizer with --tokenizer)"
    else:
        found.lengths = documents.lengths
        found.figures["documents"] = documents.lengths.total
        found.facts["documents"] = f"{documents.lengths.total:,}, ended by id {end}"
    if record:
        _tell_record(found, record)
    if known and known.vocab_size <= highest:
        found.damage.append(f"{path}: token id {highest:,}, outside the vocabulary of {known.vocab_size:,}")
    elif known and record and known.contradicts(record.tokenizer):
        found.damage.append(f"{path}: token ids of another tokenizer, {record.tokenizer[:16]}")
    else:
        _sample_ids(found, tokens, known, wish)
    return found


def _tell_record(found: Inspection, record: FileRecord) -> None:
    found.figures |= {"tokenizer": record.tokenizer, "vocab_size": record.vocab_size, "source": record.source}
    if record.text_bytes:
        found.figures["bytes"] = record.text_bytes
        found.facts["bytes"] = f"{record.text_bytes:,} of text, {record.text_bytes / record.tokens:.2f} of each token"
    found.facts["tokenizer"] = f"{record.tokenizer[:16]}, ids below {record.vocab_size:,}"
    found.facts["source"] = record.source


def _sample_ids(found: Inspection, tokens: np.ndarray, known: KnownTokenizer | None, wish: Wish) -> None:
    for index in wish.choose(-(-len(tokens) // SAMPLE)):
        ids = tokens[index * SAMPLE : (index + 1) * SAMPLE].tolist()
        text = known.tokenizer.decode(ids, skip_special_tokens=False) if known else " ".join(map(str, ids[:64]))
        found.samples[f"from token {index * SAMPLE:,}"] = text
