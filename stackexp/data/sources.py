"""Find the files of a source folder that `data prepare` reads."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stackexp.errors import RunError

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
JSON_LINES_SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
PARQUET_SUFFIXES = (".parquet",)
COLUMN_SUFFIXES = JSON_LINES_SUFFIXES + PARQUET_SUFFIXES  # files that have columns
TOKEN_SUFFIXES = (".npy", ".bin")
KNOWN_SUFFIXES = TEXT_SUFFIXES + COLUMN_SUFFIXES + TOKEN_SUFFIXES
PREPARED_SET_MARKERS = (
    {"plan.json", ".plan.lock"},
    {"index.json", "corpus.json"},
)  # an unfinished set, a copy


class UnreadableSourceError(RunError):
    """Raised if a source file cannot be read to its end."""


@dataclass(frozen=True)
class Source:
    """An input file."""

    path: str
    name: str  # path relative to the source folder, with slashes
    size: int  # bytes
    modified: int  # nanoseconds

    @property
    def record(self) -> list:
        """Return name, size and modification time of the file, and the last two also of its index from Megatron."""
        record = [self.name, self.size, self.modified]
        if index := find_megatron_index(Path(self.path)):
            record += [index.stat().st_size, index.stat().st_mtime_ns]
        return record

    @property
    def has_tokens(self) -> bool:
        """Return True if the file holds token ids, False if it holds text."""
        return self.name.lower().endswith(TOKEN_SUFFIXES)

    @property
    def is_parquet(self) -> bool:
        """Return True for a parquet file."""
        return self.name.lower().endswith(PARQUET_SUFFIXES)

    @property
    def has_columns(self) -> bool:
        """Return True if the file's documents have columns: JSON Lines and parquet."""
        return self.name.lower().endswith(COLUMN_SUFFIXES)


def find_sources(source: Path) -> list[Source]:
    """Return the readable files of a folder in the order of their names, or the one file given.

    Hidden files, hidden folders and prepared sets are skipped. Raises RunError if there is nothing to read, or if a
    folder or a file with a known suffix cannot be read.
    """
    try:
        if not source.exists():
            raise RunError(f"{source}: no such file or folder; correct the path")
        base = source.parent if source.is_file() else source
        paths = [source] if source.is_file() else list(walk(source))
        paths.sort(key=lambda path: path.relative_to(base).as_posix())
        known = [path for path in paths if path.name.lower().endswith(KNOWN_SUFFIXES)]
        targets: dict[Path, Path] = {}  # links to one file would be read twice
        for path in sorted(known, key=Path.is_symlink):
            targets.setdefault(path.resolve(), path)
        kept = set(targets.values())
        known = [path for path in known if path in kept]
        if not known and not paths and source.is_dir() and any(source.rglob("corpus.json")):
            raise RunError(f"{source}: contains only prepared sets; give the files from which they were prepared")
        if not known:
            found = ", ".join(sorted({path.suffix or path.name for path in paths})[:8]) or "no files"
            raise RunError(f"{source}: nothing to read (found {found}); supported: {' '.join(KNOWN_SUFFIXES)}")
        return [_make_source(path, base) for path in known]
    except OSError as e:
        raise RunError(f"{e.filename}: cannot be read ({e.strerror}); fix that or remove it") from e


def _make_source(path: Path, base: Path) -> Source:
    name = path.relative_to(base).as_posix()
    if name.encode(errors="replace").decode() != name:
        raise RunError(f"{base}: the name of {name!a} is not UTF-8; rename it")
    stat = path.stat()
    return Source(str(path), name, stat.st_size, stat.st_mtime_ns)


def walk(folder: Path) -> Iterator[Path]:
    """Yield files, including dangling links, that are neither hidden nor part of a prepared set.

    Links to folders are followed last, so that each folder is read once. Links to a parent of `folder` are ignored.
    """
    top, visited, starts = folder.resolve(), set(), [folder]
    for start in starts:  # grows by the links that are found
        for root, folders, files in os.walk(start, onerror=_raise):
            real = Path(root).resolve()
            is_prepared = any(names <= set(files) for names in PREPARED_SET_MARKERS)
            if is_prepared or real in visited or real in top.parents:
                folders.clear()
                continue
            visited.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            starts += [Path(root, name) for name in folders if Path(root, name).is_symlink()]
            paths = [Path(root, name) for name in files if not name.startswith(".")]
            yield from (path for path in paths if path.is_file() or not path.exists())


def _raise(error: OSError) -> None:
    raise error


def find_megatron_index(path: Path) -> Path | None:
    """Return the .idx next to a .bin, both in lower or upper case, or None."""
    indexes = [path.with_suffix(suffix) for suffix in (".idx", ".IDX") if path.suffix.lower() == ".bin"]
    return next(filter(Path.is_file, indexes), None)
