"""A lock ends with its holder, whatever the holder has started."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from stackexp.data.locking import locked

HOLDER = """
import os, signal, sys
from pathlib import Path
from stackexp.data.locking import locked
with locked(Path(sys.argv[1]), "the test"):
    if os.fork() == 0:
        print("forked", flush=True)
    signal.pause()
"""


def is_free(path) -> bool:
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_released_when_the_holder_is_killed_though_its_forked_child_lives(tmp_path):
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert holder.stdout.readline() == b"forked\n"
        assert not is_free(path)
        holder.kill()
        holder.wait()
        os.killpg(holder.pid, 0)  # raises if the child has ended, too
        assert is_free(path)
    finally:
        os.killpg(holder.pid, signal.SIGKILL)


def test_a_child_that_ends_releases_nothing(tmp_path):
    path = tmp_path / "lock"
    with locked(path, "the test"):
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert not is_free(path)
    assert is_free(path)


def test_released_after_an_error(tmp_path):
    path = tmp_path / "lock"
    with pytest.raises(ZeroDivisionError), locked(path, "the test"):
        raise ZeroDivisionError
    assert is_free(path)
