"""OLMo's perplexity sets onto this machine: from the server, from a mirror of it or from a folder, and checked."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from stackexp.data.download import Unreachable, discard, download
from stackexp.data.locking import locked
from stackexp.data.olmo import BASE_URL, INSTANCE, TOKENIZER, VOCAB_SIZE, OlmoSet
from stackexp.data.shards import sync
from stackexp.data.token_files import (
    NPY_MAGIC,
    FileRecord,
    TokenFile,
    commit,
    count_of,
    find_end_of_text,
    read_record,
    sha256_of,
)
from stackexp.errors import RunError

IDS_AT_ONCE = 1 << 22
COPIED_AT_ONCE = 1 << 20  # bytes


@dataclass
class Fetched:
    """What came of a fetch: the sets that are there, what failed, and what could not be reached."""

    there: dict[OlmoSet, FileRecord] = field(default_factory=dict)
    failed: dict[OlmoSet, RunError] = field(default_factory=dict)
    unreached: list[OlmoSet] = field(default_factory=list)
    why_unreached: str = ""


def fetch(sets: list[OlmoSet], folder: Path, mirror: str | None = None, *, verify: bool = False) -> Fetched:
    """Bring `sets` to `folder`/v2 and `folder`/v3, each checked, its record beside it; what is whole there stays.

    `mirror`: a URL with what lies below OLMo's, or a folder (see find_in). `verify`: read what is there again and
    compare its SHA-256 with the record's. A set that fails leaves the others alone; without a way to the server from
    the start they are given up. Raises RunError if `folder` cannot be written.
    """
    fetched, reached = Fetched(), False
    try:
        with ExitStack() as stack:
            for version in sorted({s.version for s in sets}):
                (folder / version).mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(folder / version / ".lock", f"fetching into {folder / version}"))
            for one in sets:
                try:
                    record = _there(one, folder, verify)
                    if record is None and fetched.unreached:
                        fetched.unreached.append(one)
                        continue
                    if record is None:
                        record, reached = _bring(one, folder, mirror, reached), True
                    fetched.there[one] = record
                except Unreachable as e:
                    fetched.unreached.append(one)
                    fetched.why_unreached = str(e)
                except RunError as e:
                    fetched.failed[one] = e
                    _say(f"error: {one}: {e}")
    except OSError as e:
        raise RunError(
            f"{e.filename or folder}: cannot be written ({e.strerror or e}); make room or choose another --to, then "
            "run the same command again: what came is kept"
        ) from e
    return fetched


def _bring(one: OlmoSet, folder: Path, mirror: str | None, reached: bool) -> FileRecord:
    """Fetch one set, whatever is there; `reached`: the server has sent others. Raises Unreachable or RunError."""
    path = one.file(folder)
    part, expected = path.with_name(f".{path.name}.part"), None
    if mirror and "://" not in mirror:
        with _reading(Path(mirror)):
            file = find_in(Path(mirror), one)
            expected = _record_of_mirror(file)
            in_place = path.exists() and path.samefile(file)
        source = expected.source if expected else str(file.absolute())
        part = path if in_place else _copy(file, part)
    else:
        source = f"{(mirror or BASE_URL).rstrip('/')}/{one.path}"
        _download(source, part, str(one), reached)
    try:
        with _reading(part):
            record = check(part, source)
        if expected and record.sha256 != expected.sha256:
            raise RunError(f"{file}: damaged: its content is not what the record beside it says")
    except RunError:
        if part != path:
            discard(part)
        raise
    commit(part, path, record)
    if part != path:
        discard(part)
    _remark_on(one, path)
    return record


def _remark_on(one: OlmoSet, path: Path) -> None:
    """Say what is odd about the set in `path`, maybe of a copy that is not OLMo's file or not all of it."""
    file, doubt = TokenFile(path), "compare its size with the server's: the copy may be cut short"
    if file.tokens[-1] != file.record.end_of_text:
        _say(f"note: {one} ends within a document; {doubt}")
    if one.instances not in (None, count := len(file) // INSTANCE):
        _say(f"note: {one} has {count:,} instances of {INSTANCE} tokens, OLMo's own {one.instances:,}; {doubt}")


def _there(one: OlmoSet, folder: Path, verify: bool) -> FileRecord | None:
    """The record of a set that is whole; nothing if it is to be fetched."""
    path = one.file(folder)
    try:
        record = read_record(path)
    except RunError as e:
        _say(f"{e}")
        return None
    if record is None or not path.is_file():
        return None
    if record.tokenizer != TOKENIZER:
        raise RunError(f"{path}: a file of another tokenizer is there; choose another --to")
    if path.stat().st_size != record.bytes or (verify and sha256_of(path) != record.sha256):
        _say(f"{path}: not what its record says; fetching it again")
        return None
    _say(f"{one}: already there")
    return record


def find_in(folder: Path, one: OlmoSet) -> Path:
    """The file of a set in a folder laid out like the server, or like ours. Raises RunError if there is none."""
    inner = one.path.partition("/")[2]
    places = [folder / one.path, one.file(folder)]
    if folder.name.startswith(one.version):  # the folder of this version alone
        places += [folder / inner, folder / f"{one.name}.npy"]
    for place in places:
        if place.is_file():
            return place
    raise RunError(f"{folder}: holds neither {one.path} nor {one.version}/{one.name}.npy")


def _record_of_mirror(file: Path) -> FileRecord | None:
    record = read_record(file)
    if record and record.tokenizer != TOKENIZER:
        raise RunError(f"{file}: the ids are another tokenizer's ({record.tokenizer[:12]})")
    return record


def _download(url: str, part: Path, name: str, reached: bool) -> None:
    with tqdm(desc=name, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        try:
            download(url, part, bar, reached)
        except BaseException:
            bar.leave = False  # the line that says why stands alone
            raise


def _copy(file: Path, part: Path) -> Path:
    discard(part)
    try:
        with open(part, "wb") as writer:
            for data in _content(file):
                writer.write(data)
            sync(writer)
    except RunError:
        discard(part)
        raise
    return part


def _content(file: Path) -> Iterator[bytes]:
    with _reading(file), open(file, "rb") as reader:
        while data := reader.read(COPIED_AT_ONCE):
            yield data


@contextmanager
def _reading(place: Path) -> Iterator[None]:
    """Tell what cannot be read from what cannot be written."""
    try:
        yield
    except OSError as e:
        raise RunError(f"{e.filename or place}: cannot be read ({e.strerror or e})") from e


def check(path: Path, source: str) -> FileRecord:
    """Read a raw file of OLMo's ids through; its record. Raises RunError, naming `source`, if it is something else."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        begin = file.read(256)
    if line := _text(begin):
        raise RunError(f"{source}: a page of text, not token ids; it begins: {line}")
    if begin.startswith(NPY_MAGIC):
        raise RunError(
            f"{source}: a .npy file with a header, which OLMo's files have not; to validate on it as it is, "
            "set data.validation.NAME to its path"
        )
    if not size or size % 2:
        raise RunError(f"{source}: {size:,} bytes are no whole number of token ids of two bytes")
    tokens = np.memmap(path, "<u2", "r")
    for first in range(0, len(tokens), IDS_AT_ONCE):
        ids = tokens[first : first + IDS_AT_ONCE]
        if (largest := int(ids.max())) >= VOCAB_SIZE:
            position = first + int(ids.argmax())
            raise RunError(
                f"{source}: id {largest:,} at position {position:,} is not GPT-NeoX-20B's, whose ids are below "
                f"{VOCAB_SIZE:,}"
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
        documents=None if end_of_text is None else count_of(tokens, end_of_text),
    )


def _text(begin: bytes) -> str:
    """The first words of a page (HTML, XML, a message); nothing for ids, which soon hold a byte that no page has."""
    try:
        text = begin.decode()
    except UnicodeDecodeError as e:
        if e.start < len(begin) - 3:  # not just a character cut short
            return ""
        text = begin[: e.start].decode()
    words = text.split()
    return " ".join(words)[:60] if len(begin) >= 16 and "".join(words).isprintable() else ""


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)
