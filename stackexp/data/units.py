"""Units of work: the folders `unit.<hash of the file names>` from which a prepared set is merged.

A unit holds the sequences of its documents as MDS shards with an index.json. Its unit.json has its counts and its tail:
the last tokens, which do not fill a sequence. The merge packs the tails of all units together. A unit folder gets its
final name when it is complete, so a unit that exists is complete.
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from stackexp.data.packing import BestFitPacker, Packing
from stackexp.data.readers import Advance, BadLine, Columns, FilteredOut, Piece, TokenBlock, read_pieces
from stackexp.data.shards import SHARD_BYTES, Corpus, choose_token_dtype, describe_columns
from stackexp.data.sources import Source, UnreadableSourceError
from stackexp.data.token_files import TokenFile
from stackexp.data.tokenizer import (
    compute_fingerprint,
    count_token_bytes,
    decodes_exactly,
    get_end_of_text_id,
    get_vocab_size,
    has_exact_bytes,
    load_tokenizer,
    tokenize_pieces,
)
from stackexp.errors import RunError
from stackexp.files import (
    build_record,
    create_folder_atomically,
    hash_values,
    read_json,
    sync_file,
    sync_folder,
    write_atomically,
    write_json,
)
from stackexp.terminal import open_bar

BAD_LINES = "bad_lines.log"  # lines "file:line: reason", in each unit and in the merged set
RECORD = "unit.json"
COUNTS = ("documents", "bad_lines", "filtered_documents", "cut_documents", "cut_by_concatenation")  # of units and sets
TAILS = "tails"  # folder of the sequences packed from the tails of the units


@dataclass
class Unit:
    """The contents of unit.json."""

    documents: int = 0
    tokens: int = 0
    bytes: int | None = 0  # None: unknown
    bad_lines: int = 0
    filtered_documents: int = 0
    cut_documents: int = 0  # see `Corpus`
    cut_by_concatenation: int = 0
    tail: list[int] = field(default_factory=list)  # the last tokens, fewer than a sequence
    tokenizer: str = ""  # fingerprint
    sources: list[list] = field(default_factory=list)  # name, size, modification time (ns)


def name_unit(sources: Sequence[Source]) -> str:
    """Return the folder name of a unit, which depends on the names and sizes of its files."""
    return f"unit.{hash_values([[source.name, source.size] for source in sources])[:12]}"


def read_unit(folder: Path) -> Unit:
    """Read unit.json. Raises RunError if it is missing or corrupt."""
    try:
        return build_record(Unit, read_json(folder / RECORD))
    except (OSError, RunError, TypeError) as error:
        raise RunError(f"{folder / RECORD}: missing or corrupt; delete {folder} and prepare it again") from error


class SequenceWriter:
    """A writer that cuts a stream of tokens into sequences and writes them to `folder` as MDS shards."""

    def __init__(self, folder: Path, context_length: int, dtype: np.dtype) -> None:
        from streaming import MDSWriter  # importing it takes seconds

        (encoding,), size = describe_columns(dtype, context_length)["column_encodings"], context_length * dtype.itemsize
        self.context_length, self.dtype = context_length, dtype
        self._rest = np.empty(0, dtype)
        limit = SHARD_BYTES if 2 * size <= SHARD_BYTES else 2 * size
        self._writer = MDSWriter(
            columns={"tokens": encoding}, out=str(folder.absolute()), hashes=["sha256"], size_limit=limit
        )

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens [N]."""
        tokens = np.concatenate([self._rest, tokens.astype(self.dtype, copy=False)])
        whole = len(tokens) - len(tokens) % self.context_length
        for sequence in tokens[:whole].reshape(-1, self.context_length):
            self._writer.write({"tokens": sequence})
        self._rest = tokens[whole:]

    def close(self) -> np.ndarray:
        """Write the last shard and index.json, and return the remaining tokens, fewer than context_length."""
        self._writer.finish()
        return self._rest


def write_unit(
    folder: Path,
    items: Iterable[Piece | TokenBlock | BadLine | FilteredOut],
    tokenizer: Tokenizer,
    context_length: int,
    sources: Sequence[Source] = (),
    packing: Packing = "concatenate",
) -> Unit:
    """Write documents, or the ids of token files, to `folder`, which is empty, as a unit."""
    unit = Unit(tokenizer=compute_fingerprint(tokenizer), sources=[source.record for source in sources])
    writer = SequenceWriter(folder, context_length, choose_token_dtype(get_vocab_size(tokenizer)))
    packer = BestFitPacker(writer.write, context_length, get_end_of_text_id(tokenizer))
    documents: Any = _count_others(items, unit, folder / BAD_LINES)
    has_tokens = any(source.has_tokens for source in sources)  # then all have
    for block in documents if has_tokens else tokenize_pieces(documents, tokenizer):
        (packer if packing == "best_fit" else writer).write(block.ids)
        unit.documents += block.documents
        unit.bytes = None if unit.bytes is None or not block.has_known_bytes else unit.bytes + block.bytes
        unit.tokens += len(block.ids)
    rest = packer.close()
    unit.tail = [*rest.tolist(), *writer.close().tolist()]  # one of them is empty
    unit.cut_documents, unit.cut_by_concatenation = packer.cut, packer.cut_by_concatenation
    write_json(folder / RECORD, asdict(unit), indent=0)
    _sync_files(folder)
    return unit


