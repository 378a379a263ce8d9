"""The progress bar of work outside of training. A log file gets lines instead of redrawn frames."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 30  # between the lines of a log


def open_bar(iterable: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """Open a bar on standard error, with the options of tqdm.

    If standard error is not a terminal, the bar prints a line at the start, every LINE_SECONDS, and at the end.
    """
    if sys.stderr.isatty():
        options["dynamic_ncols"] = True
    else:
        options |= {"file": _Lines(), "ncols": 80, "mininterval": LINE_SECONDS, "maxinterval": LINE_SECONDS}
    return tqdm(iterable, **options)


def print_line(line: str) -> None:
    """Print a line on standard error, above the bars that are open."""
    tqdm.write(line, file=sys.stderr)


class _Lines:
    """Writes each frame of a bar as a line to standard error."""

    def write(self, frame: str) -> None:
        if line := frame.strip():
            print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        pass
