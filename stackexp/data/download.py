"""Download a file over HTTP. A broken download is resumed if the server still has the same version of the file."""

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
from stackexp.files import sync_file

CHUNK_BYTES = 1 << 18
TIMEOUT_SECONDS = 30.0  # to connect, and between two chunks
MAX_ATTEMPTS = 6  # consecutive failures without new data
PAUSE_SECONDS = 1.0  # after the first failure; doubles up to MAX_PAUSE_SECONDS
MAX_PAUSE_SECONDS = 60.0
RETRIED_CLIENT_ERRORS = (408, 416, 425, 429)


class UnreachableServerError(RunError):
    """Raised if a server does not answer: no name resolution, no route, or a proxy that refuses."""


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
