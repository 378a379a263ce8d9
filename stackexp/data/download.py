"""Download one file over HTTP into a part file. A later call resumes it if the server still has the same version."""

import http.client
import shutil
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

import stackexp
from stackexp.errors import RunError
from stackexp.files import read_json, sync_file, write_json

CHUNK_BYTES = 1 << 18
TIMEOUT_SECONDS = 30.0  # to connect, and between two chunks
MAX_ATTEMPTS = 6  # in a row without new data
PAUSE_SECONDS = 1.0  # after the first failure; doubles up to MAX_PAUSE_SECONDS
MAX_PAUSE_SECONDS = 60.0
RETRIED_CLIENT_ERRORS = (408, 416, 425, 429)


class UnreachableServerError(RunError):
    """A server that has not answered at all: no name resolution, no route or a proxy that refuses."""


class _Interrupted(http.client.HTTPException):
    """A response that is incomplete or belongs to another version of the file."""


class _HttpRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that follows redirects to http and https only; urllib follows ftp too."""

    def redirect_request(self, *args: Any) -> urllib.request.Request | None:
        target = args[-1]
        if urlsplit(target).scheme not in ("http", "https"):
            raise RunError(f"{args[0].full_url}: redirects to {target}; only http and https are followed")
        return super().redirect_request(*args)


def version_path(part: Path) -> Path:
    """Return the file that records which version of which URL a part file belongs to."""
    return part.with_name(f"{part.name}.json")


def discard(part: Path) -> None:
    """Delete a part file and its version."""
    part.unlink(missing_ok=True)
    version_path(part).unlink(missing_ok=True)


def download(url: str, part: Path, bar: tqdm, *, was_reached: bool = False) -> None:
    """Download `url` to `part`. Broken connections and busy servers are retried MAX_ATTEMPTS times without new data.

    Set `was_reached` if the server has answered before, so that a failure to connect is retried too.

    Raises:
        UnreachableServerError: The first connection failed.
        RunError: The server refuses the file, or all attempts failed. The part file remains.
    """
    failures, largest = 0, 0
    while True:
        pause = 0.0
        try:
            return _download_rest(url, part, bar)
        except urllib.error.HTTPError as error:
            message = f"HTTP {error.code} {error.reason}".splitlines()[0]
            if error.code < 500 and error.code not in RETRIED_CLIENT_ERRORS:
                raise RunError(f"{url}: {message}") from error
            if error.code == 416:  # the file on the server is shorter than the part
                discard(part)
            retry_after = error.headers.get("Retry-After", "")
            pause = float(retry_after) if retry_after.isdecimal() else 0.0
        except urllib.error.URLError as error:
            message = str(getattr(error.reason, "strerror", None) or error.reason)
            if not was_reached:
                raise UnreachableServerError(message) from error
        except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            message = getattr(error, "strerror", None) or str(error) or type(error).__name__
        was_reached = True
        size = part.stat().st_size if part.exists() else 0
        failures = 1 if size > largest else failures + 1
        largest = size
        if failures == MAX_ATTEMPTS:
            raise RunError(f"{url}: {message}, {failures} times in a row; rerun the command later to resume")
        bar.set_postfix_str(f"{message}; attempt {failures + 1} of {MAX_ATTEMPTS}")
        time.sleep(min(MAX_PAUSE_SECONDS, max(pause, PAUSE_SECONDS * 2 ** (failures - 1))))


def _download_rest(url: str, part: Path, bar: tqdm) -> None:
    version = _read_version(url, part)
    begin = part.stat().st_size if version else 0
    headers = {"User-Agent": f"stackexp/{stackexp.__version__}", "Accept-Encoding": "identity"}
    if version:
        if begin == version["size"]:
            return
        headers |= {"Range": f"bytes={begin}-", "If-Range": version["validator"]}
    opener = urllib.request.build_opener(_HttpRedirects)
    with opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS) as response:
        if response.length is None or response.headers.get("Content-Encoding", "identity") != "identity":
            raise RunError(f"{url}: the server sends the file compressed or without its length; use another mirror")
        free = shutil.disk_usage(part.parent).free
        if response.length > free:
            needed = f"{response.length:,} bytes are needed, but only {free:,} are free"
            raise RunError(f"{part.parent}: {needed}; free space or choose another --to")
        size, validator = begin + response.length, _get_validator(response)
        if version and response.status == 206:
            sent = response.headers.get("Content-Range", "")
            expected = f"bytes {begin}-{version['size'] - 1}/{version['size']}"
            if sent != expected or validator not in (None, version["validator"]):
                discard(part)
                raise _Interrupted("the file on the server has changed")
        else:
            begin, size = 0, response.length
            discard(part)
            write_json(version_path(part), {"url": url, "size": size, "validator": validator})
        bar.reset(size)
        bar.update(begin)
        with open(part, "ab") as file:
            while data := response.read1(CHUNK_BYTES):
                file.write(data)
                file.flush()  # a killed process keeps what it received
                begin += len(data)
                bar.update(len(data))
            sync_file(file)
    if begin != size:
        raise _Interrupted(f"the connection closed after {begin:,} of {size:,} bytes")


def _get_validator(response: http.client.HTTPResponse) -> str | None:
    """Return the header that identifies the file version for If-Range, which accepts no weak ETag."""
    etag = response.headers.get("ETag", "")
    return etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")


def _read_version(url: str, part: Path) -> dict | None:
    """Return the version of a part file that can be resumed."""
    try:
        version = read_json(version_path(part))
        is_usable = version["url"] == url and version["validator"] and part.stat().st_size <= version["size"]
    except (OSError, RunError, KeyError, TypeError):
        return None
    return version if is_usable and part.stat().st_size else None
