"""File primitives: atomic writes, JSON and JSON Lines files, file locks, hashes. Imports nothing heavy."""

import fcntl
import hashlib
import io
import json
import math
import os
import re
import secrets
import shutil
import stat
import sys
import typing
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from stackexp.errors import RunError

T = TypeVar("T")

WRITE_REMEDY = "free space or choose another --to, then rerun the command to resume"
CACHE_REMEDY = "free space or set STACKEXP_CACHE to another folder"


def open_regular(path: Path, mode: str = "r") -> IO[Any]:
    """Open a file for reading, or with "r+" or "a+" also for writing. A missing file is created by "a+" only.

    Raises RunError for a pipe or a device, which could block forever, and OSError if the file cannot be opened.
    """

    def open_without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK, 0o666)

    encoding = None if "b" in mode else "utf-8"
    try:
        file = open(path, mode, encoding=encoding, opener=open_without_waiting)  # noqa: SIM115
    except io.UnsupportedOperation:  # a pipe cannot be opened for appending
        raise RunError(f"{path}: not a regular file; replace it by one") from None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise RunError(f"{path}: not a regular file; replace it by one")


def make_temporary_path(path: Path) -> Path:
    """Return a hidden name in the folder of `path` that no other process uses."""
    return path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}")


def list_temporary_names(path: Path) -> set[str]:
    """Return the names of the temporary files of `path`, as a killed process leaves them."""
    pattern = re.escape(f".{path.name[:200]}.") + "[0-9a-f]{12}"
    return {other.name for other in path.parent.iterdir() if re.fullmatch(pattern, other.name)}