def _sync_files(folder: Path) -> None:
    """Wait until the files of a folder are on disk."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def _count_others(
    items: Iterable[Piece | TokenBlock | BadLine | FilteredOut], unit: Unit, path: Path
) -> Iterator[Piece | TokenBlock]:
    """Yield the documents. Count the others; bad lines are also written to the log."""
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as log:
        for item in items:
            if isinstance(item, BadLine):
                log.write(f"{item}\n")
                unit.bad_lines += 1
            elif isinstance(item, FilteredOut):
                unit.filtered_documents += 1
            else:
                yield item


# Write the units in one or several processes


@dataclass(frozen=True)
class UnitJob:
    """The inputs of all units, which are sent to the worker processes."""

    folder: Path
    tokenizer: Path
    context_length: int
    columns: Columns
    dtype: str | None  # of raw token files
    strict: bool  # stop at the first bad line
    packing: Packing


def write_units(job: UnitJob, units: Sequence[list[Source]], workers: int) -> None:
    """Write the missing units.

    Unreadable sources do not stop the other units; all are printed, and the last one is raised as RunError at the end.
    If the job is strict, a bad line raises RunError at once.
    """
    size = sum(source.size for unit in units for source in unit)
    with open_bar(desc="tokenizing", total=size, unit="B", unit_scale=True) as bar:
        if len(units) > 1 and workers > 1:
            messages = _finish_in_processes(job, units, min(workers, len(units)), bar)
        else:
            messages = [_finish_unit(job, sources, bar.update) for sources in units]
    if unreadable := sorted(filter(None, messages)):
        *others, last = unreadable
        for message in others:
            print(f"error: {message}", file=sys.stderr)
        raise RunError(last)


def _finish_unit(job: UnitJob, sources: list[Source], advance: Advance) -> str:
    """Write a unit unless it exists. Return the error if a source is unreadable, otherwise an empty text.

    If another process of the same part finishes the unit first, that one is kept. Raises RunError for a bad line if the
    job is strict.
    """
    folder = job.folder / name_unit(sources)
    if folder.exists():
        unit = read_unit(folder)
        if unit.sources == [source.record for source in sources]:
            if job.strict and unit.bad_lines:
                with open(folder / BAD_LINES, encoding="utf-8") as log:
                    raise _strict_error(log.readline().rstrip())
            advance(sum(source.size for source in sources))
            return ""
        outdated = folder.rename(folder.with_name(f".{folder.name}.outdated"))
        shutil.rmtree(outdated)  # a kill while files are deleted must not leave half a unit
    tokenizer = load_tokenizer(job.tokenizer)
    items = (item for source in sources for item in _read(job, source, tokenizer, advance))
    try:
        with create_folder_atomically(folder) as temporary:
            write_unit(temporary, items, tokenizer, job.context_length, sources, job.packing)
    except UnreadableSourceError as error:
        return str(error)
    except OSError:
        if not folder.exists():
            raise
    return ""


def _read(
    job: UnitJob, source: Source, tokenizer: Tokenizer, advance: Advance
) -> Iterator[Piece | TokenBlock | BadLine | FilteredOut]:
    if source.has_tokens:
        yield from _read_tokens(job, source, tokenizer, advance)
        return
    for item in read_pieces(source, job.columns, advance):
        if job.strict and isinstance(item, BadLine):
            raise _strict_error(str(item))
        yield item


def _read_tokens(job: UnitJob, source: Source, tokenizer: Tokenizer, advance: Advance) -> Iterator[TokenBlock]:
    """Yield the ids of a token file in order, adding end-of-text if it does not end with it."""
    end, vocab_size = get_end_of_text_id(tokenizer), get_vocab_size(tokenizer)
    text_bytes, has_known_bytes, documents, last = count_token_bytes(tokenizer), True, 0, end
    for ids in TokenFile(source.path, dtype=job.dtype, vocab_size=vocab_size).read_blocks(vocab_size, end=end):
        if not documents and not has_exact_bytes(tokenizer) and not decodes_exactly(tokenizer, ids):
            has_known_bytes = False  # they are those of the text
        ends = int((ids == end).sum())
        yield TokenBlock(ids, ends, int(text_bytes[ids].sum()), has_known_bytes)
        documents, last = documents + ends, ids[-1]
        advance(ids.nbytes)
    if last != end:
        yield TokenBlock(np.array([end]), 1, 0)
    if not documents:
        message = f"{source.path}: contains no end-of-text (id {end}), so it is read as one document"
        print(message, file=sys.stderr, flush=True)


def _strict_error(line: str) -> RunError:
    return RunError(f"{line}; fix the line, or remove --strict to skip it")


# Processes

_counter: Any  # source bytes that all processes have read; set in worker processes


def _finish_in_processes(job: UnitJob, units: Sequence[list[Source]], workers: int, bar: tqdm) -> list[str]:
    """Distribute the units among processes, and return the results of `_finish_unit`. The first error stops all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["streaming"])  # whose import takes seconds
    counter = context.Value("q", 0)
    others, messages = set(multiprocessing.active_children()), []
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(counter,)) as pool:
        pending = {pool.submit(_finish_unit, job, sources, _count_bytes) for sources in units}
        try:
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                bar.update(counter.value - bar.n)
                messages += [future.result() for future in done]
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            if not isinstance(error, BrokenProcessPool):
                raise
            cause = "a worker process was killed, maybe because memory ran out"
            remedy = "lower --workers, then run the same command again: finished units are kept"
            raise RunError(f"{job.folder}: {cause}; {remedy}") from error
    return messages


