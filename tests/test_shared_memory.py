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
batches = iter(build_loader(build_config(path={folder!r}, num_workers={workers})))
next(batches)
print("reading", flush=True)
time.sleep(1000)
"""


def list_remains() -> set[str]:
    """Return the names of streaming's segments and lock files."""
    locks = {path.name for path in Path(tempfile.gettempdir()).glob("*_filelock")}
    return locks | {name for name in os.listdir("/dev/shm") if name[:6].isdecimal()}


def start_run(folder: Path, workers: int) -> subprocess.Popen:
    code = RUN.format(tests=str(Path(__file__).parent), folder=str(folder), workers=workers)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "reading\n"
    return process


def kill_all(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.2)  # for its children, which hold no lock


@pytest.mark.parametrize("workers", [0, 1])
def test_next_run_removes_what_a_killed_run_left(tmp_path, workers):
    folder = write_set(tmp_path / "set", 0, 40)
    before = list_remains()
    living, dead = start_run(folder, workers), None
    try:
        used = list_remains() - before
        assert used
        dead = start_run(folder, workers)
        kill_all(dead)
        remains = list_remains() - before - used
        assert remains, "the kill left nothing, so this proves nothing"
        next(iter(build_loader(build_config(path=str(folder)))))
        assert not remains & list_remains()
        assert used <= list_remains(), "a living run keeps its shared memory"
    finally:
        kill_all(living)
    read_samples(build_loader(build_config(path=str(folder))))
    assert not used & list_remains()


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
