"""Fetch OLMo's perplexity sets from their server, a mirror or a folder, and check them.

A broken download is resumed if the server still has the same version of the file. `http_get` of huggingface_hub is not
used, because it does not retry a connection that closes early, and joins two versions of a file.
"""

import codecs
import http.client
import shutil
import ssl
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

import stackexp
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
from stackexp.files import compute_sha256, hold_lock, sync_file
from stackexp.progress_bar import open_bar, print_line

CHUNK_BYTES = 1 << 18
TIMEOUT_SECONDS = 30.0  # to connect, and between two chunks
MAX_ATTEMPTS = 6  # consecutive failures without new data
PAUSE_SECONDS = 1.0  # after the first failure; doubles up to MAX_PAUSE_SECONDS
MAX_PAUSE_SECONDS = 60.0
RETRIED_CLIENT_ERRORS = (408, 416, 425, 429)


class UnreachableServerError(RunError):
    """Raised if a server does not answer: no name resolution, no route, or a proxy that refuses."""


@dataclass
class FetchResult:
    """The outcome of a fetch."""

    records: dict[OlmoSet, FileRecord] = field(default_factory=dict)  # sets that are present
    failed: list[OlmoSet] = field(default_factory=list)
    unreachable: list[OlmoSet] = field(default_factory=list)  # not tried, because the server could not be reached
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


# Download


class _HttpRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that follows redirects to http and https only; urllib follows ftp too."""

    def redirect_request(self, *args: Any) -> urllib.request.Request | None:
        target = args[-1]
        if urlsplit(target).scheme not in ("http", "https"):
            raise RunError(f"{args[0].full_url}: redirects to {target}; only http and https are followed")
        return super().redirect_request(*args)


def download(url: str, path: Path, bar: tqdm, *, was_reached: bool = False) -> None:
    """Download `url` to `path`. Gives up after MAX_ATTEMPTS failures in a row without new data.

    Set `was_reached` if the server has answered before; then failures to connect are retried too.

    Raises:
        UnreachableServerError: The first connection failed.
        RunError: The server refuses the file, or all attempts failed.
    """
    failures, largest = 0, 0
    version = ""  # version of the bytes received so far
    while True:
        pause, begin = 0.0, path.stat().st_size if version else 0
        try:
            with _request(url, begin, version) as response:
                if response.status != 206:
                    begin, version = 0, _get_version(response)
                elif _get_version(response) not in ("", version) or not _continues(response, begin):
                    version = ""
                    raise http.client.HTTPException("the file on the server has changed")
                _receive(response, url, path, begin, bar)
                return
        except urllib.error.HTTPError as error:
            message = f"HTTP {error.code} {error.reason}".splitlines()[0]
            if error.code < 500 and error.code not in RETRIED_CLIENT_ERRORS:
                raise RunError(f"{url}: {message}") from error
            version = "" if error.code == 416 else version  # the file on the server has become shorter
            retry_after = error.headers.get("Retry-After", "")
            pause = float(retry_after) if retry_after.isdecimal() else 0.0
        except urllib.error.URLError as error:
            message = str(getattr(error.reason, "strerror", None) or error.reason)
            if not was_reached:
                raise UnreachableServerError(message) from error
        except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            message = getattr(error, "strerror", None) or str(error) or type(error).__name__
        was_reached = True
        size = path.stat().st_size if path.exists() else 0
        failures = 1 if size > largest else failures + 1
        largest = size
        if failures == MAX_ATTEMPTS:
            raise RunError(f"{url}: {message}, {failures} times in a row; rerun the command later")
        bar.set_postfix_str(f"{message}; attempt {failures + 1} of {MAX_ATTEMPTS}")
        time.sleep(min(MAX_PAUSE_SECONDS, max(pause, PAUSE_SECONDS * 2 ** (failures - 1))))


def _request(url: str, begin: int, version: str) -> http.client.HTTPResponse:
    headers = {"User-Agent": f"stackexp/{stackexp.__version__}", "Accept-Encoding": "identity"}
    if begin:
        headers |= {"Range": f"bytes={begin}-", "If-Range": version}
    opener = urllib.request.build_opener(_HttpRedirects)
    return opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)


def _get_version(response: http.client.HTTPResponse) -> str:
    """Return the header that identifies the file version for If-Range, or "". If-Range does not accept a weak ETag."""
    etag = response.headers.get("ETag", "")
    return etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified", "")


def _continues(response: http.client.HTTPResponse, begin: int) -> bool:
    return response.headers.get("Content-Range", "").startswith(f"bytes {begin}-")


def _receive(response: http.client.HTTPResponse, url: str, path: Path, begin: int, bar: tqdm) -> None:
    """Write the response to `path` from byte `begin`."""
    if response.length is None or response.headers.get("Content-Encoding", "identity") != "identity":
        raise RunError(f"{url}: the server sends the file compressed or without its length; use another mirror")
    free = shutil.disk_usage(path.parent).free
    if response.length > free:
        needed = f"{response.length:,} bytes are needed, but only {free:,} are free"
        raise RunError(f"{path.parent}: {needed}; free space or choose another --to")
    size = begin + response.length
    bar.reset(size)
    bar.update(begin)
    with open(path, "ab" if begin else "wb") as file:
        while data := response.read1(CHUNK_BYTES):
            file.write(data)
            bar.update(len(data))
        sync_file(file)
        if file.tell() != size:
            raise http.client.HTTPException(f"the connection closed after {file.tell():,} of {size:,} bytes")
