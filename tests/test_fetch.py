"""`data fetch`: downloads from a faulty server, checks of OLMo's sets, local mirrors and one-line errors."""

import json
import resource
import shutil
import socket
import time
import urllib.request
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest
from olmo_files import CONTENT, ICE, PTB, list_part_files, make_ids, read_fetched
from processes import wait_until

from stackexp.data import fetch as fetching
from stackexp.data.olmo import OlmoSet
from stackexp.data.token_files import read_record


@pytest.fixture
def fetch(server, tmp_path, capture):
    """`fetch(arguments)` fetches from the server, or from `mirror`; returns what it prints: `out` and `err`."""

    def run(arguments: str, mirror: object = server.url, to: str = "to", expect: int = 0):
        return capture(f"data fetch {arguments}", "--mirror", mirror, "--to", tmp_path / to, expect=expect)

    return run


def find_error(errors: str) -> str:
    """Return the one line that is an error, without progress before it."""
    [line] = [line.strip() for line in errors.splitlines() if "error: " in line]
    return line


@pytest.mark.parametrize(
    ("ids", "end"),
    [
        ([5, 0, 7, 0, 9, 50_276], 0),  # truncated after two spaces
        ([5, 0, 7, 50_279, 8, 50_279], 50_279),  # 0 is that tokenizer's IP address mask
        ([5, 50_279, 7, 0, 8, 0], 0),
        ([5, 50_279, 0, 50_279, 8], 50_279),  # truncated
        ([5, 50_276, 8], None),
        ([5, 50_276, 8, 50_276], 50_276),
    ],
)
def test_the_last_id_ends_documents_and_a_truncated_file_is_reported(fetch, server, tmp_path, ids, end):
    server.files[PTB.path] = np.array(ids, "<u2").tobytes()
    errors = fetch("v2 --only ptb").err
    record = read_record(PTB.file(tmp_path / "to"))
    assert (record.end_of_text, record.documents) == (end, ids.count(end) or None)
    assert ("v2/ptb ends within a document" in errors) == (ids[-1] != end)


def test_wrong_number_of_instances_is_reported(fetch, server):
    server.files[PTB.path] = make_ids(1, 46 * 2048 - 1)
    assert "note" not in fetch("v2 --only ptb").err
    server.files[ICE.path] = make_ids(1, 494 * 2048 - 1)
    note = "note: v2/ice has 493 instances of 2048 tokens, but OLMo's file has 494"
    assert note in fetch("v2 --only ice").err


def test_all_sets_are_fetched_with_records_and_a_table(fetch, server, tmp_path):
    table = fetch("v2 v3").out.splitlines()
    assert {olmo_set: read_fetched(tmp_path, olmo_set) for olmo_set in CONTENT} == CONTENT
    record = read_record(PTB.file(tmp_path / "to"))
    assert (record.tokens, record.bytes, record.source) == (5000, 10_000, f"{server.url}/{PTB.path}")
    assert "instances of 2048" in table[0]
    [row] = [line.split() for line in table if line.startswith("v2/ptb")]
    assert row == ["v2/ptb", "2", "5,000", "10,000", record.sha256[:12]]


@pytest.mark.parametrize("damage", ["cut", "changed", "record"])
def test_complete_sets_are_kept_and_a_damaged_one_is_fetched_again(fetch, server, tmp_path, damage):
    fetch("v2 --only ptb,ice")
    requests = len(server.requests)
    assert "v2/ptb: already fetched" in fetch("v2 --only ptb ice").err
    assert len(server.requests) == requests
    path = PTB.file(tmp_path / "to")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-2])
    elif damage == "changed":
        path.write_bytes(path.read_bytes()[:-4] + b"\1\0\0\0")
    else:
        path.with_name("ptb.npy.json").write_text("{")
    fetch("v2 --only ptb")
    assert read_fetched(tmp_path, PTB) == CONTENT[PTB]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (CONTENT[PTB][:-1], "9,999 bytes are not a whole number"),
        (b"", "empty"),
        (np.array([5, 50_279, 50_280, 7], "<u2").tobytes(), "id 50,280 at position 2 is outside the vocabulary"),
        (b"\n<!DOCTYPE html><title>Caf\xc3\xa9</title>" + b"x" * 1000, "text, not token ids; it begins: <!DOC"),
        (b"404 page not found\n", "it begins: 404 page not found"),
        (b"\x93NUMPY\x01\x00" + bytes(120), "has a .npy header, unlike OLMo's files"),
    ],
)
def test_files_without_valid_ids_are_refused(fetch, server, tmp_path, body, message):
    server.files[PTB.path] = body
    error = fetch("v2 --only ptb", expect=1).err
    assert f"{server.url}/{PTB.path}: " in error
    assert message in error
    assert list_part_files(tmp_path) == []
    assert not PTB.file(tmp_path / "to").exists()
    server.files[PTB.path] = CONTENT[PTB]
    fetch("v2 --only ptb")


