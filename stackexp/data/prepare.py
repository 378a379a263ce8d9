"""A folder of text or of token files -> a prepared set, in several processes and jobs, restartable after a kill.

The source files, in order of their names, are grouped into units of about UNIT_BYTES. A unit is written into a
hidden folder and renamed when it is whole, so a restart does the missing units and nothing twice. The set depends
on the sources, the tokenizer and the context length alone, not on the number of processes, parts or restarts.

A part does every n-th unit. Parts share the lock of the folder, and each locks the unit it writes; who merges, and
checks the units that others have written, holds the folder alone.
"""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer
from tqdm import tqdm

from stackexp.data.locking import locked, locked_part
from stackexp.data.packing import BAD_LINES, damaged_file, merge, read_unit, regroup, unit_name, write_unit
from stackexp.data.readers import BadLine, Piece, TokenBlock, UnreadableSource, read_pieces
from stackexp.data.shards import FORMAT_VERSION, Corpus, TokenSet, write_json
from stackexp.data.sources import Source, find_sources
from stackexp.data.token_sources import check_token_sources, of_tokens, read_tokens
from stackexp.data.tokenizer import compute_fingerprint, load_tokenizer, train_tokenizer
from stackexp.errors import RunError
from stackexp.files import write_atomically

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNIT_BYTES = 1 << 24  # of source files; a larger file is a unit of its own
TRAINING_BYTES = 1 << 26  # of text to train a tokenizer on, spread over all source files


@dataclass(frozen=True)
class Plan:
    """What a prepared set is made of. Raises RunError if there is nothing to read."""

    source: Path
    tokenizer: Path | None  # None: one of `vocab_size` is trained
    vocab_size: int | None
    context_length: int
    unit_bytes: int = UNIT_BYTES

    def __post_init__(self):
        assert (self.tokenizer is None) != (self.vocab_size is None)

    @cached_property
    def sources(self) -> list[Source]:
        found = find_sources(self.source)
        if of_tokens(found, self.source):
            check_token_sources(found, self.tokenizer)
        return found

    @cached_property
    def units(self) -> list[list[Source]]:
        """Neighbouring sources in groups of at most `unit_bytes`, or one source if that alone is larger."""
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
        """plan.json: what a folder was begun with."""
        given = self.tokenizer and compute_fingerprint(load_tokenizer(self.tokenizer))
        return {
            "format version": FORMAT_VERSION,
            "tokenizer": given or f"trained here, {self.vocab_size} tokens",
            "context length": self.context_length,
            "unit bytes": self.unit_bytes,
            "sources": [s.record for s in self.sources],
        }


@dataclass(frozen=True)
class Job:
    """What every unit needs; sent to the worker processes."""

    folder: Path
    context_length: int
    strict: bool
    units: list[list[Source]]
    check: bool  # units that are there already: who merges does


def prepare(
    source: Path,
    folder: Path,
    *,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
    context_length: int = 2048,
    workers: int | None = None,
    strict: bool = False,
    progress: bool = True,
    unit_bytes: int = UNIT_BYTES,
    part: tuple[int, int] | None = None,
) -> Corpus | None:
    """Prepare `source` (a folder or a file) in `folder`, or go on where an earlier call was stopped.

    The tokens come from `tokenizer` (a tokenizer.json), or from a new one of `vocab_size` tokens. `workers`: number
    of processes, None for one per CPU. Bad lines are counted, or with `strict` the first one ends the work.
    `part` (i, n): only part i of n, counted from 1, maybe while others do theirs, and nothing is returned; a call
    without it merges.
    Raises RunError if there is nothing to read, a file is damaged, the disk is full, or `folder` holds something else.
    """
    plan = Plan(source, tokenizer, vocab_size, context_length, unit_bytes)
    workers = workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    begin(plan, folder)
    with _one_line(folder), locked(folder / ".lock", f"the preparation of {folder}", shared=part is not None):
        if changed := _match(plan.record(), folder):  # while this one waited
            raise RunError(f"{folder}: sources have changed again, {_listed(changed)}; run the same command again")
        if part and (folder / "corpus.json").exists():
            return None
        if not part and (finished := _finished(folder)):
            return finished
        tokenizer_path = _tokenizer(plan, folder)
        job = Job(folder, context_length, strict, plan.units, check=part is None)
        numbers = range(len(plan.units)) if part is None else range(part[0] - 1, len(plan.units), part[1])
        _write_units(job, tokenizer_path, numbers, workers, progress)
        if part:
            return None
        names = [s.name for s in plan.sources]
        return merge(folder, len(job.units), load_tokenizer(tokenizer_path), context_length, names)


