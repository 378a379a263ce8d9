"""Shared memory of killed runs is removed by the next run, and too little of it is reported before the run starts."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from loaders import build_config, build_loader, read_samples, write_set

from stackexp.datamodules import shared_memory
from stackexp.errors import RunError

RUN = """
import sys, time
sys.path.insert(0, {tests!r})
from loaders import build_config, build_loader
loader = build_loader(build_config(path={folder!r}, num_workers={workers}))
batches = iter(loader)
next(batches)
print(loader.dataset._shm_prefix_int, flush=True)
time.sleep(1000)
"""


def list_remains(prefix: str) -> set[str]:
    """Return the names of a run's shared memory segments and lock files."""
    locks = {path.name for path in Path(tempfile.gettempdir()).glob(f"{prefix}_*_filelock")}
    return locks | {name for name in os.listdir("/dev/shm") if name.startswith(f"{prefix}_")}


def start_run(folder: Path, workers: int) -> tuple[subprocess.Popen, str]:
    """Start a process that reads the data; return it and its prefix."""
    code = RUN.format(tests=str(Path(__file__).parent), folder=str(folder), workers=workers)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    return process, f"{int(process.stdout.readline()):06}"


def kill_all(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.2)  # for its children, which hold no lock


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
def test_next_run_removes_leftovers_of_a_killed_run(tmp_path, workers):
    folder = write_set(tmp_path / "set", 0, 40)
    living, used = start_run(folder, workers)
    try:
        dead, left = start_run(folder, workers)
        # Checked before the kill: after it, a run of another test may remove them first.
        assert list_remains(left), "the run has no shared memory, so this proves nothing"
        kill_all(dead)
        next(iter(build_loader(build_config(path=str(folder)))))
        assert not list_remains(left)
        assert list_remains(used), "a living run keeps its shared memory"
    finally:
        kill_all(living)
    read_samples(build_loader(build_config(path=str(folder))))
    assert not list_remains(used)


def test_too_little_shared_memory_is_reported(tmp_path, monkeypatch):
    folder = write_set(tmp_path / "set", 0, 40)
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda _: SimpleNamespace(free=2000))
    build_loader(build_config(path=str(folder)))
    with pytest.raises(RunError, match=r"^/dev/shm: the training data need .* bytes, but only 2,000 are free"):
        build_loader(build_config(path=str(folder), num_workers=2))
    with pytest.raises(RunError, match=r"in a container use --shm-size=2289m$"):
        shared_memory.check_space(150_000_000, 0, 0)
    with pytest.raises(RunError, match=r"--shm-size=\d+m, or set data.num_workers=0$"):
        shared_memory.check_space(10, 8, 10**9)