def test_a_proxy_is_used(server, fetch, tmp_path, monkeypatch):
    host = "http://no-such-host.invalid"
    server.files = {f"{host}/{PTB.path}": CONTENT[PTB]}
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the environment of its first use
    fetch("v2 --only ptb", host)
    assert read_fetched(tmp_path, PTB) == CONTENT[PTB]


def test_concurrent_fetches_download_once(fetch, server, tmp_path, program):
    server.pause = 0.2
    process = program.start("data", "fetch", "v2", "--only", "ptb", "--mirror", server.url, "--to", tmp_path / "to")
    wait_until(lambda: bool(server.requests), process, 60)
    assert "waiting for another process to finish fetching into" in fetch("v2 --only ptb").err
    assert process.wait(60) == 0, process.stdout.read()
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "get_path", [lambda one: one.path, lambda one: f"{one.version}/{one.name}.npy"], ids=["server", "fetch"]
)
def test_a_folder_is_a_mirror_in_either_layout(fetch, tmp_path, get_path):
    for olmo_set, data in CONTENT.items():
        path = tmp_path / "mirror" / get_path(olmo_set)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    fetch("v2 v3", tmp_path / "mirror")
    assert {olmo_set: read_fetched(tmp_path, olmo_set) for olmo_set in CONTENT} == CONTENT
    assert read_record(PTB.file(tmp_path / "to")).source.endswith(get_path(PTB))
    assert fetch("v2 v3", tmp_path / "mirror").err.count("already fetched") == 24


def test_files_copied_into_the_target_are_checked_in_place(tmp_path, fetch):
    path = PTB.file(tmp_path / "to")
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[PTB])
    fetch("v2 --only ptb", tmp_path / "to")
    assert read_fetched(tmp_path, PTB) == CONTENT[PTB]
    path.write_bytes(CONTENT[PTB][:-1])
    fetch("v2 --only ptb", tmp_path / "to", expect=1)
    assert path.exists(), "damaged, but the user's own file"


def test_a_mirror_that_differs_from_its_record_is_refused(fetch, tmp_path):
    fetch("v2 --only ptb")
    mirror = tmp_path / "mirror"
    shutil.copytree(tmp_path / "to", mirror)
    PTB.file(mirror).write_bytes(CONTENT[ICE])
    error = fetch("v2 --only ptb", mirror, to="other", expect=1).err
    assert "ptb.npy: damaged, its SHA-256 differs from its record" in error
    assert not PTB.file(tmp_path / "other").exists()
    PTB.file(mirror).write_bytes(CONTENT[PTB])
    fetch("v2 --only ptb", mirror, to="other")
    assert read_record(PTB.file(tmp_path / "other")) == read_record(PTB.file(tmp_path / "to"))


@pytest.mark.parametrize("unreadable", ["record", "file"])
def test_an_unreadable_file_of_a_mirror_fails_only_its_set(tmp_path, fetch, unreadable):
    mirror = tmp_path / "mirror"
    PTB.file(mirror).parent.mkdir(parents=True)
    PTB.file(mirror).write_bytes(CONTENT[PTB])
    if unreadable == "record":
        ICE.file(mirror).write_bytes(CONTENT[ICE])
        ICE.file(mirror).with_name("ice.npy.json").mkdir()
    else:
        ICE.file(mirror).symlink_to("/proc/self/mem")  # reading its first byte fails
    error = fetch("v2 --only ptb ice", mirror, expect=1).err
    suffix = ".json" if unreadable == "record" else ""
    assert f"error: v2/ice: {ICE.file(mirror)}{suffix}: cannot be" in error
    assert "free space" not in error
    assert read_fetched(tmp_path, PTB) == CONTENT[PTB]
    assert list_part_files(tmp_path) == []


