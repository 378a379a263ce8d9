"""A prepared set in object storage: the folder that caches it on this node, and downloads that are checked and retried.

A cache folder belongs to one run at a time; the next run finds it warm. It never holds a shard that is not whole.
"""

import errno
import fcntl
import hashlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

import torch.distributed as dist
from streaming.base.storage.download import CloudDownloader

from stackexp.data.stdlib import get_cache_root
from stackexp.errors import RunError, first_line

T = TypeVar("T")
log = logging.getLogger(__name__)
DESCRIPTION = ("corpus.json", "index.json", "tokenizer.json")
SECONDS = 1.0  # before the second attempt at a download; twice as many before each further one
MARK = ".remote"  # the file of a cache folder that is locked, and names the remote
OF_NO_USE = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR}
"""Errors of the system that trying again does not mend."""


class SourceError(RunError):
    """A source of training data fails. From a loader's process torch hands on its traceback: our line is the last."""

    def __init__(self, message: str):
        super().__init__(message.rpartition(f"{SourceError.__qualname__}: ")[2].strip())


class Remote:
    """A folder at a URL of any scheme that mosaicml-streaming knows: s3://, gs:// ... or a path."""

    def __init__(self, url: str, timeout: float, retries: int):
        self.url, self._timeout, self._retries = url.rstrip("/"), timeout, retries
        try:
            self._downloader = CloudDownloader.get(self.url)
        except (ValueError, ImportError) as error:
            raise SourceError(f"data.remote {url}: {first_line(error)}") from None

    def fetch(self, name: str, to: Path, sha256: str | None = None, patient: bool = True) -> None:
        """Copy a file to `to`, whole or not at all; if `patient` again, and later, where it fails or has another hash.

        Raises SourceError, naming the file, when all attempts have failed, and OSError where `to` cannot be written.
        """
        part = to.with_name(f".{to.name}.{os.getpid()}-{threading.get_ident()}")
        for attempt in range(1 + self._retries if patient else 1):
            time.sleep(SECONDS * 2 ** (attempt - 1) if attempt else 0)
            try:
                self._downloader.download(f"{self.url}/{name}", str(part), self._timeout)
                _check_hash(part, sha256)
                os.replace(part, to)
                return
            except Exception as error:
                failure = error
                if _is_final(error):
                    break
                self._downloader.clean_up()
            finally:
                part.unlink(missing_ok=True)
        if isinstance(failure, OSError) and failure.errno in OF_NO_USE and not self._is_missing(failure):
            failure.filename = failure.filename or str(to)  # a disk that is full does not say of which file
            raise failure
        raise SourceError(f"{self.url}/{name}: {_explain(failure, attempt + 1)}") from None

    def disconnect(self) -> None:
        """Before processes are forked, which must not share a connection."""
        self._downloader.clean_up()

    def _is_missing(self, error: OSError) -> bool:
        return str(error.filename).startswith(self.url)


def _check_hash(path: Path, sha256: str | None) -> None:
    if sha256 is not None:
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise ValueError("its sha256 is not the one in index.json")
            os.fsync(file.fileno())


def _is_final(error: Exception) -> bool:
    """Whether there is no sense in trying again."""
    refused = 400 <= _status(error) < 500 and _status(error) not in (408, 429)
    return refused or "Credentials" in type(error).__name__ or getattr(error, "errno", None) in OF_NO_USE


def _status(error: Exception) -> int:
    """Of an answer over HTTP, as botocore's ClientError has it; 0 where there was none."""
    response = getattr(error, "response", None)
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) if isinstance(response, dict) else 0


def _explain(error: Exception, attempts: int) -> str:
    if "Credentials" in type(error).__name__:
        return "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if isinstance(error, FileNotFoundError) or _status(error) == 404:
        return "not found; check data.remote, and copy all of the prepared set there"
    if _status(error) == 403:
        return "not permitted; check the credentials and the bucket's permissions"
    tried = "in one attempt" if attempts == 1 else f"in {attempts} attempts"
    return f"cannot be downloaded {tried}: {first_line(error)}; mend that, then go on with --ckpt_path last"