@contextmanager
def open_atomically(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file that replaces `path` when the context ends without an error.

    The contents are on disk before the rename, so a crash leaves either the old file or the complete new one.
    """
    temporary = make_temporary_path(path)
    file = open(temporary, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8")  # noqa: SIM115
    try:
        with file:
            yield file
            sync_file(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def create_folder_atomically(path: Path) -> Iterator[Path]:
    """Create a temporary folder that becomes `path` when the context ends without an error, or else is deleted.

    Raises OSError if `path` is a file or a folder with files.
    """
    temporary = make_temporary_path(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path`. A crash leaves either the old file or the complete new one."""
    with open_atomically(path) as file:
        file.write(text)


@contextmanager
def explain_failed_writes(path: Path, remedy: str) -> Iterator[None]:
    """Convert an OSError of code that writes to `path` into a RunError with a remedy."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{error.filename or path}: cannot be written ({error.strerror or error}); {remedy}") from error


def sync_file(file: IO[Any]) -> None:
    """Wait until the contents of an open file are on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until a folder's new, renamed and deleted files are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's contents in hexadecimal."""
    with open_regular(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # a binary file


def hash_values(values: Any) -> str:
    """Return the SHA-256 of values that JSON can represent."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def get_cache_root() -> Path:
    """Return $STACKEXP_CACHE, $XDG_CACHE_HOME/stackexp or ~/.cache/stackexp, the first that is set."""
    if root := os.environ.get("STACKEXP_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "stackexp")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises RunError if it is not valid JSON or not a regular file, OSError if it is missing."""
    try:
        with open_regular(path) as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: not valid JSON: {error}") from error


def build_record(kind: type[T], contents: Any) -> T:
    """Build a dataclass of text, counts and lists from the contents of a JSON file.

    Raises TypeError if a field is missing, unknown or of another type, or a count is negative.
    """
    record = kind(**contents)
    for name, hint in typing.get_type_hints(kind).items():
        if not _has_type(value := getattr(record, name), hint):
            raise TypeError(f"{name} is {value!r:.60}")
    return record


def _has_type(value: Any, hint: Any) -> bool:
    if types := typing.get_args(hint):
        if typing.get_origin(hint) is list:
            return type(value) is list and all(_has_type(item, types[0]) for item in value)
        return any(_has_type(value, item) for item in types)
    return type(value) is hint and (hint is not int or value >= 0)


def write_json(path: Path, value: Any, *, indent: int = 2) -> None:
    """Write a JSON file atomically; infinity and NaN in nested dicts and lists become null."""
    value = replace_non_finite(value, in_lists=True)
    write_atomically(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def write_hashed_json(path: Path, contents: dict[str, Any]) -> None:
    """Write a JSON file atomically, with a SHA-256 of its contents by which `read_hashed_json` detects any change.

    Infinity and NaN become null in nested dicts, but not in lists: readers of benchmarks.json expect NaN there.
    """
    contents = replace_non_finite(contents)
    contents |= {"sha256": hash_values(contents)}
    write_atomically(path, json.dumps(contents, indent=2, ensure_ascii=False) + "\n")


def read_hashed_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read the contents of a file that `write_hashed_json` wrote.

    Raises RunError, which ends with what to do, if the file has changed since; OSError if it is missing.
    """
    contents = read_json(path)
    recorded = contents.pop("sha256", None) if isinstance(contents, dict) else None
    if recorded is None or recorded != hash_values(replace_non_finite(contents)):
        raise RunError(f"{path}: not as it was written: its sha256 is wrong or missing; {remedy}")
    return contents


def replace_non_finite(value: Any, in_lists: bool = False) -> Any:
    """Replace infinity and NaN, which JSON does not have, by None in nested dicts, and on request in lists."""
    if isinstance(value, dict):
        return {key: replace_non_finite(item, in_lists) for key, item in value.items()}
    if isinstance(value, list) and in_lists:
        return [replace_non_finite(item, in_lists) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json_lines(
    path: Path, *, skip_damaged: bool = False, last_bytes: int | None = None, is_log: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file; nothing if the file is missing.

    A last line without a line feed is skipped in a log, where a kill has cut it off, but not in a user's file. Raises
    RunError for any other line that is not valid JSON, unless `skip_damaged` is set. With `last_bytes`, only the
    complete lines in that many bytes at the end are read, and errors count lines from there.
    """
    if not path.exists():
        return
    with open_regular(path, "rb") as file:
        if last_bytes is not None and file.seek(0, os.SEEK_END) > last_bytes:
            file.seek(-last_bytes, os.SEEK_END)
            file.readline()
        else:
            file.seek(0)
        for number, line in enumerate(file, 1):
            if not line.strip() or (is_log and not line.endswith(b"\n")):
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                yield value
            elif not skip_damaged:
                raise RunError(f"{path}: line {number} is damaged; delete the line")


def write_json_lines(path: Path, objects: Iterable[dict[str, Any]]) -> None:
    """Write a JSON Lines file atomically. `objects` may be read from the file that it replaces."""
    with open_atomically(path) as file:
        file.writelines(json.dumps(value, ensure_ascii=False) + "\n" for value in objects)


def append_json_line(path: Path, value: dict[str, Any]) -> None:
    """Append one object to a JSON Lines file and wait until it is on disk. Concurrent processes may append.

    If a kill has cut off the last line, the object starts on a new line; read such a file with `skip_damaged`.
    """
    line = json.dumps(value, ensure_ascii=False) + "\n"
    with open(path, "ab+", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed: a failed write is undone
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            line = "\n" + line
        data = line.encode()
        try:
            while data:  # an almost full disk takes only a part, without an error
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise
        os.fsync(file.fileno())


# Locks. The operating system releases them when the process that holds them ends, even after a kill.

_locked_files: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def try_lock(path: Path, *, shared: bool = False) -> IO[str] | None:
    """Lock the file `path`, created if missing, and return it open for reading and appending.

    Close the file to release the lock. Returns None if another process holds a conflicting lock. Shared locks conflict
    with exclusive locks only. Forked child processes do not hold the lock.
    """
    return _lock(path, shared, fcntl.LOCK_NB)


@contextmanager
def hold_lock(path: Path, purpose: str, *, shared: bool = False) -> Iterator[None]:
    """Wait for other processes, then hold the lock of `try_lock` within the context.

    A wait is reported on stderr: "waiting for another process to finish <purpose>".
    """
    file = try_lock(path, shared=shared)
    if file is None:
        print(f"waiting for another process to finish {purpose}", file=sys.stderr, flush=True)
        file = _lock(path, shared, 0)
    assert file is not None
    with file:
        yield


def is_locked(path: Path, *, count_shared: bool = False) -> bool:
    """Return True if a process holds an exclusive lock on `path`, or with `count_shared` any lock.

    On NFS, `count_shared` requires write access; elsewhere, read access is enough.
    """
    mode = "r+" if count_shared and os.access(path, os.W_OK) else "r"
    try:
        file = _lock(path, not count_shared, fcntl.LOCK_NB, mode)
    except FileNotFoundError:
        return False
    if file is not None:
        file.close()
    return file is None


def _lock(path: Path, shared: bool, flags: int, mode: str = "a+") -> IO[str] | None:
    # On NFS a shared lock needs read access and an exclusive lock needs write access.
    file = open_regular(path, mode)
    _locked_files.add(file)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | flags)
    except BlockingIOError:
        file.close()
        return None
    except BaseException:  # such as KeyboardInterrupt while waiting
        file.close()
        raise
    return file


def _release_in_child() -> None:
    """Close the locked files in a forked child, because a lock lasts as long as any process has its file open."""
    for file in list(_locked_files):
        file.close()


os.register_at_fork(after_in_child=_release_in_child)


def read_start_time(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; "" if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