def begin(plan: Plan, folder: Path) -> None:
    """Put the plan into a new folder. Raises RunError if it is another plan's, or holds something else.

    Of a set that is not finished the sources may change: what was made of others is removed.
    """
    record = plan.record()
    with _one_line(folder):
        folder.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        if there and "plan.json" not in there:
            raise RunError(f"{folder}: not empty, and not from data prepare; choose another --to")
        with locked(folder / ".plan.lock", f"the beginning of {folder}"):
            changed = _match(record, folder)
        if changed:
            with locked(folder / ".lock", f"the preparation of {folder}"):
                regroup(folder, plan.units)
                write_json(folder / "plan.json", record)
            print(f"{folder}: sources have changed, {_listed(changed)}; their units are done again", file=sys.stderr)


@contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    """What the system refuses becomes a RunError that says what to do."""
    try:
        yield
    except OSError as e:
        remedy = "make room" if e.errno in NO_ROOM else "mend that"
        raise RunError(
            f"{folder}: cannot be written ({e.strerror or e}); {remedy}, then run the same command again: "
            "what is finished is kept"
        ) from e
    except BrokenProcessPool as e:
        raise RunError(
            f"{folder}: a worker process was killed (out of memory?); run the same command with fewer --workers: "
            "what is finished is kept"
        ) from e


def _match(record: dict, folder: Path) -> list[str]:
    """The names of the sources that are not as they were. Raises RunError if another plan is there, or a finished set
    of other sources."""
    path = folder / "plan.json"
    if not path.exists():
        write_json(path, record)
    earlier = json.loads(path.read_text(encoding="utf-8"))
    changed = sorted({name for name, *_ in _difference(earlier.get("sources", []), record["sources"])})
    for key, value in record.items():
        if earlier.get(key) == value or (key == "sources" and not (folder / "corpus.json").exists()):
            continue
        change = (
            f"{earlier.get(key)}, not {value}" if key != "sources" else f"come, gone or changed: {_listed(changed)}"
        )
        raise RunError(f"{folder}: made with another {key} ({change}); delete it or choose another --to")
    return changed


def _difference(some: list[list], others: list[list]) -> set[tuple]:
    return {tuple(source) for source in some} ^ {tuple(source) for source in others}


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _finished(folder: Path) -> Corpus | None:
    """The set that is done. One whose shards are missing or cut short is undone: its units are checked and merged."""
    if not (folder / "corpus.json").exists():
        return None
    try:
        return TokenSet(folder).corpus
    except RunError as error:
        print(f"damaged: {error}; doing so", file=sys.stderr, flush=True)
        (folder / "corpus.json").unlink()
        return None


def _tokenizer(plan: Plan, folder: Path) -> Path:
    """The set's tokenizer.json, trained if none was given. An earlier call's is taken: the plan is the same."""
    path = folder / "tokenizer.json"
    with locked(folder / ".plan.lock", f"the tokenizer of {folder}"):  # of several parts one makes it
        own = plan.tokenizer and compute_fingerprint(load_tokenizer(plan.tokenizer))
        if own and path.exists() and compute_fingerprint(load_tokenizer(path)) != own:
            raise RunError(f"{path}: not {plan.tokenizer}, which {folder} is made with; delete it")
        if not path.exists():
            if plan.tokenizer:
                tokenizer = load_tokenizer(plan.tokenizer)
            else:
                print(f"training a tokenizer of {plan.vocab_size} tokens", file=sys.stderr, flush=True)
                tokenizer = train_tokenizer(_sample(plan.sources), plan.vocab_size)
            write_atomically(path, tokenizer.to_str(pretty=True))
    return path


def _sample(sources: list[Source]) -> Iterator[str]:
    """The beginning of every source, the same number of characters of each."""
    for source in sources:
        left = TRAINING_BYTES // len(sources)
        for piece in read_pieces(source):
            if isinstance(piece, Piece):
                yield piece.text[:left]
                left -= len(piece.text)
            if left <= 0:
                break


