"""Exceptions that end a verb. The command line prints each as one line, without a traceback."""

import difflib
import re
from collections.abc import Iterable

MAX_LENGTH = 3000
"""Characters of an error line: a value from the command line or a file can be longer."""
SECRET_NAMES = ("password", "passwd", "secret", "token", "api_?key", "access_?key", "sig", "signature", "credential")
"""Names of values that must not be stored or printed, as regular expressions."""


def escape(text: str) -> str:
    """Return `text` in one line, with control characters escaped, which names of files and sets can contain."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.splitlines()))


def mask_secrets(text: str) -> str:
    """Return `text` with passwords, tokens and signatures in URLs and NAME=VALUE words replaced by `***`."""
    text = re.sub(r"(://)[^/@\s]+@", r"\1***@", text)
    return re.sub(rf"((?:^|[?&\s_.-])(?:{'|'.join(SECRET_NAMES)})=)[^&\s]+", r"\1***", text, flags=re.IGNORECASE)


def shorten(line: str) -> str:
    """Return a line of at most MAX_LENGTH characters: without its middle if it is longer."""
    half = MAX_LENGTH // 2 - 3
    return line if len(line) <= MAX_LENGTH else f"{line[:half]} ... {line[-half:]}"


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, at most 200 characters."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


class ConfigError(ValueError):
    """An error in a config, an override or the command line; nothing has been written.

    The message starts with `origin`: the file and line, or the override, that set the wrong value; "" if unknown.
    """

    exit_code = 2

    def __init__(self, message: str, origin: str = ""):
        super().__init__(f"{origin}: {message}" if origin else message)
        self.origin = origin


class SetNameError(ConfigError):
    """A name of an evaluation set that cannot be used. Verbs with another option than --sets change `option`."""

    option = "--sets"

    def __str__(self) -> str:
        return f"{self.option}: {self.args[0]}"


class RunError(RuntimeError):
    """An error at run time: data, checkpoint, disk or a diverged loss."""

    exit_code = 1


class DamagedCheckpointError(RunError):
    """Raised if a file of a checkpoint is missing or has changed since it was written; `reason` says which."""

    def __init__(self, path: object, reason: str):
        super().__init__(f"{path}: damaged ({reason}); use an older one")
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple:
        """Return how to build the error in another process."""
        return type(self), (self.path, self.reason)


class FolderBusyError(RunError):
    """Another process uses the run folder; nothing has been changed."""

    exit_code = 74


class StoppedError(Exception):
    """A requested stop (SIGTERM, SIGUSR1, max_time) after a checkpoint; the same command resumes."""

    exit_code = 75


class InterruptedRunError(StoppedError):
    """A requested stop by Ctrl-C, after a checkpoint; the same command resumes."""

    exit_code = 130


def find_closest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate most similar to `name`, or None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)), None)


def suggest_name(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean 'x'?` for the closest candidate, or an empty string."""
    found = find_closest(name, candidates, cutoff)
    return f"; did you mean {found!r}?" if found else ""
