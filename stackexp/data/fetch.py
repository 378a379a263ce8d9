"""Fetch OLMo's perplexity sets from the server, a mirror or a folder, and check them."""

import contextlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from stackexp.data.download import UnreachableServerError, discard, download
from stackexp.data.olmo import BASE_URL, INSTANCE_LENGTH, TOKENIZER, VOCAB_SIZE, OlmoSet
from stackexp.data.token_files import (
    NPY_MAGIC,
    FileRecord,
    TokenFile,
    count_token,
    find_end_of_text,
    publish,
    read_record,
)
from stackexp.errors import RunError
from stackexp.files import hold_lock, sha256_of, sync_file

BLOCK_TOKENS = 1 << 22
COPY_BYTES = 1 << 20


@dataclass
class FetchResult:
    """The outcome of a fetch."""

    records: dict[OlmoSet, FileRecord] = field(default_factory=dict)  # sets that are present
    failed: list[OlmoSet] = field(default_factory=list)
    unreachable: list[OlmoSet] = field(default_factory=list)  # not tried after the server could not be reached
    reason: str = ""  # why the server could not be reached


def fetch(sets: list[OlmoSet], folder: Path, mirror: str | None = None, *, verify: bool = False) -> FetchResult:
    """Fetch `sets` to `folder`/v2 and `folder`/v3, check them and write a record next to each.

    Complete sets are kept. A set that fails is reported on stderr and does not stop the others. If the server cannot
    be reached from the start, the remaining sets are not tried.

    Args:
        sets: The sets to fetch.
        folder: The parent of the version folders.
        mirror: A URL that replaces BASE_URL, or a folder (see `find_in_folder`).
        verify: Also compare the SHA-256 of complete sets with their records.

    Raises:
        RunError: `folder` cannot be written.
    """
    result, was_reached = FetchResult(), False
    try:
        with ExitStack() as stack:
            for version in sorted({s.version for s in sets}):
                (folder / version).mkdir(parents=True, exist_ok=True)
                stack.enter_context(hold_lock(folder / version / ".lock", f"fetching into {folder / version}"))
            for olmo_set in sets:
                try:
                    record = _find_complete(olmo_set, folder, verify)
                    if record is None and result.unreachable:
                        result.unreachable.append(olmo_set)
                        continue
                    if record is None:
                        record, was_reached = _fetch_set(olmo_set, folder, mirror, was_reached), True
                    result.records[olmo_set] = record
                except UnreachableServerError as error:
                    result.unreachable.append(olmo_set)
                    result.reason = str(error)
                except RunError as error:
                    result.failed.append(olmo_set)
                    _report(f"error: {olmo_set}: {error}")
        if not result.records:
            _remove_empty_folders(folder, {s.version for s in sets})
    except OSError as error:
        raise RunError(
            f"{error.filename or folder}: cannot be written ({error.strerror or error}); free space or choose another "
            "--to, then rerun the command to resume"
        ) from error
    return result


def _remove_empty_folders(folder: Path, versions: set[str]) -> None:
    """Delete the folders of a fetch that has received nothing, with their lock files."""
    for path in (folder / version for version in versions):
        if [file.name for file in path.iterdir()] == [".lock"]:
            (path / ".lock").unlink()
            path.rmdir()
    with contextlib.suppress(OSError):  # other files, or the root
        folder.rmdir()


def _find_complete(olmo_set: OlmoSet, folder: Path, verify: bool) -> FileRecord | None:
    """Return the record of a set that is already complete."""
    path = olmo_set.file(folder)
    try:
        record = read_record(path)
    except RunError as error:
        _report(str(error))
        return None
    if record is None or not path.is_file():
        return None
    if record.tokenizer != TOKENIZER:
        raise RunError(f"{path}: exists and belongs to another tokenizer; choose another --to")
    if path.stat().st_size != record.bytes or (verify and sha256_of(path) != record.sha256):
        _report(f"{path}: differs from its record; fetching it again")
        return None
    _report(f"{olmo_set}: already fetched")
    return record


