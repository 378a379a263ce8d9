"""Fetch OLMo's perplexity sets from their server, a mirror or a folder, and check them."""

import codecs
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from stackexp.data.download import UnreachableServerError, download
from stackexp.data.olmo import BASE_URL, INSTANCE_LENGTH, TOKENIZER, VOCAB_SIZE, OlmoSet
from stackexp.data.token_files import (
    NPY_MAGIC,
    FileRecord,
    TokenFile,
    count_token,
    explain_failed_writes,
    find_end_of_text,
    publish,
    read_record,
)
from stackexp.errors import RunError
from stackexp.files import compute_sha256, hold_lock
from stackexp.progress_bar import open_bar, print_line


@dataclass
class FetchResult:
    """The outcome of a fetch."""

    records: dict[OlmoSet, FileRecord] = field(default_factory=dict)  # sets that are present
    failed: list[OlmoSet] = field(default_factory=list)
    unreachable: list[OlmoSet] = field(default_factory=list)  # not tried after the server could not be reached
    reason: str = ""  # why the server could not be reached


def fetch(sets: list[OlmoSet], folder: Path, mirror: str | None = None) -> FetchResult:
    """Fetch `sets` to `folder`/v2 and `folder`/v3, check them and write a record next to each.

    Complete sets are kept. A set that fails is reported on stderr and does not stop the others. If the server cannot
    be reached from the start, the remaining sets are not tried. `mirror` is a URL that replaces BASE_URL, or a folder.
    Raises RunError if `folder` cannot be written.
    """
    result, was_reached = FetchResult(), False
    with explain_failed_writes(folder), ExitStack() as stack:
        for version in sorted({s.version for s in sets}):
            (folder / version).mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold_lock(folder / version / ".lock", f"fetching into {folder / version}"))
        for olmo_set in sets:
            try:
                record = _find_complete(olmo_set, folder)
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
                print_line(f"error: {olmo_set}: {error}")
    return result


def _find_complete(olmo_set: OlmoSet, folder: Path) -> FileRecord | None:
    """Return the record of a set that is already complete."""
    path = olmo_set.file(folder)
    try:
        record = read_record(path)
    except RunError as error:
        print_line(str(error))
        return None
    if record is None or not path.is_file():
        return None
    if record.tokenizer != TOKENIZER:
        raise RunError(f"{path}: exists and belongs to another tokenizer; choose another --to")
    if path.stat().st_size != record.bytes:
        print_line(f"{path}: differs from its record; fetching it again")
        return None
    print_line(f"{olmo_set}: already fetched")
    return record


def _fetch_set(olmo_set: OlmoSet, folder: Path, mirror: str | None, was_reached: bool) -> FileRecord:
    path = olmo_set.file(folder)
    part, expected = path.with_name(f".{path.name}.part"), None
    try:
        if mirror and "://" not in mirror:
            source, expected = _copy_from_folder(Path(mirror), olmo_set, part)
        else:
            source = f"{(mirror or BASE_URL).rstrip('/')}/{olmo_set.path}"
            with open_bar(desc=str(olmo_set), unit="B", unit_scale=True, unit_divisor=1024, leave=False) as bar:
                download(source, part, bar, was_reached=was_reached)
        record = check_ids(part, source)
        if expected and record.sha256 != expected.sha256:
            raise RunError(f"{source}: damaged, its SHA-256 differs from its record; copy it again")
        record = replace(record, source=expected.source) if expected else record
        publish(part, path, record)
    finally:
        part.unlink(missing_ok=True)
    _warn_if_truncated(olmo_set, path)
    return record


def _copy_from_folder(folder: Path, olmo_set: OlmoSet, part: Path) -> tuple[str, FileRecord | None]:
    """Copy the file of a set from a folder with the layout of the server or of `fetch`.

    Returns its path and its record, if it has one.
    """
    candidates = (folder / olmo_set.path, olmo_set.file(folder))
    file = next((path for path in candidates if path.is_file()), None)
    if file is None:
        missing = f"contains neither {olmo_set.path} nor {olmo_set.version}/{olmo_set.name}.npy"
        raise RunError(f"{folder}: {missing}; copy the file there")
    record = read_record(file)
    if record and record.tokenizer != TOKENIZER:
        raise RunError(f"{file}: token ids of another tokenizer ({record.tokenizer[:12]}); use OLMo's own files")
    try:
        shutil.copyfile(file, part)
    except OSError as error:
        raise RunError(f"{file}: cannot be copied ({error.strerror}); fix that and rerun the command") from error
    return str(file.absolute()), record


def _warn_if_truncated(olmo_set: OlmoSet, path: Path) -> None:
    """Report signs that a set is truncated or is not OLMo's own file."""
    file, advice = TokenFile(path), "compare its size with the server's, it may be truncated"
    assert file.record
    if file.tokens[-1] != file.record.end_of_text:
        print_line(f"note: {olmo_set} ends within a document; {advice}")
    if olmo_set.instances not in (None, count := len(file) // INSTANCE_LENGTH):
        print_line(
            f"note: {olmo_set} has {count:,} instances of {INSTANCE_LENGTH} tokens, but OLMo's file has "
            f"{olmo_set.instances:,}; {advice}"
        )


def check_ids(path: Path, source: str) -> FileRecord:
    """Check every id of a raw OLMo file and return its record. Raises RunError for any other file, naming `source`."""
    with open(path, "rb") as raw:
        begin = raw.read(256)
    if text := _decode_page(begin):
        raise RunError(f"{source}: contains text, not token ids; it begins: {text}; check the URL or the mirror")
    if begin.startswith(NPY_MAGIC):
        raise RunError(
            f"{source}: has a .npy header, unlike OLMo's files; to validate on it, set data.validation.NAME to its path"
        )
    file = TokenFile(path, dtype="uint16", name=source)
    for _ in file.read_blocks(VOCAB_SIZE, "use a mirror with OLMo's own files"):
        pass
    end_of_text = find_end_of_text(file.tokens)
    return FileRecord(
        sha256=compute_sha256(path),
        bytes=path.stat().st_size,
        tokens=len(file),
        vocab_size=VOCAB_SIZE,
        tokenizer=TOKENIZER,
        source=source,
        end_of_text=end_of_text,
        documents=None if end_of_text is None else count_token(file.tokens, end_of_text),
    )


def _decode_page(begin: bytes) -> str:
    """Return the first words of a text page (HTML, XML, an error message); "" for token ids."""
    try:
        words = codecs.getincrementaldecoder("utf-8")().decode(begin).split()  # accepts a character cut off at the end
    except UnicodeDecodeError:
        return ""
    return " ".join(words)[:60] if "".join(words).isprintable() else ""
