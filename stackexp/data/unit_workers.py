"""Write the units of a set in one or several processes."""

import multiprocessing
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from stackexp.data.columns import Columns
from stackexp.data.readers import Advance, BadLine, FilteredOut, Piece, TokenBlock, read_pieces
from stackexp.data.sources import Source, UnreadableSourceError
from stackexp.data.token_files import TokenFile
from stackexp.data.tokenizer import (
    count_token_bytes,
    decodes_exactly,
    get_end_of_text_id,
    get_vocab_size,
    has_exact_bytes,
    load_tokenizer,
)
from stackexp.data.units import BAD_LINES, name_unit, read_unit, write_unit
from stackexp.errors import RunError
from stackexp.progress_bar import open_bar


@dataclass(frozen=True)
class UnitJob:
    """The inputs of all units, which are sent to the worker processes."""

    folder: Path
    tokenizer: Path
    context_length: int
    columns: Columns
    dtype: str | None  # of raw token files
    strict: bool  # stop at the first bad line


def write_units(job: UnitJob, units: Sequence[list[Source]], workers: int) -> None:
    """Write the missing units.

    Unreadable sources do not stop the other units; all are printed, and the last one is raised as RunError at the end.
    If the job is strict, a bad line raises RunError at once.
    """
    unreadable: list[str] = []
    size = sum(source.size for unit in units for source in unit)
    with open_bar(desc="tokenizing", total=size, unit="B", unit_scale=True) as bar:
        if len(units) > 1 and workers > 1:
            _write_in_processes(job, units, min(workers, len(units)), bar, unreadable)
        else:
            writer = UnitWriter(job, bar.update)
            for sources in units:
                with _collect_unreadable(unreadable):
                    writer.finish(sources)
    if unreadable:
        *others, last = sorted(unreadable)
        for message in others:
            print(f"error: {message}", file=sys.stderr)
        raise RunError(last)


class UnitWriter:
    """A writer of single units. `advance` is called with the number of source bytes that have been processed."""

    def __init__(self, job: UnitJob, advance: Advance) -> None:
        self.job, self.advance = job, advance
        self.tokenizer = load_tokenizer(job.tokenizer)

    def finish(self, sources: list[Source]) -> None:
        """Write a unit unless it exists. Raises RunError for a bad line if the job is strict."""
        folder = self.job.folder / name_unit(sources)
        if folder.exists():
            unit = read_unit(folder)
            if unit.sources == [source.record for source in sources]:
                if self.job.strict and unit.bad_lines:
                    with open(folder / BAD_LINES, encoding="utf-8") as log:
                        raise _strict_error(log.readline().rstrip())
                self.advance(sum(source.size for source in sources))
                return
            outdated = folder.rename(folder.with_name(f".{folder.name}.outdated"))
            shutil.rmtree(outdated)  # a kill while files are deleted must not leave half a unit
        self._write(sources, folder)

    def _write(self, sources: list[Source], folder: Path) -> None:
        """Write a unit. If another process of the same part finishes it first, that one is kept."""
        temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        temporary.mkdir()
        try:
            items = (item for source in sources for item in self._read(source))
            write_unit(temporary, items, self.tokenizer, self.job.context_length, sources)
            try:
                temporary.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _read(self, source: Source) -> Iterator[Piece | TokenBlock | BadLine | FilteredOut]:
        if source.has_tokens:
            yield from self._read_tokens(source)
            return
        for item in read_pieces(source, self.job.columns, self.advance):
            if self.job.strict and isinstance(item, BadLine):
                raise _strict_error(str(item))
            yield item

    def _read_tokens(self, source: Source) -> Iterator[TokenBlock]:
        """Yield the ids of a token file in order, adding end-of-text if it does not end with it."""
        end, vocab_size = get_end_of_text_id(self.tokenizer), get_vocab_size(self.tokenizer)
        text_bytes, documents, last = count_token_bytes(self.tokenizer), 0, end
        file = TokenFile(source.path, dtype=self.job.dtype, vocab_size=vocab_size)
        for ids in file.read_blocks(vocab_size):
            if not documents and not has_exact_bytes(self.tokenizer) and not decodes_exactly(self.tokenizer, ids):
                text_bytes = np.zeros_like(text_bytes)  # unknown without the text
            ends = int((ids == end).sum())
            yield TokenBlock(ids, ends, int(text_bytes[ids].sum()))
            documents, last = documents + ends, ids[-1]
            self.advance(ids.nbytes)
        if last != end:
            yield TokenBlock(np.array([end]), 1, 0)
        if not documents:
            message = f"{source.path}: contains no end-of-text (id {end}), so it is read as one document"
            print(message, file=sys.stderr, flush=True)


def _strict_error(line: str) -> RunError:
    return RunError(f"{line}; fix the line, or remove --strict to skip it")


@contextmanager
def _collect_unreadable(messages: list[str]) -> Iterator[None]:
    try:
        yield
    except UnreadableSourceError as error:
        messages.append(str(error))


# Processes

_writer: UnitWriter  # set in worker processes


def _write_in_processes(
    job: UnitJob, units: Sequence[list[Source]], workers: int, bar: tqdm, unreadable: list[str]
) -> None:
    """Distribute the units among processes. The first error, except an unreadable source, stops all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["streaming"])  # whose import takes seconds
    counter = context.Value("q", 0)  # bytes done
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(job, counter)) as pool:
        pending, shown = {pool.submit(_finish_unit, sources) for sources in units}, 0
        try:
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                count = counter.value
                bar.update(count - shown)
                shown = count
                for future in done:
                    with _collect_unreadable(unreadable):
                        future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _start_worker(job: UnitJob, counter: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already use all CPUs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, daemon=True).start()

    def advance(size: int) -> None:
        with counter.get_lock():
            counter.value += size

    global _writer
    _writer = UnitWriter(job, advance)


def _exit_with_parent() -> None:
    """Exit when the parent process ends; otherwise the worker would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _finish_unit(sources: list[Source]) -> None:
    _writer.finish(sources)
