"""Records of the trials that run on this machine, so that a new driver finds those of a killed one.

A trial's process.json has its process id, host, start time and GPUs. Process ids are used again, so a record counts
only if the start time matches.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from stackexp.errors import RunError
from stackexp.files import is_locked, read_json, write_json

FILE_NAME = "process.json"


@dataclass(frozen=True)
class TrialProcess:
    """A trial that runs, or ran, in a process group of its own."""

    name: str
    pid: int
    host: str
    start_time: str  # clock ticks since the boot of the machine
    gpus: list[str]

    @property
    def is_alive(self) -> bool:
        """Return True if the process runs on this machine."""
        return self.host == socket.gethostname() and _read_start_time(self.pid) == self.start_time

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the process, or to its whole group."""
        with contextlib.suppress(ProcessLookupError):
            if group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)


def record_process(folder: Path, pid: int, gpus: list[str]) -> None:
    """Write the record of a trial that was just started."""
    process = TrialProcess(folder.name, pid, socket.gethostname(), _read_start_time(pid), gpus)
    write_json(folder / FILE_NAME, asdict(process))


def find_processes(folder: Path) -> list[TrialProcess]:
    """Return the living trials of the sweep in `folder` on this machine, whichever driver has started them."""
    return [process for process in _read_records(folder) if process.is_alive]


def find_orphans(folder: Path) -> list[TrialProcess]:
    """Return the living trials whose driver is dead."""
    return [process for process in find_processes(folder) if not is_locked(folder / process.name / ".claim")]


def _read_records(folder: Path) -> Iterator[TrialProcess]:
    for path in sorted(folder.glob(f"*/{FILE_NAME}")):
        with contextlib.suppress(RunError, OSError, TypeError):  # a damaged record is of no process
            yield TrialProcess(**read_json(path))


def _read_start_time(pid: int) -> str:
    """Return the start time of a process; "" if there is none, or if it has ended and waits for its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
