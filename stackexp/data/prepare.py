"""A folder of text -> a prepared set, in several processes, restartable after a kill.

The source files, in order of their names, are grouped into units of about UNIT_BYTES. A unit is written into a
hidden folder and renamed when it is whole, so a restart does the missing units and nothing twice. The set depends
on the sources, the tokenizer and the context length alone, not on the number of processes or of restarts.
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tqdm import tqdm

from stackexp.data.locking import locked
from stackexp.data.packing import BAD_LINES, merge, read_unit, unit_name, write_unit
from stackexp.data.readers import BadLine, Piece, Source, find_sources, read
from stackexp.data.shards import FORMAT_VERSION, Corpus, TokenSet, write_json, write_text
from stackexp.data.tokenizer import fingerprint, load_tokenizer, train_tokenizer
from stackexp.errors import RunError

UNIT_BYTES = 1 << 24  # of source files; a larger file is a unit of its own
TRAINING_BYTES = 1 << 26  # of text to train a tokenizer on, spread over all source files


@dataclass(frozen=True)
class Job:
    """What every unit needs; sent to the worker processes."""

    folder: Path
    context_length: int
    strict: bool
    units: list[list[Source]]


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
) -> Corpus:
    """Prepare `source` (a folder or a file) in `folder`, or go on where an earlier call was stopped.

    The tokens come from `tokenizer` (a tokenizer.json), or from a new one of `vocab_size` tokens. `workers`: number
    of processes, None for one per CPU. Bad lines are counted, or with `strict` the first one ends the work.
    Raises RunError if there is nothing to read, a file is damaged, the disk is full, or `folder` holds something else.
    """
    assert (tokenizer is None) != (vocab_size is None)
    sources = find_sources(source)
    given = tokenizer and load_tokenizer(tokenizer)
    plan = {
        "format version": FORMAT_VERSION,
        "tokenizer": fingerprint(given) if given else f"trained here, {vocab_size} tokens",
        "context length": context_length,
        "unit bytes": unit_bytes,
        "sources": [[s.name, s.size, s.modified] for s in sources],
    }
    workers = workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "plan.json").exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise RunError(f"{folder}: not empty, and not from data prepare; choose another --to")
        with locked(folder / ".lock", f"the preparation of {folder}"):
            if _finished(folder, plan):
                return TokenSet(folder).corpus
            tokenizer_path = _tokenizer(folder, given, vocab_size, sources)
            job = Job(folder, context_length, strict, _group(sources, unit_bytes))
            _write_units(job, tokenizer_path, workers, progress)
            names = [s.name for s in sources]
            return merge(folder, len(job.units), load_tokenizer(tokenizer_path), context_length, names)
    except OSError as e:
        raise RunError(
            f"{folder}: cannot be written ({e.strerror or e}); make room, then run the same command again: "
            "what is finished is kept"
        ) from e
    except BrokenProcessPool as e:
        raise RunError(
            f"{folder}: a worker process was killed (out of memory?); run the same command with fewer --workers: "
            "what is finished is kept"
        ) from e


def _finished(folder: Path, plan: dict) -> bool:
    """Whether the folder's set is done. A new folder gets the plan; RunError if it holds something else."""
    path = folder / "plan.json"
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        for key, value in plan.items():
            if earlier.get(key) != value:
                change = f"{earlier.get(key)}, not {value}" if key != "sources" else "files have come, gone or changed"
                raise RunError(f"{folder}: made with another {key} ({change}); delete it or choose another --to")
    else:
        write_json(path, plan)
    return (folder / "corpus.json").exists()


def _tokenizer(folder: Path, given: Tokenizer | None, vocab_size: int | None, sources: list[Source]) -> Path:
    """The set's tokenizer.json, trained if none was given. An earlier call's is taken: the plan is the same."""
    path = folder / "tokenizer.json"
    if not path.exists():
        if given is None:
            print(f"training a tokenizer of {vocab_size} tokens", file=sys.stderr, flush=True)
            given = train_tokenizer(_sample(sources), vocab_size)
        write_text(path, given.to_str(pretty=True))
    return path


def _sample(sources: list[Source]) -> Iterator[str]:
    """The beginning of every source, the same number of characters of each."""
    for source in sources:
        left = TRAINING_BYTES // len(sources)
        for piece in read(source):
            if isinstance(piece, Piece):
                yield piece.text
                left -= len(piece.text)
            if left <= 0:
                break


def _group(sources: list[Source], unit_bytes: int) -> list[list[Source]]:
    """Neighbouring sources in groups of at most `unit_bytes`, or one source if that alone is larger."""
    units: list[list[Source]] = []
    size = 0
    for source in sources:
        if not units or size + source.size > unit_bytes:
            units.append([])
            size = 0
        units[-1].append(source)
        size += source.size
    return units


def _write_units(job: Job, tokenizer_path: Path, workers: int, progress: bool) -> None:
    """Write the units that are missing."""
    for leftover in job.folder.glob(".unit.*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    sizes = [sum(source.size for source in unit) for unit in job.units]
    todo = [n for n in range(len(job.units)) if not (job.folder / unit_name(n)).exists()]
    if job.strict:
        for n in set(range(len(job.units))) - set(todo):
            if read_unit(job.folder / unit_name(n)).bad_lines:
                with open(job.folder / unit_name(n) / BAD_LINES, encoding="utf-8") as log:
                    raise RunError(_strict(log.readline().rstrip()))
    total, left = sum(sizes), sum(sizes[n] for n in todo)
    bar = tqdm(total=total, initial=total - left, unit="B", unit_scale=True, desc="tokenising", disable=not progress)
    with bar:
        workers = min(workers, len(todo))
        if workers > 1:
            _in_processes(job, tokenizer_path, todo, workers, bar)
        else:
            tokenizer = load_tokenizer(tokenizer_path)
            for n in todo:
                _write_unit(job, n, tokenizer, bar.update)


def _write_unit(job: Job, number: int, tokenizer: Tokenizer, advance: Callable[[int], object]) -> None:
    final = job.folder / unit_name(number)
    temporary = job.folder / f".{final.name}.{os.getpid()}"
    temporary.mkdir()
    pieces = (piece for source in job.units[number] for piece in _pieces(source, job.strict, advance))
    try:
        write_unit(temporary, pieces, tokenizer, job.context_length)
        if not final.exists():  # it may: the last act of a process whose parent was killed, the same unit
            temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _pieces(source: Source, strict: bool, advance: Callable[[int], object]) -> Iterator[Piece | BadLine]:
    for piece in read(source, advance):
        if strict and isinstance(piece, BadLine):
            raise RunError(_strict(str(piece)))
        yield piece


def _strict(line: str) -> str:
    return f"{line}; mend the line, or leave out --strict to skip it"


def _in_processes(job: Job, tokenizer_path: Path, todo: list[int], workers: int, bar: tqdm) -> None:
    """Share the units out among processes; the first error stops them all."""
    context = multiprocessing.get_context("spawn")
    counter, stop = context.Value("q", 0), context.Event()
    state = (job, tokenizer_path, counter, stop)
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=state) as pool:
        pending, now = {pool.submit(_worker_unit, n) for n in todo}, 0
        try:
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                shown, now = now, counter.value
                bar.update(now - shown)
                for future in done:
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
    _write_unit(job, number, tokenizer, advance)
