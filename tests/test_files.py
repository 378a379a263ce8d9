"""File primitives: atomic writes, JSON Lines, locks."""

import fcntl
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest

from stackexp import files
from stackexp.errors import RunError

HOLDER = """
import os, signal, sys
from pathlib import Path
from stackexp.files import hold_lock
with hold_lock(Path(sys.argv[1]), "the test"):
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


def test_failed_atomic_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "result.json"
    files.write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]
    files.write_json(path, {"name": "größe", "count": 2})
    assert files.read_json(path) == {"name": "größe", "count": 2}
    path.write_text('{"name"')
    with pytest.raises(RunError, match=r"result.json: not valid JSON"):
        files.read_json(path)


def test_numbers_that_are_not_finite_become_null(tmp_path):
    path, contents = tmp_path / "b.json", {"a": [math.nan, 1.0], "b": math.nan}
    files.write_hashed_json(path, contents)
    assert str(files.read_hashed_json(path, "")) == "{'a': [nan, 1.0], 'b': None}"
    files.write_json(tmp_path / "a.json", {"a": [math.nan, {"b": math.inf}, 1.0], "c": -math.inf})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"a": [None, {"b": None}, 1.0], "c": None}


def test_only_regular_files_are_read(tmp_path):
    pipe, device = tmp_path / "pipe", tmp_path / "device"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    readers = (files.read_json, files.compute_sha256, lambda path: list(files.read_json_lines(path)), files.is_locked)
    for path in (pipe, device):
        for read in (*readers, files.try_lock):
            with pytest.raises(RunError, match="not a regular file"):
                read(path)


def test_temporary_names_are_unique_and_do_not_replace_files_of_others(tmp_path):
    path = tmp_path / "export"
    assert files.make_temporary_path(path) != files.make_temporary_path(path)
    with files.create_folder_atomically(path) as folder:
        (folder / "a").touch()
        assert not path.exists()
    with pytest.raises(OSError, match="not empty"), files.create_folder_atomically(path) as folder:
        (folder / "b").touch()
    assert os.listdir(path) == ["a"]
    assert os.listdir(tmp_path) == ["export"]


def test_read_json_lines_skips_a_torn_last_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert list(files.read_json_lines(path)) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert list(files.read_json_lines(path)) == [{"step": 1}, {"step": 2}]
    files.append_json_line(path, {"step": 3})
    with pytest.raises(RunError, match=r"lines.jsonl: line 3 is damaged; delete the line"):
        list(files.read_json_lines(path))
    assert list(files.read_json_lines(path, skip_damaged=True)) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_read_json_lines_reads_the_complete_lines_at_the_end(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n{"a"')
    found = {size: [line["a"] for line in files.read_json_lines(path, last_bytes=size)] for size in (4, 12, 21, 30, 31)}
    assert found == {4: [], 12: [], 21: [3], 30: [2, 3], 31: [1, 2, 3]}


def test_append_json_line_is_one_write(tmp_path):
    path = tmp_path / "lines.jsonl"
    for step in range(3):
        files.append_json_line(path, {"step": step, "text": "a\u2028b"})
    assert [json.loads(line)["step"] for line in path.read_text().split("\n")[:-1]] == [0, 1, 2]
    assert list(files.read_json_lines(path))[-1]["text"] == "a\u2028b"


def test_a_line_that_does_not_fit_on_the_disk_is_removed(tmp_path):
    path, limits = tmp_path / "lines.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    files.append_json_line(path, {"a": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.append_json_line(path, {"b": 2, "text": "longer than five bytes"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    files.append_json_line(path, {"c": 3})
    assert list(files.read_json_lines(path)) == [{"a": 1}, {"c": 3}]


def test_a_line_waits_for_that_of_another_process(tmp_path):
    """Otherwise a write that fails could undo the other line as well."""
    path = tmp_path / "lines.jsonl"
    with open(path, "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        writer = threading.Thread(target=files.append_json_line, args=(path, {"a": 1}))
        writer.start()
        writer.join(0.2)
        assert writer.is_alive()
        assert not path.read_text()
    writer.join(30)
    assert list(files.read_json_lines(path)) == [{"a": 1}]


def test_shared_locks_are_visible_without_write_access(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    path.touch()
    monkeypatch.setattr(os, "access", lambda *args: False)
    modes = []
    real = files.open_regular
    monkeypatch.setattr(files, "open_regular", lambda path, mode: modes.append(mode) or real(path, mode))
    assert not files.is_locked(path, count_shared=True)
    assert modes == ["r"]
    with files.try_lock(path, shared=True):
        assert files.is_locked(path, count_shared=True)


def test_lock_ends_with_its_holder_even_if_a_forked_child_survives(tmp_path):
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert holder.stdout.readline() == b"forked\n"
        assert not is_free(path)
        assert files.is_locked(path)
        holder.kill()
        holder.wait()
        os.killpg(holder.pid, 0)  # raises if the child has ended too
        assert is_free(path)
        assert not files.is_locked(path)
    finally:
        os.killpg(holder.pid, signal.SIGKILL)


def test_exit_of_a_forked_child_keeps_the_lock(tmp_path):
    path = tmp_path / "lock"
    with files.hold_lock(path, "the test"):
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert not is_free(path)
    assert is_free(path)
    with pytest.raises(ZeroDivisionError), files.hold_lock(path, "the test"):
        raise ZeroDivisionError
    assert is_free(path)


def test_shared_and_exclusive_locks(tmp_path):
    path = tmp_path / "lock"
    assert not files.is_locked(path)
    with files.try_lock(path, shared=True), files.try_lock(path, shared=True):
        assert files.try_lock(path) is None
        assert not files.is_locked(path)
        assert files.is_locked(path, count_shared=True)
    with files.try_lock(path):
        assert files.is_locked(path)
        assert files.try_lock(path, shared=True) is None
    assert not files.is_locked(path, count_shared=True)


def test_last_line_of_a_users_file_needs_no_line_feed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}')
    assert list(files.read_json_lines(path, is_log=False)) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a"')
    with pytest.raises(RunError, match="line 2 is damaged"):
        list(files.read_json_lines(path, is_log=False))
