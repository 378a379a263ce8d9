"""The program as a user starts it: a process of its own, which can be killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


class Program:
    """`python -m stackexp` as a process of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}

    def start(self, *arguments: object) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "stackexp", *map(str, arguments)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_listen_to_the_keyboard,
        )

    def run(self, *arguments: object, expect: int = 0) -> str:
        """What it printed; fails unless it exits with `expect`."""
        process = self.start(*arguments)
        try:
            output, _ = process.communicate(timeout=300)
        finally:
            kill(process)
        assert process.returncode == expect, output
        return output


def _listen_to_the_keyboard() -> None:
    """SIGINT as in a terminal, also where the tests themselves run in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to the process and all it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen, seconds: float = 240) -> None:
    """Until `condition()` is true; fails if the process ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
