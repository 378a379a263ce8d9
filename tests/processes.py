"""Start the program as a user does: in a separate process that can be killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ENDLESS = ("trainer.max_steps=100000", "trainer.val_check_interval=null", "trainer.checkpoint_interval=20")
ENDLESS += ("logging.progress_bar=false",)
FSDP = ("trainer.strategy=fsdp", "trainer.devices=2", "data.micro_batch_size=2")


class Program:
    """A starter of `python -m stackexp`, or of another Python program, in a folder."""

    def __init__(self, folder: Path, *entry: object):
        self.folder, self.entry = folder, entry or ("-m", "stackexp")
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}

    def start(self, *arguments: object) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *map(str, (*self.entry, *arguments))],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_restore_sigint,
        )

    def run(self, *arguments: object, expect: int = 0) -> str:
        """Return the output; fails unless the process exits with code `expect`."""
        output, _ = read_to_end(self.start(*arguments), 300, expect=expect)
        return output


def _restore_sigint() -> None:
    """Handle SIGINT as in a terminal, also where the tests run in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def kill(process: subprocess.Popen) -> None:
    """Send SIGKILL to a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(condition: Callable[[], object], process: subprocess.Popen | None = None, seconds: float = 300) -> None:
    """Wait until `condition()` is true; fails if `process` ends first."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def read_to_end(process: subprocess.Popen, seconds: float = 60, *, expect: int) -> tuple[str, str]:
    """Wait for a process to end; return its output and the last line that is not empty.

    Fails if there is a traceback, or if the exit code is not `expect`.
    """
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        kill(process)
    assert "Traceback" not in output, output
    assert process.returncode == expect, output
    return output, next((line for line in reversed(output.splitlines()) if line.strip()), "")


def list_children(process: subprocess.Popen) -> list[int]:
    """Return the ids of the processes that a process has started."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def find_second_rank(process: subprocess.Popen) -> int | None:
    """Return the id of rank 1, which the first process starts, or None if it has not started it yet."""
    for pid in list_children(process):
        with contextlib.suppress(OSError):
            if b"LOCAL_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes():
                return pid
    return None
