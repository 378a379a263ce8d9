"""Wrap text and log messages at the width of the terminal, format durations, and show progress bars.

Files and pipes get unwrapped text, and lines instead of the redrawn frames of a bar.
"""

import contextlib
import logging
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

LINE_SECONDS = 30  # between the lines of a progress bar in a log


def wrap_text(text: str, indent: int = 0, stream: TextIO | None = None) -> str:
    """Break text into lines of the terminal's width if `stream` (standard output by default) is a terminal.

    Commands in backticks stay whole. `indent` spaces begin all lines but the first.
    """
    if not (stream or sys.stdout).isatty():
        return text
    width = shutil.get_terminal_size().columns
    whole = re.sub("`.*?`", lambda command: command[0].replace(" ", "\xa0"), text)
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(map(wrapper.fill, whole.splitlines())).replace("\xa0", " ")


def format_duration(seconds: float) -> str:
    """Format seconds with the two largest units: 42 s, 3 min 5 s, 2 h 10 min, 3 d 4 h."""
    values: list[str] = []
    rest = round(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or values or unit == "s":
            values.append(f"{count} {unit}")
    return " ".join(values[:2])


def write_to_stderr(line: str) -> None:
    """Write a line to the standard error of the process, without the buffer of `sys.stderr`.

    Signal handlers need this, because the buffer may be in use, and threads that end the process, because it may be
    redirected. Without a reader, as after Ctrl-C in `fit 2>&1 | tee log`, the line is lost.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def set_up_log() -> None:
    """Write log messages to standard error without a prefix."""
    handler = logging.StreamHandler()
    handler.setFormatter(_WrappingFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])


class _WrappingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.exc_info else wrap_text(text, stream=sys.stderr)


def open_bar(iterable: Iterable[Any] | None = None, **options: Any) -> "tqdm":
    """Open a bar on standard error, with the options of tqdm.

    If standard error is not a terminal, the bar prints a line at the start, every LINE_SECONDS, and at the end.
    """
    from tqdm import tqdm

    if sys.stderr.isatty():
        options["dynamic_ncols"] = True
    else:
        options |= {"file": _Lines(), "ncols": 80, "mininterval": LINE_SECONDS, "maxinterval": LINE_SECONDS}
    return tqdm(iterable, **options)


def print_line(line: str) -> None:
    """Print a line on standard error, above the bars that are open."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


class _Lines:
    """Writes each frame of a bar as a line to standard error."""

    def write(self, frame: str) -> None:
        if line := frame.strip():
            print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        pass