def _start_worker(counter: Any) -> None:
    global _counter
    _counter = counter
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already use all CPUs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _count_bytes(size: int) -> None:
    with _counter.get_lock():
        _counter.value += size


def _exit_with_parent() -> None:
    """Exit when the parent process ends; otherwise the worker would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


# Merge


def merge_units(
    folder: Path, names: list[str], tokenizer: Tokenizer, context_length: int, sources: list[str]
) -> Corpus:
    """Merge the units `names` in `folder` into one prepared set.

    corpus.json is written last: its presence marks the set as complete. The tails of all units are packed together;
    tokens that do not fill a sequence are dropped. Raises RunError if there is less than one sequence, or if a
    unit was made with another tokenizer.
    """
    units = [read_unit(folder / name) for name in names]
    fingerprint, vocab_size = compute_fingerprint(tokenizer), get_vocab_size(tokenizer)
    for name, unit in zip(names, units, strict=True):
        if unit.tokenizer != fingerprint:
            remedy = f"restore that one, or delete {folder} and prepare it again"
            raise RunError(f"{folder}/tokenizer.json: not the tokenizer of {name}; {remedy}")
    shutil.rmtree(folder / TAILS, ignore_errors=True)  # left by a killed merge
    writer = SequenceWriter(folder / TAILS, context_length, choose_token_dtype(vocab_size))
    for unit in units:
        writer.write(np.array(unit.tail, writer.dtype))
    dropped, tokens = len(writer.close()), sum(unit.tokens for unit in units)
    _sync_files(folder / TAILS)
    sizes = [unit.bytes for unit in units if unit.bytes is not None]
    corpus = Corpus(
        tokenizer=fingerprint,
        vocab_size=vocab_size,
        context_length=context_length,
        tokens=tokens,
        bytes=sum(sizes) if len(sizes) == len(units) else 0,
        sequences=(tokens - dropped) // context_length,
        dropped_tokens=dropped,
        sources=sources,
        **{name: sum(getattr(unit, name) for unit in units) for name in COUNTS},
    )
    with open(folder / BAD_LINES, "wb") as log:
        for name in names:
            with open(folder / name / BAD_LINES, "rb") as unit_log:
                shutil.copyfileobj(unit_log, log)
        sync_file(log)
    if not corpus.sequences:
        raise RunError(f"{folder}: {_explain_empty(corpus, folder / BAD_LINES)}")
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    shards = [shard for name in [*names, TAILS] for shard in _read_shards(folder / name)]
    write_atomically(folder / "index.json", json.dumps({"version": 2, "shards": shards}, sort_keys=True))
    write_json(folder / "corpus.json", asdict(corpus), indent=1)
    return corpus


def _explain_empty(corpus: Corpus, log: Path) -> str:
    """Return why a set has no sequence, and what to do."""
    if corpus.bad_lines and not corpus.documents:
        with open(log, encoding="utf-8") as file:
            first = file.readline().rstrip()
        advice = f"correct the files, --text-column or --filter; {log} has all reasons"
        return f"no documents, but {corpus.bad_lines:,} bad lines, the first: {first}; {advice}"
    others = f"{corpus.bad_lines} bad lines"
    if corpus.filtered_documents:
        others = f"{corpus.filtered_documents:,} more filtered out, {others}"
    found = f"{corpus.tokens} tokens in {corpus.documents} documents ({others})"
    return f"{found} do not fill one sequence of {corpus.context_length}; add text or lower the context length"


def _read_shards(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a unit's index.json, with paths relative to the set. Raises RunError if it is corrupt."""
    path = folder / "index.json"
    try:
        shards = read_json(path)["shards"]
        for shard in shards:
            shard["raw_data"]["basename"] = f"{folder.name}/{shard['raw_data']['basename']}"
    except (OSError, RunError, KeyError, TypeError) as error:
        raise RunError(f"{path}: missing or corrupt; delete {folder} and prepare it again") from error
    return shards


def write_documents(folder: Path, texts: Iterable[str], tokenizer: Tokenizer, context_length: int) -> Corpus:
    """Write a few documents as a prepared set of one unit. `folder` must not exist."""
    name = "unit.00000"
    (folder / name).mkdir(parents=True)
    write_unit(folder / name, (Piece(text, True) for text in texts), tokenizer, context_length)
    return merge_units(folder, [name], tokenizer, context_length, [])
