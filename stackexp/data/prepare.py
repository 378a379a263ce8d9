"""Prepare a set of token shards from text or token files.

The source files, sorted by name, are grouped into units. A unit is written to a hidden folder that is renamed when it
is complete, so a restart after a kill writes only the missing units. The result depends only on the plan, not on the
number of processes, parts or restarts.

Part i of n writes every n-th unit. Parts share the lock of the folder; the merge takes the lock exclusively.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stackexp.data.packing import Packing
from stackexp.data.readers import ALL_TEXT, Columns, Piece, check_columns, read_pieces
from stackexp.data.shards import FORMAT_VERSION, Corpus, TokenSet
from stackexp.data.sources import TOKEN_SUFFIXES, Source, find_megatron_index, find_sources, walk
from stackexp.data.token_files import TokenFile
from stackexp.data.tokenizer import (
    KnownTokenizer,
    compute_fingerprint,
    get_end_of_text_id,
    load_tokenizer,
    train_tokenizer,
)
from stackexp.data.units import UnitJob, merge_units, name_unit, write_units
from stackexp.errors import RunError
from stackexp.files import WRITE_REMEDY, explain_failed_writes, hold_lock, read_json, write_atomically, write_json

UNIT_BYTES = 1 << 24  # source bytes per unit; a larger file is a unit by itself
TRAINING_BYTES = 1 << 26  # text for training a tokenizer, spread evenly over the source files
TRAINED = "trained here"  # the tokenizer in plan.json if none was given


@dataclass(frozen=True)
class Preparation:
    """The inputs that determine a prepared set.

    Give either `tokenizer`, the path of a tokenizer.json, or the `vocab_size` of a tokenizer to train on the sources.
    """

    source: Path  # file or folder
    tokenizer: Path | None = None
    vocab_size: int | None = None
    context_length: int = 2048
    unit_bytes: int = UNIT_BYTES
    columns: Columns = ALL_TEXT
    dtype: str | None = None  # of raw token files
    packing: Packing = "concatenate"

    def __post_init__(self) -> None:
        assert (self.tokenizer is None) != (self.vocab_size is None)

    @cached_property
    def sources(self) -> list[Source]:
        """The files to read. Raises RunError if there are none, or they do not fit the tokenizer or the columns."""
        sources = find_sources(self.source)
        _report_skipped(self.source, sources)
        if self.columns != ALL_TEXT and (without := [source for source in sources if not source.has_columns]):
            raise RunError(
                f"{without[0].path}: has no columns, but --filter and --text-column require JSON Lines or parquet; "
                "remove the file or name the folder or file to read"
            )
        if files := [source for source in sources if source.is_parquet]:
            check_columns(files[0], self.columns)  # before anything is written
        if any(source.has_tokens for source in sources):
            self._check_token_files(sources)
        return sources

    def _check_token_files(self, sources: list[Source]) -> None:
        """Raise RunError if only some sources are token files, if one is incomplete, or needs another tokenizer."""
        first = next(source for source in sources if source.has_tokens)
        if texts := [source for source in sources if not source.has_tokens]:
            raise RunError(
                f"{self.source}: contains both token ids ({first.name}) and text ({texts[0].name}); prepare them "
                "separately and train on both with data.streams"
            )
        if self.tokenizer is None:
            suffixes = " and ".join(TOKEN_SUFFIXES)
            remedy = "name the tokenizer that made them with --tokenizer"
            raise RunError(f"{first.path}: {suffixes} files hold token ids; {remedy}")
        known = KnownTokenizer.read(self.tokenizer)
        end = get_end_of_text_id(known.tokenizer)
        remedy = "give the tokenizer that made them, or convert them with data retokenize"
        for source in sources:
            record = TokenFile(source.path, dtype=self.dtype, vocab_size=known.vocab_size).record
            if record and known.differs_from(record.tokenizer):
                name = record.tokenizer[:16]
                raise RunError(f"{source.path}: token ids of another tokenizer ({name}) than {known.path}; {remedy}")
            if record and record.end_of_text not in (None, end):
                found = f"documents end with id {record.end_of_text}, but end-of-text of {known.path} is {end}"
                raise RunError(f"{source.path}: {found}; {remedy}")

    @cached_property
    def units(self) -> list[list[Source]]:
        """Neighboring sources in groups of at most `unit_bytes`, or a single larger source."""
        units: list[list[Source]] = []
        size = 0
        for source in self.sources:
            if not units or size + source.size > self.unit_bytes:
                units.append([])
                size = 0
            units[-1].append(source)
            size += source.size
        return units

    def record(self) -> dict:
        """Return the contents of plan.json."""
        trained = f"{TRAINED}, {self.vocab_size} tokens"
        return {
            "format version": FORMAT_VERSION,
            "tokenizer": compute_fingerprint(load_tokenizer(self.tokenizer)) if self.tokenizer else trained,
            "context length": self.context_length,
            "unit bytes": self.unit_bytes,
            "text column": self.columns.text,
            "filter": [str(condition) for condition in self.columns.filters],
            "dtype": self.dtype,
            "packing": self.packing,
            "sources": [source.record for source in self.sources],
        }


def _record_plan(record: dict, folder: Path) -> None:
    """Write plan.json, or check the record against it. The sources of an unfinished set may change.

    Raises RunError if anything else differs, if the set is finished, or if its tokenizer was trained on other sources.
    """
    path = folder / "plan.json"
    earlier = read_json(path) if path.exists() else record
    remedy = "delete the folder or choose another --to"
    try:
        differences = set(map(tuple, earlier["sources"])) ^ set(map(tuple, record["sources"]))
    except (KeyError, TypeError) as error:
        raise RunError(f"{path}: corrupt; {remedy}") from error
    for key, new in record.items():
        if key != "sources" and (old := earlier.get(key)) != new:
            raise RunError(f"{folder}: prepared with another {key} ({old or 'none'}, not {new or 'none'}); {remedy}")
    if differences:
        first, *others = sorted({name for name, *_ in differences})
        names = f"{first} and {len(others)} more" if others else first
        if (folder / "corpus.json").exists() or record["tokenizer"].startswith(TRAINED):
            raise RunError(f"{folder}: prepared from other sources (added, removed or changed: {names}); {remedy}")
        print(f"{folder}: sources have changed ({names}); their units are prepared again", file=sys.stderr)
    if differences or not path.exists():
        write_json(path, record, indent=1)


def prepare(
    plan: Preparation,
    folder: Path,
    *,
    workers: int | None = None,
    strict: bool = False,
    part: tuple[int, int] | None = None,
) -> Corpus | None:
    """Prepare a set in `folder`, or continue an earlier call that was stopped.

    `workers` is the number of processes (default: one per CPU). Bad lines are counted and logged; with `strict` the
    first one stops the work. With `part` (i, n), only part i of n, counted from 1, is written, and nothing is returned;
    several parts may run at the same time. A call without `part` writes the missing units and merges all. Raises
    RunError if there is nothing to read, a file is damaged, the disk is full, or the folder has other contents.
    """
    if forbidden := set("#?").intersection(str(folder.absolute())):  # for the library, which reads paths as URLs
        raise RunError(f"{folder}: contains {min(forbidden)!r} in its path; choose another --to")
    is_part, record = part is not None, plan.record()
    with explain_failed_writes(folder, WRITE_REMEDY):
        folder.mkdir(parents=True, exist_ok=True)
        found = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        if found and "plan.json" not in found:
            raise RunError(f"{folder}: not empty, and not written by data prepare; choose another --to")
        with hold_lock(folder / ".lock", f"the preparation of {folder}", shared=is_part):
            with hold_lock(folder / ".plan.lock", f"the start of {folder}"):  # parts may run at the same time
                _record_plan(record, folder)
                if (folder / "corpus.json").exists():
                    return None if is_part else _load_finished(folder, strict)
                tokenizer = _write_tokenizer(plan, folder)
            names = [name_unit(unit) for unit in plan.units]
            if not is_part:  # no part is running: delete units of changed files, and partial ones of killed processes
                for path in [*folder.glob("unit.*"), *folder.glob(".unit.*")]:
                    if path.name not in names:
                        shutil.rmtree(path)
            job = UnitJob(folder, tokenizer, plan.context_length, plan.columns, plan.dtype, strict, plan.packing)
            first, step = (part[0] - 1, part[1]) if part else (0, 1)
            write_units(job, plan.units[first::step], workers or len(os.sched_getaffinity(0)))
            if is_part:
                return None
            sources = [source.name for source in plan.sources]
            merge_units(folder, names, load_tokenizer(tokenizer), plan.context_length, sources)
            return _load_finished(folder)


def _report_skipped(source: Path, sources: list[Source]) -> None:
    """Print how many files of the folder have a suffix that is not read: they may be data in another format."""
    files = {str(path) for path in walk(source)} if source.is_dir() else set()
    files -= {str(find_megatron_index(Path(source.path))) for source in sources}
    if skipped := sorted(files - {source.path for source in sources}):
        suffixes = ", ".join(sorted({Path(path).suffix for path in skipped})[:8])
        print(f"files not read: {len(skipped)} with other suffixes ({suffixes}), such as {skipped[0]}", file=sys.stderr)


def _load_finished(folder: Path, strict: bool = False) -> Corpus:
    """Return the finished set. Raises RunError if a file is missing or cut short; training verifies the hashes.

    With `strict`, also raises RunError if lines were left out.
    """
    try:
        corpus = TokenSet(folder).corpus
    except RunError as error:
        remedy = f"delete the unit folder of that file and {folder}/corpus.json, and run the same command again"
        raise RunError(f"{folder}: damaged ({str(error).partition(';')[0]}); {remedy}") from error
    if strict and corpus.bad_lines:
        raise RunError(f"{folder}: {corpus.bad_lines} bad lines were left out, see bad_lines.log; correct the source")
    return corpus


def _write_tokenizer(plan: Preparation, folder: Path) -> Path:
    """Return the path of the set's tokenizer.json; the first call copies the given tokenizer or trains one."""
    path = folder / "tokenizer.json"
    given = load_tokenizer(plan.tokenizer) if plan.tokenizer else None
    if path.exists():
        if given and compute_fingerprint(load_tokenizer(path)) != compute_fingerprint(given):
            raise RunError(f"{path}: differs from {plan.tokenizer}; delete it and run the same command again")
    elif given:
        write_atomically(path, given.to_str(pretty=True))
    else:
        assert plan.vocab_size is not None
        print(f"training a tokenizer of {plan.vocab_size} tokens", file=sys.stderr, flush=True)
        trained = train_tokenizer(sample_texts(plan.sources, plan.columns), plan.vocab_size)
        write_atomically(path, trained.to_str(pretty=True))
    return path


def sample_texts(sources: list[Source], columns: Columns = ALL_TEXT) -> Iterator[str]:
    """Yield the beginning of every source, the same number of characters of each."""
    for source in sources:
        left = TRAINING_BYTES // len(sources)
        for piece in read_pieces(source, columns):
            if isinstance(piece, Piece):
                yield piece.text[:left]
                left -= len(piece.text)
            if left <= 0:
                break
