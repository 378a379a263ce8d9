"""Download files of a prepared set from object storage, with retries and hash checks."""

import errno
import os
import threading
import time
from pathlib import Path

from streaming.base.storage.download import CloudDownloader

from stackexp.errors import RunError, first_line
from stackexp.files import compute_sha256, sync_file

RETRY_SECONDS = 1.0  # before the second attempt; doubled before each further one
PERMANENT_ERRORS = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR}


class SourceError(RunError):
    """Raised if training data cannot be read.

    torch raises the error of a worker process again with the worker's traceback as its message. Only the last line,
    the original message, is kept.
    """

    def __init__(self, message: str):
        super().__init__(message.rpartition(f"{SourceError.__qualname__}: ")[2].strip())


class RemoteFolder:
    """A folder at any URL that mosaicml-streaming supports (s3://, gs://, ...) or at a path."""

    def __init__(self, url: str, timeout: float, retries: int):
        self.url, self._timeout, self._retries = url.rstrip("/"), timeout, retries
        try:
            self._downloader = CloudDownloader.get(self.url)
        except (ValueError, ImportError) as error:
            reason = first_line(error).rstrip(".")
            raise SourceError(f"data.remote {url}: {reason}; check the URL, or install the package for it") from None

    def download(self, name: str, path: Path, sha256: str | None = None, should_retry: bool = True) -> None:
        """Download a file to `path` atomically, after a check of its hash.

        Raises SourceError if all attempts have failed, and OSError if `path` cannot be written.
        """
        part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
        for attempt in range(1 + self._retries if should_retry else 1):
            time.sleep(RETRY_SECONDS * 2 ** (attempt - 1) if attempt else 0)
            try:
                self._downloader.download(f"{self.url}/{name}", str(part), self._timeout)
                _check_file(part, sha256)
                os.replace(part, path)
                return
            except Exception as error:
                failure = error
                if _is_permanent(error):
                    break
                self._downloader.clean_up()
            finally:
                part.unlink(missing_ok=True)
        if isinstance(failure, OSError) and failure.errno in PERMANENT_ERRORS and not self._contains(failure.filename):
            failure.filename = failure.filename or str(path)  # "no space left on device" comes without a file
            raise failure
        raise SourceError(f"{self.url}/{name}: {_explain(failure, attempt + 1)}") from None

    def disconnect(self) -> None:
        """Close the connection. Forked processes must not share one."""
        self._downloader.clean_up()

    def _contains(self, filename: object) -> bool:
        return str(filename).startswith(self.url)


def _check_file(path: Path, sha256: str | None) -> None:
    if sha256 is not None:
        if compute_sha256(path) != sha256:
            raise ValueError("the sha256 differs from the one in index.json")
        with open(path, "rb") as file:
            sync_file(file)


def _is_permanent(error: Exception) -> bool:
    """Return True if another attempt would also fail."""
    is_refused = 400 <= _http_status(error) < 500 and _http_status(error) not in (408, 429)
    return is_refused or "Credentials" in type(error).__name__ or getattr(error, "errno", None) in PERMANENT_ERRORS


def _http_status(error: Exception) -> int:
    """Return the HTTP status in an error of botocore, or 0."""
    response = getattr(error, "response", None)
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) if isinstance(response, dict) else 0


def _explain(error: Exception, attempts: int) -> str:
    if "Credentials" in type(error).__name__:
        return "no credentials; for s3:// set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if isinstance(error, FileNotFoundError) or _http_status(error) == 404:
        return "not found; check data.remote, and copy the whole prepared set there"
    if _http_status(error) == 403:
        return "access denied; check the credentials and the bucket's permissions"
    count = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    return f"download failed after {count}: {first_line(error)}; fix this, then resume the run"
