"""Verification of data files against their recorded SHA-256 on first use.

A verified file leaves an empty mark in the cache, named after its path, size, times and hash. It is hashed again only
if one of these changes. The first use costs about 1 second per GB.
"""

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stackexp.errors import RunError
from stackexp.files import compute_sha256, get_cache_root


class DamagedFileError(RunError):
    """Raised if the contents of a data file differ from its record."""


def verify_file(path: Path, sha256: str | None) -> None:
    """Raise DamagedFileError if the file does not have the hash `sha256`; None (no record) passes.

    Raises FileNotFoundError if the file is missing.
    """
    if sha256 is None:
        return
    status = path.stat()
    key = f"{path.resolve()}\n{status.st_size} {status.st_mtime_ns} {status.st_ino}\n{sha256}"
    mark = get_cache_root() / "verified" / hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    if mark.exists():
        return
    if compute_sha256(path) != sha256:
        raise DamagedFileError(
            f"{path}: damaged, its SHA-256 is not the recorded one; copy, fetch or prepare the file again"
        )
    with contextlib.suppress(OSError):  # without a cache, every process hashes the file
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def check_basename(folder: Path, name: object) -> Path:
    """Return the path of the file `name` of an index.json. Raises RunError if it is outside of `folder`."""
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise RunError(f"{folder}/index.json: the shard name {name!r} is outside the folder; prepare the set again")
    return folder / name


def find_damage(path: Path, entry: Mapping[str, Any]) -> str | None:
    """Return how a file differs from its entry in index.json, or None. The entry may lack `bytes` and `hashes`."""
    try:
        size = path.stat().st_size
        if size != (expected := entry.get("bytes", size)):
            return f"{'cut short' if size < expected else 'too long'}: {size:,} bytes, expected {expected:,}"
        for algorithm, digest in (entry.get("hashes") or {}).items():
            if _compute_hash(path, algorithm) != digest:
                return f"corrupt: the {algorithm.upper()} differs from the record"
    except OSError as error:
        return "missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
    return None


def _compute_hash(path: Path, algorithm: str) -> str:
    """Return a hash of hashlib, or one of the other algorithms of mosaicml-streaming."""
    if algorithm in hashlib.algorithms_available:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, algorithm).hexdigest()
    from streaming.base.hashing import get_hash

    return get_hash(algorithm, path.read_bytes())
