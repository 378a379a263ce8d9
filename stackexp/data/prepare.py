"""Prepare a set of token shards from text or token files.

The source files, in the order of their names, are grouped into units. A unit is written to a hidden folder that is
renamed when complete, so a restart after a kill writes only the missing units. The result depends on the plan alone:
not on the number of processes, parts or restarts.

A part writes every n-th unit. Parts share the lock of the folder and lock each unit that they write. The merge holds
the folder's lock alone, and verifies the units that others have written.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from stackexp.data.packing import merge_units
from stackexp.data.prepare_plan import Plan, compare_plan, explain_errors, list_names, start_set
from stackexp.data.readers import Piece, read_pieces
from stackexp.data.shards import Corpus, TokenSet
from stackexp.data.sources import Source
from stackexp.data.tokenizer import compute_fingerprint, load_tokenizer, train_tokenizer
from stackexp.data.unit_workers import UnitJob, write_units
from stackexp.errors import RunError
from stackexp.files import hold_lock, write_atomically

TRAINING_BYTES = 1 << 26  # of text to train a tokenizer on, spread evenly over the source files


def prepare(
    plan: Plan,
    folder: Path,
    *,
    workers: int | None = None,
    strict: bool = False,
    part: tuple[int, int] | None = None,
    show_progress: bool = True,
) -> Corpus | None:
    """Prepare a set in `folder`, or continue an earlier call that was stopped.

    `workers` is the number of processes (default: one per CPU). Bad lines are counted and logged; with `strict` the
    first one stops the work. With `part` (i, n), only part i of n is written, counted from 1, maybe while others write
    theirs, and nothing is returned; a call without it writes what is missing and merges. Raises RunError if there is
    nothing to read, a file is damaged, the disk is full, or the folder has other contents.
    """
    start_set(plan, folder)
    is_part = part is not None
    with explain_errors(folder), hold_lock(folder / ".lock", f"the preparation of {folder}", shared=is_part):
        if changed := compare_plan(plan.record(), folder):  # while this process waited for the lock
            raise RunError(f"{folder}: sources have changed again ({list_names(changed)}); run the same command again")
        if is_part and (folder / "corpus.json").exists():
            return None
        if not is_part and (finished := _load_finished(folder)):
            return finished
        tokenizer = _write_tokenizer(plan, folder)
        job = UnitJob(folder, tokenizer, plan.context_length, plan.units, strict=strict, verify=not is_part)
        first, step = (part[0] - 1, part[1]) if part else (0, 1)
        write_units(job, range(first, len(plan.units), step), workers or _count_cpus(), show_progress)
        if is_part:
            return None
        names = [source.name for source in plan.sources]
        return merge_units(folder, len(plan.units), load_tokenizer(tokenizer), plan.context_length, names)


def _count_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _load_finished(folder: Path) -> Corpus | None:
    """Return the finished set, if there is one. A damaged set is reopened: its units are verified and merged again."""
    if not (folder / "corpus.json").exists():
        return None
    try:
        return TokenSet(folder).corpus
    except RunError as error:
        print(f"damaged, repairing it: {error}", file=sys.stderr, flush=True)
        (folder / "corpus.json").unlink()
        return None


def _write_tokenizer(plan: Plan, folder: Path) -> Path:
    """Return the path of the set's tokenizer.json, written by the first call: trained if none was given."""
    path = folder / "tokenizer.json"
    given = load_tokenizer(plan.tokenizer) if plan.tokenizer else None
    with hold_lock(folder / ".plan.lock", f"the tokenizer of {folder}"):  # parts may run at the same time
        if path.exists():
            if given and compute_fingerprint(load_tokenizer(path)) != compute_fingerprint(given):
                raise RunError(f"{path}: differs from {plan.tokenizer}; delete it and run the same command again")
        elif given:
            write_atomically(path, given.to_str(pretty=True))
        else:
            assert plan.vocab_size is not None
            print(f"training a tokenizer of {plan.vocab_size} tokens", file=sys.stderr, flush=True)
            trained = train_tokenizer(sample_texts(plan.sources), plan.vocab_size)
            write_atomically(path, trained.to_str(pretty=True))
    return path


def sample_texts(sources: list[Source]) -> Iterator[str]:
    """Yield the beginning of every source, the same number of characters of each."""
    for source in sources:
        left = TRAINING_BYTES // len(sources)
        for piece in read_pieces(source):
            if isinstance(piece, Piece):
                yield piece.text[:left]
                left -= len(piece.text)
            if left <= 0:
                break
