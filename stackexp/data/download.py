"""One file over HTTP: into a part file, with which a later call goes on, in this process or another."""

import errno
import http.client
import json
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

import stackexp
from stackexp.data.shards import sync, write_json
from stackexp.errors import RunError, first_line

PIECE = 1 << 18  # bytes read at a time
TIMEOUT = 30.0  # seconds to connect, or without a byte
ATTEMPTS = 6  # in a row that bring nothing new
PAUSE = 1.0  # seconds between the first two of them, then twice as many each time
LONGEST_PAUSE = 60.0
_TRANSIENT = (408, 416, 425, 429)  # and 5xx
_NO_ROUTE = (errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH)


class Unreachable(RunError):
    """There is no way from this machine to the server: no name resolution, no route, or a proxy that refuses."""


class _Broken(Exception):
    """What another attempt may mend."""

    def __init__(self, what: str, *, pause: float = 0.0, answered: bool = True, anew: bool = False):
        """`pause`: seconds the server asks to wait; `answered`: there was a server; `anew`: what came is of no use."""
        super().__init__(what)
        self.pause, self.answered, self.anew = pause, answered, anew


@dataclass(frozen=True)
class _Version:
    """What tells the file at a URL from what may lie there later; beside the part file."""

    url: str
    size: int
    etag: str | None
    modified: str | None

    @property
    def validator(self) -> str | None:
        """For If-Range, which takes no weak ETag."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.modified

    def agrees_with(self, part: "_Version") -> bool:
        """Whether `part`, what a 206 tells of the file, is of this one; a 206 need not repeat all."""
        return part.size == self.size and part.etag in (None, self.etag) and part.modified in (None, self.modified)


def version_path(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    version_path(part).unlink(missing_ok=True)


def download(url: str, part: Path, bar: tqdm, answered: bool = False) -> None:
    """Bring the file at `url` to `part`, going on from what is there of the same file.

    Dropped connections, short bodies, 5xx and 429 are tried again after PAUSE seconds, twice as many each time.
    `answered`: the server has been reached before, so not to reach it is no more than one of these.
    Raises Unreachable, or RunError with the URL: what cannot be mended (404, 403), or ATTEMPTS that bring nothing new.
    """
    most, failures = _size(part), 0
    while True:
        try:
            return _attempt(url, part, bar)
        except Unreachable as e:
            if not answered:
                raise
            error = _Broken(first_line(e))
        except _Broken as e:
            error = e
            answered |= e.answered
        if error.anew:
            discard(part)
            most = 0
        elif _size(part) > most:
            most, failures = _size(part), 0
        failures += 1
        if failures == ATTEMPTS:
            what = f"{error}, {failures} times in a row"
            raise RunError(f"{url}: {what}; try again later: what came is kept") if answered else Unreachable(what)
        bar.set_postfix_str(f"{error}; attempt {failures + 1} of {ATTEMPTS}")
        time.sleep(min(LONGEST_PAUSE, max(error.pause, PAUSE * 2 ** (failures - 1))))


def _attempt(url: str, part: Path, bar: tqdm) -> None:
    known = _read_version(url, part)
    have = _size(part) if known else 0
    if known and have == known.size:
        return _show(bar, have, have)
    headers = {"Range": f"bytes={have}-", "If-Range": known.validator} if known and have else {}
    with _open(url, headers) as response:
        version, begin = _version_of(url, response)
        if begin and (begin != have or not known.agrees_with(version)):
            raise _Broken("the file on the server has changed since its first part came", anew=True)
        _show(bar, begin, version.size)
        if not begin:
            discard(part)
        with open(part, "ab") as file:
            if not begin:
                write_json(version_path(part), asdict(version))
            have = begin
            while data := _read(response, version.size - have):
                file.write(data)
                file.flush()
                have += len(data)
                bar.update(len(data))
            sync(file)
    if have != version.size:
        raise _Broken(f"the connection broke off after {have:,} of {version.size:,} bytes")


def _show(bar: tqdm, have: int, size: int) -> None:
    bar.initial = 0
    bar.reset(size)
    bar.initial = bar.n = bar.last_print_n = have
    bar.refresh()


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _read_version(url: str, part: Path) -> _Version | None:
    """What `part` is a part of, if it can be gone on with."""
    try:
        version = _Version(**json.loads(version_path(part).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    usable = version.url == url and version.validator and part.exists() and _size(part) <= version.size
    return version if usable else None


@contextmanager
def _open(url: str, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
    headers = {"User-Agent": f"stackexp/{stackexp.__version__}", "Accept-Encoding": "identity", **headers}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as e:
        status = f"HTTP {e.code} {e.reason}".splitlines()[0]
        with e:
            if e.code in _TRANSIENT or e.code >= 500:
                pause = _retry_after(e.headers.get("Retry-After"))
                raise _Broken(status, pause=pause, anew=e.code == 416) from e
            raise RunError(f"{url}: {status}") from e
    except (http.client.InvalidURL, ValueError) as e:
        raise RunError(f"{url}: no valid URL ({first_line(e)})") from e
    except urllib.error.URLError as e:
        raise _connection_error(url, e.reason) from e
    except (http.client.HTTPException, OSError) as e:
        raise _Broken(_reason(e)) from e
    with response:
        yield response


def _connection_error(url: str, reason: BaseException | str) -> Exception:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return RunError(f"{url}: the server's certificate is not trusted ({first_line(reason)})")
    no_way = isinstance(reason, socket.gaierror | TimeoutError) or getattr(reason, "errno", None) in _NO_ROUTE
    if no_way or "Tunnel connection failed" in str(reason):
        return Unreachable(_reason(reason))
    return _Broken(_reason(reason), answered=False)


def _reason(error: BaseException | str) -> str:
    return getattr(error, "strerror", None) or (first_line(error) if isinstance(error, BaseException) else error)


def _retry_after(value: str | None) -> float:
    """Seconds; 0 where the server gives none, or a date."""
    return float(value) if value and value.isdecimal() else 0.0


def _version_of(url: str, response: http.client.HTTPResponse) -> tuple[_Version, int]:
    """The file that a response is from, and the byte that it begins with. Raises RunError for a page of text."""
    if response.headers.get_content_type() in ("text/html", "application/xhtml+xml"):
        raise RunError(f"{url}: the server sends an HTML page, not a file of token ids; is this the right place?")
    if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise RunError(f"{url}: the server sends the file in {encoding}, not as it is")
    if response.length is None:
        raise RunError(f"{url}: the server does not say how long the file is, so nothing shows whether it came whole")
    size, begin = response.length, 0
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
        begin, size = (int(match[1]), int(match[2])) if match else (-1, size)
    return _Version(url, size, response.headers.get("ETag"), response.headers.get("Last-Modified")), begin


def _read(response: http.client.HTTPResponse, left: int) -> bytes:
    """What has come of the `left` bytes that are missing; nothing at the end of the body."""
    try:
        return response.read1(min(left, PIECE)) if left else b""
    except (http.client.HTTPException, OSError) as e:
        raise _Broken(_reason(e)) from e
