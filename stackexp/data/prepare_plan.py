"""The plan of a prepared set: its inputs, and the check that a folder belongs to the same inputs."""

import errno
import sys
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stackexp.data.shards import FORMAT_VERSION
from stackexp.data.sources import Source, find_sources
from stackexp.data.token_sources import check_token_sources, have_tokens
from stackexp.data.tokenizer import compute_fingerprint, load_tokenizer
from stackexp.data.units import renumber_units
from stackexp.errors import RunError
from stackexp.files import hold_lock, read_json, write_json

UNIT_BYTES = 1 << 24  # source bytes per unit; a larger file is a unit by itself
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Plan:
    """The inputs that determine a prepared set.

    Give either `tokenizer`, the path of a tokenizer.json, or the `vocab_size` of a tokenizer to train on the sources.
    """

    source: Path  # file or folder
    tokenizer: Path | None = None
    vocab_size: int | None = None
    context_length: int = 2048
    unit_bytes: int = UNIT_BYTES

    def __post_init__(self) -> None:
        assert (self.tokenizer is None) != (self.vocab_size is None)

    @cached_property
    def sources(self) -> list[Source]:
        """The files to read. Raises RunError if there are none, or token files do not fit the tokenizer."""
        sources = find_sources(self.source)
        if have_tokens(sources, self.source):
            check_token_sources(sources, self.tokenizer)
        return sources

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
        trained = f"trained here, {self.vocab_size} tokens"
        return {
            "format version": FORMAT_VERSION,
            "tokenizer": compute_fingerprint(load_tokenizer(self.tokenizer)) if self.tokenizer else trained,
            "context length": self.context_length,
            "unit bytes": self.unit_bytes,
            "sources": [source.record for source in self.sources],
        }


def start_set(plan: Plan, folder: Path) -> None:
    """Write the plan into a new folder, or check it against the plan of an existing one.

    The sources of an unfinished set may change: units of other sources are deleted. Raises RunError if the folder has
    other contents, or a set with another plan.
    """
    record = plan.record()
    with explain_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        if names and "plan.json" not in names:
            raise RunError(f"{folder}: not empty, and not written by data prepare; choose another --to")
        with hold_lock(folder / ".plan.lock", f"the start of {folder}"):
            changed = compare_plan(record, folder)
        if changed:
            with hold_lock(folder / ".lock", f"the preparation of {folder}"):
                renumber_units(folder, plan.units)
                write_json(folder / "plan.json", record, indent=1)
            print(
                f"{folder}: sources have changed ({list_names(changed)}); their units are prepared again",
                file=sys.stderr,
            )


def compare_plan(record: dict, folder: Path) -> list[str]:
    """Return the names of the sources that differ from the folder's plan.json, which is written if it is missing.

    Raises RunError if anything else differs, or if the set is finished and its sources differ.
    """
    path = folder / "plan.json"
    if not path.exists():
        write_json(path, record, indent=1)
    earlier = read_json(path)
    differences = set(map(tuple, earlier.get("sources", []))) ^ set(map(tuple, record["sources"]))
    changed = sorted({name for name, *_ in differences})
    remedy = "delete the folder or choose another --to"
    for key, value in record.items():
        if key != "sources" and earlier.get(key) != value:
            raise RunError(f"{folder}: prepared with another {key} ({earlier.get(key)}, not {value}); {remedy}")
    if changed and (folder / "corpus.json").exists():
        names = list_names(changed)
        raise RunError(f"{folder}: prepared from other sources (added, removed or changed: {names}); {remedy}")
    return changed


def list_names(names: list[str]) -> str:
    """Return the first name and the number of the others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


@contextmanager
def explain_errors(folder: Path) -> Iterator[None]:
    """Turn a refused write or a killed worker process into a RunError with a remedy."""
    resume = "then run the same command again: finished units are kept"
    try:
        yield
    except OSError as e:
        remedy = "free some space" if e.errno in DISK_FULL else "fix that"
        raise RunError(f"{folder}: cannot be written ({e.strerror or e}); {remedy}, {resume}") from e
    except BrokenProcessPool as e:
        cause = "a worker process was killed, maybe because memory ran out"
        raise RunError(f"{folder}: {cause}; lower --workers, {resume}") from e
