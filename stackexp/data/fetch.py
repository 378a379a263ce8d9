"""Fetch OLMo's perplexity sets from their server, a mirror or a folder, and check them.

The files are small, so a broken download starts over. No library is used, because the downloads of torch.hub and
huggingface_hub neither compare the length of a file without a known hash nor retry a connection that closes early.
"""

import http.client
import shutil
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

import stackexp
from stackexp.data.olmo import BASE_URL, INSTANCE_LENGTH, TOKENIZER, VOCAB_SIZE, OlmoSet
from stackexp.data.shards import DamagedFileError, verify_file
from stackexp.data.token_files import (
    NPY_MAGIC,
    FileRecord,
    TokenFile,
    count_token,
    decode_text,
    find_end_of_text,
    publish,
    read_record,
)
from stackexp.errors import RunError
from stackexp.files import WRITE_REMEDY, compute_sha256, explain_failed_writes, hold_lock, sync_file
from stackexp.terminal import open_bar, print_line

CHUNK_BYTES = 1 << 18
TIMEOUT_SECONDS = 30.0  # to connect, and between two chunks
MAX_ATTEMPTS = 6
PAUSE_SECONDS = 1.0  # after the first failure; doubles after each further one
RETRIED_CLIENT_ERRORS = (408, 425, 429)


class UnreachableServerError(RunError):
    """Raised if a server cannot be reached: no name resolution, no route, a proxy that refuses, or an invalid URL."""


def fetch(sets: list[OlmoSet], folder: Path, mirror: str | None = None) -> dict[OlmoSet, FileRecord]:
    """Fetch `sets` to `folder`/v2 and `folder`/v3, check them and write a record next to each.

    Returns the records of the sets that are present. Complete sets are kept. A set that fails is reported on stderr and
    does not stop the others. `mirror` is a URL that replaces BASE_URL, or a folder.

    Raises:
        UnreachableServerError: The server cannot be reached.
        RunError: `folder` cannot be written.
    """
    records = {}
    with explain_failed_writes(folder, WRITE_REMEDY):
        for version in {olmo_set.version for olmo_set in sets}:
            (folder / version).mkdir(parents=True, exist_ok=True)
        with hold_lock(folder / ".lock", f"fetching into {folder}"):
            for olmo_set in sets:
                try:
                    records[olmo_set] = _find_complete(olmo_set, folder) or _fetch_set(olmo_set, folder, mirror)
                except UnreachableServerError:
                    raise
                except RunError as error:
                    print_line(f"error: {olmo_set}: {error}")
    return records


def _find_complete(olmo_set: OlmoSet, folder: Path) -> FileRecord | None:
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
    try:
        verify_file(path, record.sha256)
    except DamagedFileError:
        print_line(f"{path}: differs from its record; fetching it again")
        return None
    print_line(f"{olmo_set}: already fetched")
    return record


def _fetch_set(olmo_set: OlmoSet, folder: Path, mirror: str | None) -> FileRecord:
    path = olmo_set.file(folder)
    part, expected = path.with_name(f".{path.name}.part"), None
    try:
        if mirror and "://" not in mirror:
            source, expected = _copy_from_folder(Path(mirror), olmo_set, part)
        else:
            source = f"{(mirror or BASE_URL).rstrip('/')}/{olmo_set.path}"
            with open_bar(desc=str(olmo_set), unit="B", unit_scale=True, unit_divisor=1024, leave=False) as bar:
                download(source, part, bar)
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
    if text := decode_text(begin):
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


def download(url: str, path: Path, bar: tqdm) -> None:
    """Download `url` to `path`. Gives up after MAX_ATTEMPTS failures.

    Raises:
        UnreachableServerError: The last attempt did not reach the server, or the URL is invalid.
        RunError: The server refuses the file, or all attempts failed.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        is_reached = True
        try:
            return _receive(url, path, bar)
        except urllib.error.HTTPError as error:
            message = f"HTTP {error.code} {error.reason}".splitlines()[0]
            if error.code < 500 and error.code not in RETRIED_CLIENT_ERRORS:
                raise RunError(f"{url}: {message}") from error
        except urllib.error.URLError as error:
            is_reached, message = False, str(getattr(error.reason, "strerror", None) or error.reason)
        except (ValueError, http.client.InvalidURL) as error:
            raise UnreachableServerError(f"{url}: not a valid URL ({error}); correct --mirror") from error
        except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            message = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if attempt < MAX_ATTEMPTS:
            bar.set_postfix_str(f"{message}; attempt {attempt + 1} of {MAX_ATTEMPTS}")
            time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
    if is_reached:
        raise RunError(f"{url}: {message}, attempt {MAX_ATTEMPTS} of {MAX_ATTEMPTS}; rerun the command later")
    raise UnreachableServerError(
        f"{url}: cannot be reached from this machine ({message}); run the command on a machine with internet access, "
        "copy its folder here, and name the copy with --mirror"
    )


def _receive(url: str, path: Path, bar: tqdm) -> None:
    """Write the response to `path`. Raises HTTPException if it is cut short."""
    headers = {"User-Agent": f"stackexp/{stackexp.__version__}", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response, open(path, "wb") as file:
        size = response.length
        if size is None:
            raise RunError(f"{url}: the server sends the file without its length; use another mirror")
        bar.reset(size)
        while data := response.read1(CHUNK_BYTES):
            file.write(data)
            bar.update(len(data))
        sync_file(file)
        if file.tell() != size:
            raise http.client.HTTPException(f"the connection closed after {file.tell():,} of {size:,} bytes")
