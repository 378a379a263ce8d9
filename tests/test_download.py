"""Downloads from a faulty server: resume, retries and one-line errors."""

import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import NoReturn

import pytest
from file_server import FileServer
from olmo_files import CONTENT, ICE, PTB, list_part_files, make_ids, read_fetched

from stackexp.cli import main
from stackexp.data import download
from stackexp.data.olmo import OlmoSet, list_olmo_sets


def get_ranges(server: FileServer) -> list[tuple[str | None, int]]:
    return [request[1:] for request in server.requests]


@pytest.mark.parametrize("headers", [{}, {"ETag": None, "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}])
def test_a_broken_connection_is_resumed(fetch, server, tmp_path, headers):
    server.headers, server.if_range = headers, not headers
    server.faults[PTB.path] = [4000, 3001]
    assert fetch("v2", "--only", "ptb") == 0
    assert read_fetched(tmp_path, PTB) == CONTENT[PTB]
    assert get_ranges(server) == [(None, 200), ("bytes=4000-", 206), ("bytes=7001-", 206)]
    assert list_part_files(tmp_path) == []


@pytest.mark.parametrize(("ranges", "tag"), [(False, '"strong"'), (True, None), (True, 'W/"weak"')])
def test_without_ranges_or_a_version_the_full_file_is_sent_again(fetch, server, tmp_path, ranges, tag):
    server.ranges, server.headers["ETag"] = ranges, tag
    server.faults[PTB.path] = [4000, 2000, 4001]
    assert fetch("v2", "--only", "ptb") == 0
    assert read_fetched(tmp_path, PTB) == CONTENT[PTB]
    assert [status for _, status in get_ranges(server)] == [200] * 4


@pytest.mark.parametrize("if_range", [True, False])
@pytest.mark.parametrize("size", [5000, 4000, 1000])
def test_a_file_that_changes_on_the_server_starts_over(fetch, server, tmp_path, if_range, size):
    contents = iter([CONTENT[PTB], *[make_ids(99, size)] * 3])
    server.files, server.if_range = SimpleNamespace(get=lambda path: next(contents)), if_range
    server.faults[PTB.path] = [4000]
    assert fetch("v2", "--only", "ptb") == 0
    assert read_fetched(tmp_path, PTB) == make_ids(99, size)


@pytest.mark.parametrize("status", [503, 429])
def test_a_busy_server_is_retried(fetch, server, tmp_path, status):
    server.faults[PTB.path] = [status, status]
    assert fetch("v2", "--only", "ptb") == 0
    assert read_fetched(tmp_path, PTB) == CONTENT[PTB]
    assert len(server.requests) == 3


@pytest.mark.parametrize(("value", "seconds"), [("0", 0.25), ("7", 7.0), ("Fri, 31 Dec 2027 23:59:59 GMT", 0.25)])
def test_retry_after_sets_the_pause(fetch, server, monkeypatch, value, seconds):
    slept = []
    monkeypatch.setattr(download, "MAX_PAUSE_SECONDS", 60.0)
    monkeypatch.setattr(download.time, "sleep", slept.append)
    monkeypatch.setattr(download, "PAUSE_SECONDS", 0.25)
    server.headers["Retry-After"] = value
    server.faults[PTB.path] = [503, 503]
    assert fetch("v2", "--only", "ptb") == 0
    assert [s for s in slept if s] == [seconds, max(seconds, 0.5)]


def test_a_server_that_stays_busy_fails_only_its_set(fetch, server, tmp_path, capsys):
    server.faults[PTB.path] = [503] * 100
    assert fetch("v2", "--only", "ptb", "ice") == 1
    assert len([path for path, *_ in server.requests if path == PTB.path]) == download.MAX_ATTEMPTS
    error = capsys.readouterr().err
    assert f"error: v2/ptb: {server.url}/{PTB.path}: HTTP 503" in error
    assert "error: 1 of 2 sets could not be fetched: v2/ptb" in error
    assert read_fetched(tmp_path, ICE) == CONTENT[ICE]


@pytest.mark.parametrize(("status", "name"), [(404, "Not Found")])
def test_a_missing_file_is_not_retried(fetch, server, capsys, status, name):
    server.faults[ICE.path] = [status]
    assert fetch("v2") == 1
    out, error = capsys.readouterr()
    assert [line for line in error.splitlines() if "error: " in line] == [
        f"error: v2/ice: {server.url}/{ICE.path}: HTTP {status} {name}",
        "error: 1 of 13 sets could not be fetched: v2/ice; see the errors above",
    ]
    assert len(server.requests) == 13
    assert "v2/ptb" in out
    assert "v2/ice" not in out


@pytest.mark.parametrize(
    ("header", "value", "message"),
    [
        ("Content-Length", "10002", "the connection closed after 10,000 of 10,002 bytes, 6 times in a row"),
        ("Content-Length", None, "the server sends the file compressed or without its length"),
        ("Content-Encoding", "gzip", "the server sends the file compressed or without its length"),
    ],
)
def test_an_incomplete_or_encoded_response_is_refused(fetch, server, tmp_path, capsys, header, value, message):
    server.headers[header] = value
    server.ranges = False
    assert fetch("v2", "--only", "ptb") == 1
    assert message in capsys.readouterr().err
    assert not PTB.file(tmp_path / "to").exists()


def fail_to_resolve(*_: object, **__: object) -> NoReturn:
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def test_an_unreachable_server_prints_the_urls(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", fail_to_resolve)
    monkeypatch.setenv("no_proxy", "*")
    host = "http://no-such-host.invalid/a/b"
    assert main(["data", "fetch", "v2", "--to", str(tmp_path), "--mirror", host]) == 1
    out, error = capsys.readouterr()
    assert out.splitlines() == [f"{host}/{olmo_set.path}" for olmo_set in list_olmo_sets("v2")]
    [line] = [line.strip() for line in error.replace("\r", "\n").splitlines() if "error: " in line]
    assert line.startswith(f"error: {host} cannot be reached from this machine (")
    assert "wget -x -nH --cut-dirs=2 -i urls.txt -P copies" in line
    assert "--mirror copies" in line


def test_only_missing_urls_are_printed(fetch, server, capsys):
    assert fetch("v2", "--only", "ptb", "ice") == 0
    capsys.readouterr()
    server.shutdown()
    server.server_close()
    assert fetch("v2", "--only", "ptb", "ice", "gab") == 1
    assert capsys.readouterr().out.splitlines() == [f"{server.url}/{OlmoSet('v2', 'gab').path}"]


@pytest.mark.parametrize("is_permanent", [False, True])
def test_a_server_lost_between_sets_fails_one_set_at_most(fetch, server, tmp_path, monkeypatch, capsys, is_permanent):
    lookups, resolve = [], socket.getaddrinfo

    def getaddrinfo(*arguments: object, **options: object) -> list:
        lookups.append(arguments)
        lost = range(1, 1 + download.MAX_ATTEMPTS) if is_permanent else [1]
        return fail_to_resolve() if len(lookups) - 1 in lost else resolve(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert fetch("v2", "--only", "gab", "ice", "ptb") == is_permanent
    error = capsys.readouterr().err
    assert "wget" not in error
    for olmo_set in (OlmoSet("v2", "gab"), PTB, *([] if is_permanent else [ICE])):
        assert read_fetched(tmp_path, olmo_set) == CONTENT[olmo_set]
    if is_permanent:
        assert f"error: v2/ice: {server.url}/{ICE.path}: Temporary failure in name resolution, 6 times in" in error
        assert "error: 1 of 3 sets could not be fetched: v2/ice" in error


def test_a_silent_server_times_out(fetch, server, monkeypatch, capsys):
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(download, "MAX_ATTEMPTS", 2)
    server.pause, server.ranges = 0.5, False
    begin = time.monotonic()
    assert fetch("v2", "--only", "ptb") == 1
    assert time.monotonic() - begin < 20
    assert "timed out" in capsys.readouterr().err


SMALL_DISK = """
import resource, sys
from stackexp.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_is_one_error_line(server, tmp_path):
    command = ["data", "fetch", "v2", "--only", "ptb", "--mirror", server.url, "--to", str(tmp_path / "to")]
    result = subprocess.run([sys.executable, "-c", SMALL_DISK, *command], capture_output=True, text=True)
    assert result.returncode == 1
    [line] = [line for line in result.stderr.replace("\r", "\n").splitlines() if "error: " in line]
    assert line.strip().startswith(f"error: {tmp_path / 'to'}: cannot be written (File too large); free space")
    assert not PTB.file(tmp_path / "to").exists()


@pytest.mark.parametrize("target", ["ftp://127.0.0.1/x", "file:///etc/passwd"])
def test_redirects_to_other_schemes_are_refused(fetch, server, target, tmp_path, capsys):
    server.faults[PTB.path], server.redirect = [302], target
    assert fetch("v2", "--only", "ptb") == 1
    assert target in capsys.readouterr().err
    assert not list((tmp_path / "to").rglob("*.npy"))


def test_file_larger_than_the_free_space_is_refused_before_the_download(fetch, server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    assert fetch("v2", "--only", "ptb") == 1
    message = f"{len(CONTENT[PTB]):,} bytes are needed, but only 100 are free; free space or choose another --to"
    assert message in capsys.readouterr().err


def test_failed_fetch_leaves_nothing_behind(server, tmp_path):
    server.files.clear()
    (tmp_path / "other").mkdir()
    for folder in ("to", "other"):
        assert main(["data", "fetch", "v2", "v3", "--mirror", server.url, "--to", str(tmp_path / folder)]) == 1
    assert not list(tmp_path.iterdir())