def test_files_of_another_tokenizer_are_not_overwritten(fetch, tmp_path):
    fetch("v2 --only ptb")
    record = PTB.file(tmp_path / "to").with_name("ptb.npy.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"tokenizer": "0123"}))
    error = fetch("v2 --only ptb", expect=1).err
    assert "exists and belongs to another tokenizer; choose another --to" in error


# Downloads from a faulty server


def test_a_broken_connection_and_a_busy_server_are_retried(fetch, server, tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr(fetching.time, "sleep", slept.append)
    monkeypatch.setattr(fetching, "PAUSE_SECONDS", 0.25)
    server.faults[PTB.path] = [4000, 503, 429]
    fetch("v2 --only ptb")
    assert read_fetched(tmp_path, PTB) == CONTENT[PTB]
    assert [status for _, status in server.requests] == [200, 503, 429, 200]
    assert [seconds for seconds in slept if seconds] == [0.25, 0.5, 1.0]
    assert list_part_files(tmp_path) == []


@pytest.mark.parametrize("size", [5000, 1000])
def test_a_file_that_changes_on_the_server_starts_over(fetch, server, tmp_path, size):
    contents = iter([CONTENT[PTB], make_ids(99, size)])
    server.files = SimpleNamespace(get=lambda path: next(contents))
    server.faults[PTB.path] = [4000]
    fetch("v2 --only ptb")
    assert read_fetched(tmp_path, PTB) == make_ids(99, size)


def test_a_server_that_stays_busy_fails_only_its_set(fetch, server, tmp_path):
    server.faults[PTB.path] = [503] * 100
    error = fetch("v2 --only ptb ice", expect=1).err
    assert [path for path, _ in server.requests].count(PTB.path) == fetching.MAX_ATTEMPTS
    assert f"error: v2/ptb: {server.url}/{PTB.path}: HTTP 503" in error
    assert "error: 1 of 2 sets could not be fetched: v2/ptb" in error
    assert read_fetched(tmp_path, ICE) == CONTENT[ICE]


def test_a_missing_file_is_not_retried(fetch, server):
    server.faults[ICE.path] = [404]
    out, error = fetch("v2", expect=1)
    assert [line for line in error.splitlines() if "error: " in line] == [
        f"error: v2/ice: {server.url}/{ICE.path}: HTTP 404 Not Found",
        "error: 1 of 13 sets could not be fetched: v2/ice; see the errors above",
    ]
    assert len(server.requests) == 13
    assert "v2/ptb" in out
    assert "v2/ice" not in out


@pytest.mark.parametrize(
    ("length", "message"),
    [
        ("10002", "the connection closed after 10,000 of 10,002 bytes, attempt 6 of 6"),
        (None, "without its length"),
    ],
)
def test_an_incomplete_response_is_refused(fetch, server, tmp_path, length, message):
    server.headers["Content-Length"] = length
    assert message in fetch("v2 --only ptb", expect=1).err
    assert not PTB.file(tmp_path / "to").exists()


def fail_to_resolve(*_: object, **__: object) -> NoReturn:
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def test_an_unreachable_server_stops_the_command(fetch, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", fail_to_resolve)
    monkeypatch.setenv("no_proxy", "*")
    line = find_error(fetch("v2", "http://no-such-host.invalid/a/b", expect=1).err)
    assert "http://no-such-host.invalid/a/b/v2_small_gptneox20b/4chan/val.npy: cannot be reached" in line
    assert "--mirror" in line


@pytest.mark.parametrize(
    "url", ["http://[::1/x", "http://h/a b", "http://h:port/x", f"http://{'h' * 64}/x", "http://h/é"]
)
def test_an_invalid_url_stops_the_command(fetch, monkeypatch, url):
    monkeypatch.setenv("no_proxy", "*")
    assert "not a valid URL" in find_error(fetch("v2", url, expect=1).err)


def test_a_short_loss_of_the_server_is_retried(fetch, server, tmp_path, monkeypatch):
    lookups, resolve = [], socket.getaddrinfo

    def getaddrinfo(*arguments: object, **options: object) -> list:
        lookups.append(arguments)
        return fail_to_resolve() if len(lookups) == 1 else resolve(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    fetch("v2 --only gab ice ptb")
    for olmo_set in (OlmoSet("v2", "gab"), PTB, ICE):
        assert read_fetched(tmp_path, olmo_set) == CONTENT[olmo_set]


def test_a_silent_server_times_out(fetch, server, monkeypatch):
    monkeypatch.setattr(fetching, "TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(fetching, "MAX_ATTEMPTS", 2)
    server.pause = 0.5
    begin = time.monotonic()
    assert "timed out" in fetch("v2 --only ptb", expect=1).err
    assert time.monotonic() - begin < 20


def test_a_folder_that_cannot_be_written_and_a_full_disk_are_one_error_line(fetch, tmp_path, invoke):
    (tmp_path / "file").write_text("")
    line = invoke("data fetch v2 --to", tmp_path / "file", expect=1)
    assert line.startswith(f"error: {tmp_path / 'file' / 'v2'}: cannot be written (Not a directory)")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        line = find_error(fetch("v2 --only ptb", expect=1).err)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert line.startswith(f"error: {tmp_path / 'to'}: cannot be written (File too large); free space")
    assert not PTB.file(tmp_path / "to").exists()


def test_a_redirect_to_a_local_file_is_refused(fetch, server, tmp_path):
    server.faults[PTB.path], server.redirect = [302], "file:///etc/passwd"
    assert "file:///etc/passwd" in fetch("v2 --only ptb", expect=1).err
    assert not list((tmp_path / "to").rglob("*.npy"))