def _write_units(job: Job, tokenizer_path: Path, numbers: Sequence[int], workers: int, progress: bool) -> None:
    """Write those of the units that are missing. Raises RunError at the end if sources are broken; all are named."""
    broken: list[str] = []
    total = sum(source.size for n in numbers for source in job.units[n])
    often = 0.1 if sys.stderr.isatty() else 60  # seconds
    bar = tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="tokenising",
        disable=not progress,
        mininterval=often,
        maxinterval=60,
    )
    with bar:
        workers = min(workers, len(numbers))
        if workers > 1:
            _in_processes(job, tokenizer_path, numbers, workers, bar, broken)
        else:
            tokenizer = load_tokenizer(tokenizer_path)
            for n in numbers:
                with _noted(broken):
                    _finish_unit(job, n, tokenizer, bar.update)
    if broken:
        *others, last = sorted(broken)
        for message in others:
            print(f"error: {message}", file=sys.stderr)
        raise RunError(last)


@contextmanager
def _noted(broken: list[str]) -> Iterator[None]:
    """A source that cannot be read does not end the work on the others."""
    try:
        yield
    except UnreadableSource as error:
        broken.append(str(error))


def _finish_unit(job: Job, number: int, tokenizer: Tokenizer, advance: Callable[[int], object]) -> None:
    """Write a unit unless it is there."""
    final = job.folder / unit_name(number)
    with locked_part(job.folder / ".units.lock", number, f"{final.name} of {job.folder}"):
        hidden = _hidden(final)
        if hidden.exists():  # of a process that was killed
            shutil.rmtree(hidden)
        if final.exists() and job.check and (name := damaged_file(final)):
            print(f"{final / name}: missing or damaged; {final.name} is done again", file=sys.stderr, flush=True)
            final.rename(hidden)
            shutil.rmtree(hidden)
        if not final.exists():
            return _write_unit(job, number, tokenizer, advance)
    if job.strict and read_unit(final).bad_lines:
        with open(final / BAD_LINES, encoding="utf-8") as log:
            raise RunError(_strict(log.readline().rstrip()))
    advance(sum(source.size for source in job.units[number]))


def _hidden(final: Path) -> Path:
    """Where a unit is while it is written, and while it is removed."""
    return final.with_name(f".{final.name}.part")


def _write_unit(job: Job, number: int, tokenizer: Tokenizer, advance: Callable[[int], object]) -> None:
    final = job.folder / unit_name(number)
    temporary = _hidden(final)
    temporary.mkdir()
    parts = (part for source in job.units[number] for part in _parts(source, job, tokenizer, temporary, advance))
    try:
        write_unit(temporary, parts, tokenizer, job.context_length, job.units[number])
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _parts(
    source: Source, job: Job, tokenizer: Tokenizer, scratch: Path, advance: Callable[[int], object]
) -> Iterator[Piece | TokenBlock | BadLine]:
    if source.has_tokens:
        yield from read_tokens(source, tokenizer, advance)
        return
    for piece in read_pieces(source, advance):
        if job.strict and isinstance(piece, BadLine):
            raise RunError(_strict(str(piece)))
        yield piece


def _strict(line: str) -> str:
    return f"{line}; mend the line, or leave out --strict to skip it"


def _in_processes(
    job: Job, tokenizer_path: Path, numbers: Sequence[int], workers: int, bar: tqdm, broken: list[str]
) -> None:
    """Share the units out among processes; the first error, but of a broken source, stops them all."""
    context = multiprocessing.get_context("spawn")
    counter, stop = context.Value("q", 0), context.Event()
    state = (job, tokenizer_path, counter, stop)
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=state) as pool:
        pending, now = {pool.submit(_worker_unit, n) for n in numbers}, 0
        try:
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                shown, now = now, counter.value
                bar.update(now - shown)
                for future in done:
                    with _noted(broken):
                        future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


class _Stopped(Exception):
    """Another process has failed."""


def _start_worker(job: Job, tokenizer_path: Path, counter, stop) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and sets `stop`
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def advance(size: int) -> None:
        with counter.get_lock():
            counter.value += size
        if stop.is_set():
            raise _Stopped

    global _worker_unit_arguments
    _worker_unit_arguments = (job, load_tokenizer(tokenizer_path), advance)


def _end_with_parent() -> None:
    """A parent that was killed cannot tell its workers, and they would wait for work forever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _worker_unit(number: int) -> None:
    job, tokenizer, advance = _worker_unit_arguments
    _finish_unit(job, number, tokenizer, advance)