def _fetch_set(olmo_set: OlmoSet, folder: Path, mirror: str | None, was_reached: bool) -> FileRecord:
    path = olmo_set.file(folder)
    part = path.with_name(f".{path.name}.part")
    expected = None
    if mirror and "://" not in mirror:
        with _name_read_errors(Path(mirror)):
            file = find_in_folder(Path(mirror), olmo_set)
            expected = read_record(file)
            is_in_place = path.exists() and path.samefile(file)
        if expected and expected.tokenizer != TOKENIZER:
            raise RunError(f"{file}: contains token ids of another tokenizer ({expected.tokenizer[:12]})")
        source = expected.source if expected else str(file.absolute())
        if is_in_place:
            part = path
        else:
            _copy(file, part)
    else:
        source = f"{(mirror or BASE_URL).rstrip('/')}/{olmo_set.path}"
        with tqdm(desc=str(olmo_set), unit="B", unit_scale=True, unit_divisor=1024, leave=False) as bar:
            download(source, part, bar, was_reached=was_reached)
    try:
        with _name_read_errors(part):
            record = check_ids(part, source)
        if expected and record.sha256 != expected.sha256:
            raise RunError(f"{file}: damaged, its SHA-256 differs from its record; copy it again")
    except RunError:
        if part != path:
            discard(part)
        raise
    publish(part, path, record)
    if part != path:
        discard(part)
    _report_oddities(olmo_set, path)
    return record


def _report_oddities(olmo_set: OlmoSet, path: Path) -> None:
    """Report signs that a set is truncated or is not OLMo's own file."""
    file, advice = TokenFile(path), "compare its size with the server's, it may be truncated"
    assert file.record
    if file.tokens[-1] != file.record.end_of_text:
        _report(f"note: {olmo_set} ends within a document; {advice}")
    if olmo_set.instances not in (None, count := len(file) // INSTANCE_LENGTH):
        _report(
            f"note: {olmo_set} has {count:,} instances of {INSTANCE_LENGTH} tokens, but OLMo's file has "
            f"{olmo_set.instances:,}; {advice}"
        )


def find_in_folder(folder: Path, olmo_set: OlmoSet) -> Path:
    """Return the file of a set in a folder that is laid out like the server or like `fetch` writes it.

    `folder` may also be the folder of the set's version alone. Raises RunError if there is no such file.
    """
    candidates = [folder / olmo_set.path, olmo_set.file(folder)]
    if folder.name.startswith(olmo_set.version):
        candidates += [folder / olmo_set.path.partition("/")[2], folder / f"{olmo_set.name}.npy"]
    for path in candidates:
        if path.is_file():
            return path
    raise RunError(f"{folder}: contains neither {olmo_set.path} nor {olmo_set.version}/{olmo_set.name}.npy")


def _copy(file: Path, part: Path) -> None:
    discard(part)
    try:
        with open(part, "wb") as writer:
            for data in _read_chunks(file):
                writer.write(data)
            sync_file(writer)
    except RunError:
        discard(part)
        raise


def _read_chunks(file: Path) -> Iterator[bytes]:
    with _name_read_errors(file), open(file, "rb") as reader:
        while data := reader.read(COPY_BYTES):
            yield data


@contextmanager
def _name_read_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a RunError, so that `fetch` does not take it for a failure to write."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{error.filename or path}: cannot be read ({error.strerror or error})") from error


def check_ids(path: Path, source: str) -> FileRecord:
    """Check every id of a raw OLMo file and return its record. Raises RunError, naming `source`, for anything else."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        begin = file.read(256)
    if text := _decode_page(begin):
        raise RunError(f"{source}: contains text, not token ids; it begins: {text}")
    if begin.startswith(NPY_MAGIC):
        raise RunError(
            f"{source}: has a .npy header, unlike OLMo's files; to validate on it, set data.validation.NAME to its path"
        )
    if not size or size % 2:
        raise RunError(f"{source}: {size:,} bytes are not a whole number of uint16 token ids; it may be truncated")
    tokens = np.memmap(path, "<u2", "r")
    for first in range(0, len(tokens), BLOCK_TOKENS):
        ids = tokens[first : first + BLOCK_TOKENS]
        if (largest := int(ids.max())) >= VOCAB_SIZE:
            position = first + int(ids.argmax())
            raise RunError(
                f"{source}: id {largest:,} at position {position:,} exceeds GPT-NeoX-20B's vocabulary of {VOCAB_SIZE:,}"
            )
    end_of_text = find_end_of_text(tokens)
    return FileRecord(
        sha256=sha256_of(path),
        bytes=size,
        tokens=len(tokens),
        vocab_size=VOCAB_SIZE,
        tokenizer=TOKENIZER,
        source=source,
        end_of_text=end_of_text,
        documents=None if end_of_text is None else count_token(tokens, end_of_text),
    )


def _decode_page(begin: bytes) -> str:
    """Return the first words of a text page (HTML, XML, an error message); "" for token ids."""
    try:
        text = begin.decode()
    except UnicodeDecodeError as error:
        if error.start < len(begin) - 3:  # not a character cut off at the end
            return ""
        text = begin[: error.start].decode()
    words = text.split()
    return " ".join(words)[:60] if len(begin) >= 16 and "".join(words).isprintable() else ""


def _report(line: str) -> None:
    tqdm.write(line, file=sys.stderr)