class Cache:
    """The folder that holds what is needed of a remote set on this node; ours alone as long as this object lives."""

    def __init__(self, remote: Remote, folder: str | None):
        """The first that no other run has of `folder`, `folder`-2, ... (None: private, below `get_cache_root()`).

        Raises SourceError, or OSError, if that cannot be a cache of `remote`.
        """
        self.remote = remote
        name = hashlib.sha256(remote.url.encode()).hexdigest()[:16]
        first = Path(folder) if folder else get_cache_root() / "remotes" / name
        for number in itertools.count(1):
            self.folder = first.with_name(f"{first.name}-{number}") if number > 1 else first
            self._mark = self._hold()
            if self._mark:
                break
        if folder and number > 1:
            log.warning("%s: another run uses this cache; this run's is %s", first, self.folder)
        self._describe()

    def close(self) -> None:
        """Let others have the folder."""
        self._mark.close()

    def _hold(self) -> IO[str] | None:
        """Lock the folder; None if another process has."""
        if self.folder.is_dir() and any(self.folder.iterdir()) and not (self.folder / MARK).is_file():
            raise SourceError(
                f"{self.folder}: holds other files, so it cannot be the cache of {self.remote.url}; "
                "leave data.path out, or name an empty folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        mark = open(self.folder / MARK, "a+", encoding="utf-8")  # noqa: SIM115
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mark.close()
            return None
        mark.seek(0)
        if (of := mark.read()) not in ("", self.remote.url):
            raise SourceError(f"{self.folder}: the cache of {of}, not of {self.remote.url}; name another folder")
        if not of:
            mark.write(self.remote.url)
            mark.flush()
        return mark

    def _describe(self) -> None:
        """Fetch what describes the set; keep the shards that are still the same, whole, and nothing else."""
        before = self._shards()
        for name in DESCRIPTION:
            self.remote.fetch(name, self.folder / name)
        self.remote.disconnect()
        after = self._shards()
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and name not in (*DESCRIPTION, MARK):
                kept = name in after and before.get(name) == after[name]
                if not kept or path.stat().st_size != after[name]["bytes"]:
                    path.unlink()

    def _shards(self) -> dict[str, dict[str, Any]]:
        """File name, size and hashes of every shard, as far as index.json can be read: `TokenSet` tells of that."""
        try:
            index = json.loads((self.folder / "index.json").read_text(encoding="utf-8"))
            return {shard["raw_data"]["basename"]: shard["raw_data"] for shard in index["shards"]}
        except (OSError, ValueError, KeyError, TypeError):
            return {}


def cache_on_this_node(remote: Remote, folder: str | None) -> Path:
    """The folder of the `Cache` that all processes of this node share; held as long as the first of them lives."""
    key = (remote.url, folder)

    def hold() -> Path:
        if key not in _held:
            _held[key] = Cache(remote, folder)
        return _held[key].folder

    return once_per_node(hold)


_held: dict[tuple[str, str | None], Cache] = {}


def _let_go() -> None:
    """In a forked child: a loader's process that outlives us must not hold our cache."""
    for cache in _held.values():
        cache.close()


os.register_at_fork(after_in_child=_let_go)


def once_per_node(make: Callable[[], T]) -> T:
    """What `make()` gives in the first process of a node, in all processes of that node.

    Called by all processes of the run; if one cannot make it, all of them raise its RunError or OSError.
    """
    if not dist.is_initialized():
        return make()
    made, error = None, None
    first = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID", 0)) == 0
    if first:
        try:
            made = make()
        except (RunError, OSError) as caught:
            error = caught
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (first, made, error))
    for _, _, error in answers:
        if error is not None:
            raise error
    return next(made for first, made, _ in reversed(answers[: dist.get_rank() + 1]) if first)
