"""Fetching OLMo's sets: from a server with every fault, from folders, and what the user is told."""

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from typing import NoReturn

import numpy as np
import pytest
from file_server import FileServer
from processes import kill, wait_until

from stackexp.cli import main
from stackexp.data import download, olmo
from stackexp.data.olmo import NAMES, OlmoSet, olmo_sets
from stackexp.data.token_files import TokenFile, read_record, sha256_of

PTB, ICE = OlmoSet("v2", "ptb"), OlmoSet("v2", "ice")


def raw(seed: int, count: int = 5000, end: int = 0) -> bytes:
    ids = np.random.default_rng(seed).integers(0, olmo.VOCAB_SIZE, count).astype("<u2")
    ids[[count // 2, -1]] = end
    return ids.tobytes()


CONTENT = {one: raw(n) for n, one in enumerate([*olmo_sets("v2"), *olmo_sets("v3")])}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "LONGEST_PAUSE", 0.0)
    with FileServer() as server:
        server.files = {one.path: content for one, content in CONTENT.items()}
        yield server


@pytest.fixture
def fetch(server, tmp_path):
    """`fetch(*arguments)` from the server; its exit code."""
    return lambda *arguments: main(["data", "fetch", *arguments, "--mirror", server.url, "--to", str(tmp_path / "to")])


def content(tmp_path, one: OlmoSet) -> bytes:
    """The fetched file, which its record vouches for."""
    path = one.file(tmp_path / "to")
    assert TokenFile(path).record.sha256 == sha256_of(path)
    return path.read_bytes()


def leftovers(tmp_path) -> list[str]:
    return [p.name for p in (tmp_path / "to" / "v2").iterdir() if ".part" in p.name]


def test_the_catalogue():
    assert [len(NAMES[version]) for version in ("v2", "v3")] == [13, 11]
    assert PTB.url == "https://olmo-data.org/eval-data/perplexity/v2_small_gptneox20b/ptb/val.npy"
    books = OlmoSet("v3", "dolma_books")
    assert books.url == (
        "https://olmo-data.org/eval-data/perplexity/v3_small_gptneox20b/dolma_books/val/part-0-00000.npy"
    )
    assert [one.instances for one in (PTB, ICE, books)] == [45, 494, None]


@pytest.mark.parametrize("end", [0, 50_276, 50_279])
def test_the_end_of_a_document_is_what_the_file_ends_with(fetch, server, tmp_path, end):
    server.files[PTB.path] = raw(1, end=end)
    assert fetch("v2", "--only", "ptb") == 0
    record = read_record(PTB.file(tmp_path / "to"))
    assert record.end_of_text == end
    assert record.documents == (TokenFile(PTB.file(tmp_path / "to")).tokens == end).sum()


@pytest.mark.parametrize(
    ("ids", "end"),
    [
        ([5, 0, 7, 0, 9, 50_276], 0),  # cut after two spaces
        ([5, 0, 7, 50_279, 8, 50_279], 50_279),  # 0 is a mask of that tokenizer
        ([5, 50_279, 7, 0, 8, 0], 0),
        ([5, 50_279, 0, 50_279, 8], 50_279),  # cut
        ([5, 50_276, 8], None),
    ],
)
def test_one_id_at_the_end_does_not_mislead(fetch, server, tmp_path, capsys, ids, end):
    server.files[PTB.path] = np.array(ids, "<u2").tobytes()
    assert fetch("v2", "--only", "ptb") == 0
    record = read_record(PTB.file(tmp_path / "to"))
    assert (record.end_of_text, record.documents) == (end, ids.count(end) or None)
    assert ("v2/ptb ends within a document" in capsys.readouterr().err) == (ids[-1] != end)


def test_a_set_not_as_long_as_olmos_is_remarked_on(fetch, server, capsys):
    server.files[PTB.path] = raw(1, 46 * 2048 - 1)
    assert fetch("v2", "--only", "ptb") == 0
    assert "note" not in capsys.readouterr().err
    server.files[ICE.path] = raw(1, 494 * 2048 - 1)
    assert fetch("v2", "--only", "ice") == 0
    assert "note: v2/ice has 493 instances of 2048 tokens, OLMo's own 494" in capsys.readouterr().err


def test_everything(fetch, server, tmp_path, capsys):
    assert fetch("v2", "v3") == 0
    assert {one: content(tmp_path, one) for one in CONTENT} == CONTENT
    record = read_record(PTB.file(tmp_path / "to"))
    assert (record.tokens, record.bytes, record.source) == (5000, 10_000, f"{server.url}/{PTB.path}")
    table = capsys.readouterr().out.splitlines()
    assert "instances of 2048" in table[0]
    [row] = [line.split() for line in table if line.startswith("v2/ptb")]
    assert row == ["v2/ptb", "2", "5,000", "10,000", record.sha256[:12]]


def test_what_is_there_is_not_fetched_again(fetch, server, tmp_path, capsys):
    fetch("v2", "--only", "ptb,ice")
    asked = len(server.requests)
    assert fetch("v2", "--only", "ptb", "ice") == 0
    assert len(server.requests) == asked
    assert "v2/ptb: already there" in capsys.readouterr().err


def test_verify_finds_a_changed_byte(fetch, server, tmp_path, capsys):
    fetch("v2", "--only", "ptb")
    path = PTB.file(tmp_path / "to")
    path.write_bytes(path.read_bytes()[:-2] + b"\x01\x00")
    assert fetch("v2", "--only", "ptb") == 0
    assert content_differs(path)
    assert fetch("v2", "--only", "ptb", "--verify") == 0
    assert "fetching it again" in capsys.readouterr().err
    assert content(tmp_path, PTB) == CONTENT[PTB]


def content_differs(path) -> bool:
    return sha256_of(path) != read_record(path).sha256


@pytest.mark.parametrize("damage", ["cut", "record"])
def test_a_damaged_set_is_fetched_again(fetch, tmp_path, damage):
    fetch("v2", "--only", "ptb")
    path = PTB.file(tmp_path / "to")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-2])
    else:
        path.with_name("ptb.npy.json").write_text("{")
    assert fetch("v2", "--only", "ptb") == 0
    assert content(tmp_path, PTB) == CONTENT[PTB]


def test_a_connection_that_breaks_off_is_gone_on_with(fetch, server, tmp_path):
    server.faults[PTB.path] = [4000, 3001]
    assert fetch("v2", "--only", "ptb") == 0
    assert content(tmp_path, PTB) == CONTENT[PTB]
    assert [request[1:] for request in server.requests] == [
        (None, 200),
        ("bytes=4000-", 206),
        ("bytes=7001-", 206),
    ]
    assert leftovers(tmp_path) == []


def test_breaks_that_bring_something_new_may_be_many(fetch, server, tmp_path):
    server.faults[PTB.path] = [600] * 15
    assert fetch("v2", "--only", "ptb") == 0
    assert content(tmp_path, PTB) == CONTENT[PTB]


def test_a_server_that_ignores_range_sends_it_all_again(fetch, server, tmp_path):
    server.ranges = False
    server.faults[PTB.path] = [4000, 2000, 4001]
    assert fetch("v2", "--only", "ptb") == 0
    assert content(tmp_path, PTB) == CONTENT[PTB]
    assert [request[2] for request in server.requests] == [200] * 4


@pytest.mark.parametrize("if_range", [True, False])
@pytest.mark.parametrize("size", [5000, 4000, 1000])
def test_a_file_that_changed_in_between_is_begun_anew(fetch, server, tmp_path, if_range, size):
    server.if_range = if_range
    server.faults[PTB.path] = [4000, 404]
    assert fetch("v2", "--only", "ptb") == 1
    assert leftovers(tmp_path) != []
    server.files[PTB.path] = raw(99, size)
    assert fetch("v2", "--only", "ptb") == 0
    assert content(tmp_path, PTB) == raw(99, size)


@pytest.mark.parametrize("tag", [None, 'W/"weak"'])
def test_a_part_of_who_knows_which_file_is_not_used(fetch, server, tmp_path, tag):
    server.headers["ETag"] = tag
    server.faults[PTB.path] = [4000, 404]
    assert fetch("v2", "--only", "ptb") == 1
    assert fetch("v2", "--only", "ptb") == 0
    assert content(tmp_path, PTB) == CONTENT[PTB]
    assert {request[1] for request in server.requests} == {None}


def test_the_time_of_change_tells_files_apart_too(fetch, server, tmp_path):
    server.headers |= {"ETag": None, "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}
    server.if_range = False
    server.faults[PTB.path] = [4000]
    assert fetch("v2", "--only", "ptb") == 0
    assert content(tmp_path, PTB) == CONTENT[PTB]
    assert server.requests[-1][1:] == ("bytes=4000-", 206)


def test_what_goes_on_with_a_file_need_not_say_when_it_changed(fetch, server, tmp_path):
    server.headers["Last-Modified"] = "Wed, 21 Oct 2026 07:28:00 GMT"
    server.partial_headers["Last-Modified"] = None
    server.faults[PTB.path] = [4000]
    assert fetch("v2", "--only", "ptb") == 0
    assert content(tmp_path, PTB) == CONTENT[PTB]
    assert [request[1:] for request in server.requests] == [(None, 200), ("bytes=4000-", 206)]


@pytest.mark.parametrize("status", [503, 500, 429])
def test_a_busy_server_is_asked_again(fetch, server, tmp_path, status):
    server.faults[PTB.path] = [status, status]
    assert fetch("v2", "--only", "ptb") == 0
    assert content(tmp_path, PTB) == CONTENT[PTB]
    assert len(server.requests) == 3


@pytest.mark.parametrize(("value", "seconds"), [("0", 0.25), ("7", 7.0), ("Fri, 31 Dec 2027 23:59:59 GMT", 0.25)])
def test_the_pause_that_a_server_asks_for(fetch, server, monkeypatch, value, seconds):
    slept = []
    monkeypatch.setattr(download, "LONGEST_PAUSE", 60.0)
    monkeypatch.setattr(download.time, "sleep", slept.append)
    monkeypatch.setattr(download, "PAUSE", 0.25)
    server.headers["Retry-After"] = value
    server.faults[PTB.path] = [503, 503]
    assert fetch("v2", "--only", "ptb") == 0
    assert [s for s in slept if s] == [seconds, max(seconds, 0.5)]


def test_a_server_that_stays_busy_is_given_up(fetch, server, tmp_path, capsys):
    server.faults[PTB.path] = [503] * 100
    assert fetch("v2", "--only", "ptb", "ice") == 1
    assert len([path for path, *_ in server.requests if path == PTB.path]) == download.ATTEMPTS
    error = capsys.readouterr().err
    assert f"error: v2/ptb: {server.url}/{PTB.path}: HTTP 503" in error
    assert "error: 1 of 2 sets could not be fetched: v2/ptb" in error
    assert content(tmp_path, ICE) == CONTENT[ICE]


@pytest.mark.parametrize("status", [404, 403])
def test_what_is_not_there_is_named_at_once_and_the_rest_fetched(fetch, server, tmp_path, capsys, status):
    server.faults[ICE.path] = [status]
    assert fetch("v2") == 1
    out, error = capsys.readouterr()
    assert [line for line in error.splitlines() if "error" in line] == [
        f"error: v2/ice: {server.url}/{ICE.path}: HTTP {status} {'Not Found' if status == 404 else 'Forbidden'}",
        "error: 1 of 13 sets could not be fetched: v2/ice; see above",
    ]
    assert len(server.requests) == 13
    assert "v2/ptb" in out
    assert "v2/ice" not in out


def test_a_body_shorter_than_its_length_is_not_taken_for_whole(fetch, server, tmp_path, capsys):
    server.headers["Content-Length"] = "10002"
    server.ranges = False
    assert fetch("v2", "--only", "ptb") == 1
    assert "broke off after 10,000 of 10,002 bytes, 6 times in a row" in capsys.readouterr().err
    assert not PTB.file(tmp_path / "to").exists()


def test_a_server_that_gives_no_length(fetch, server, capsys):
    server.headers["Content-Length"] = None
    assert fetch("v2", "--only", "ptb") == 1
    assert "does not say how long the file is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (CONTENT[PTB][:-1], "9,999 bytes are no whole number of token ids of two bytes"),
        (b"", "0 bytes are no whole number"),
        (np.array([5, 50_279, 50_280, 7], "<u2").tobytes(), "id 50,280 at position 2 is not GPT-NeoX-20B's"),
        (
            b"\n<!DOCTYPE html><title>Caf\xc3\xa9</title>" + b"x" * 1000,
            "a page of text, not token ids; it begins: <!DOC",
        ),
        (b"404 page not found\n", "it begins: 404 page not found"),
        (b"\x93NUMPY\x01\x00" + bytes(120), "with a header, which OLMo's files have not"),
    ],
)
def test_what_are_no_ids_is_refused(fetch, server, tmp_path, capsys, body, message):
    server.files[PTB.path] = body
    assert fetch("v2", "--only", "ptb") == 1
    error = capsys.readouterr().err
    assert f"{server.url}/{PTB.path}: " in error
    assert message in error
    assert leftovers(tmp_path) == []
    assert not PTB.file(tmp_path / "to").exists()
    server.files[PTB.path] = CONTENT[PTB]
    assert fetch("v2", "--only", "ptb") == 0


def test_a_compressed_file_is_refused(fetch, server, capsys):
    server.headers["Content-Encoding"] = "gzip"
    assert fetch("v2", "--only", "ptb") == 1
    assert "the server sends the file in gzip" in capsys.readouterr().err


def test_a_proxy_is_used(server, tmp_path, monkeypatch):
    host = "http://no-such-host.invalid"
    server.files = {f"{host}/{PTB.path}": CONTENT[PTB]}
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the environment of its first use
    assert main(["data", "fetch", "v2", "--only", "ptb", "--mirror", host, "--to", str(tmp_path / "to")]) == 0
    assert content(tmp_path, PTB) == CONTENT[PTB]


def test_an_html_page_is_named(fetch, server, capsys):
    server.headers["Content-Type"] = "text/html; charset=utf-8"
    assert fetch("v2", "--only", "ptb") == 1
    assert "the server sends an HTML page" in capsys.readouterr().err


def no_such_name(*_: object, **__: object) -> NoReturn:
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def test_without_a_way_to_the_server(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    monkeypatch.setenv("no_proxy", "*")
    host = "http://no-such-host.invalid/a/b"
    assert main(["data", "fetch", "v2", "--to", str(tmp_path), "--mirror", host]) == 1
    out, error = capsys.readouterr()
    assert out.splitlines() == [f"{host}/{one.path}" for one in olmo_sets("v2")]
    [line] = [line.strip() for line in error.replace("\r", "\n").splitlines() if "error" in line]
    assert line.startswith(f"error: {host} cannot be reached from this machine (")
    assert "wget -x -nH --cut-dirs=2 -i urls.txt -P copies" in line
    assert "--mirror copies" in line


@pytest.mark.parametrize("lasting", [False, True])
def test_a_server_that_is_lost_in_between_fails_no_other_set(fetch, server, tmp_path, monkeypatch, capsys, lasting):
    lookups, find = [], socket.getaddrinfo

    def getaddrinfo(*arguments: object, **options: object) -> list:
        lookups.append(arguments)
        lost = range(1, 1 + download.ATTEMPTS) if lasting else [1]
        return no_such_name() if len(lookups) - 1 in lost else find(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert fetch("v2", "--only", "gab", "ice", "ptb") == lasting
    error = capsys.readouterr().err
    assert "wget" not in error
    for one in (OlmoSet("v2", "gab"), PTB, *([] if lasting else [ICE])):
        assert content(tmp_path, one) == CONTENT[one]
    if lasting:
        assert f"error: v2/ice: {server.url}/{ICE.path}: Temporary failure in name resolution, 6 times in" in error
        assert "error: 1 of 3 sets could not be fetched: v2/ice" in error


def test_a_redirect_loop_is_one_line(fetch, server, capsys):
    server.headers["Location"] = f"{server.url}/{PTB.path}"
    server.faults[PTB.path] = [302] * 20
    assert fetch("v2", "--only", "ptb") == 1
    lines = [line.strip() for line in capsys.readouterr().err.replace("\r", "\n").splitlines()]
    *_, line, last = filter(None, lines)
    assert line.startswith(f"error: v2/ptb: {server.url}/{PTB.path}: HTTP 302")
    assert last.startswith("error: 1 of 1 sets")


def test_only_what_is_missing_is_listed_for_elsewhere(fetch, server, tmp_path, capsys):
    assert fetch("v2", "--only", "ptb", "ice") == 0
    capsys.readouterr()
    server.shutdown()
    server.server_close()
    assert fetch("v2", "--only", "ptb", "ice", "gab") == 1
    assert capsys.readouterr().out.splitlines() == [f"{server.url}/{OlmoSet('v2', 'gab').path}"]


def test_a_killed_fetch_goes_on_where_it_was(server, tmp_path, program):
    server.files[PTB.path], server.pause = raw(7, 200_000), 0.01
    part = tmp_path / "to" / "v2" / ".ptb.npy.part"
    command = ("data", "fetch", "v2", "--only", "ptb", "--mirror", server.url, "--to", tmp_path / "to")
    process = program.start(*command)
    try:
        wait_until(lambda: part.exists() and part.stat().st_size > 50_000, process, 60)
    finally:
        kill(process)
    assert not PTB.file(tmp_path / "to").exists()
    kept, server.pause = part.stat().st_size, 0.0
    program.run(*command)
    assert content(tmp_path, PTB) == raw(7, 200_000)
    assert server.requests[-1][1:] == (f"bytes={kept}-", 206)


def test_two_at_once_fetch_once(fetch, server, tmp_path, program, capsys):
    server.pause = 0.2
    process = program.start("data", "fetch", "v2", "--only", "ptb", "--mirror", server.url, "--to", tmp_path / "to")
    wait_until(lambda: bool(server.requests), process, 60)
    assert fetch("v2", "--only", "ptb") == 0
    assert process.wait(60) == 0, process.stdout.read()
    assert "waiting for another process to finish fetching into" in capsys.readouterr().err
    assert len(server.requests) == 1


LAYOUTS = {
    "server": lambda one: one.path,
    "ours": lambda one: f"{one.version}/{one.name}.npy",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_as_mirror(tmp_path, layout, capsys):
    for one, data in CONTENT.items():
        path = tmp_path / "mirror" / LAYOUTS[layout](one)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    command = ["data", "fetch", "v2", "v3", "--mirror", str(tmp_path / "mirror"), "--to", str(tmp_path / "to")]
    assert main(command) == 0
    assert {one: content(tmp_path, one) for one in CONTENT} == CONTENT
    assert read_record(PTB.file(tmp_path / "to")).source.endswith(LAYOUTS[layout](PTB))
    assert main(command) == 0
    assert capsys.readouterr().err.count("already there") == 24


@pytest.mark.parametrize("place", ["v2_small_gptneox20b/ptb/val.npy", "v2/ptb.npy"])
def test_the_folder_of_one_version_as_mirror(tmp_path, capsys, place):
    path = tmp_path / "mirror" / place
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[PTB])
    folder = str(tmp_path / "mirror" / place.split("/")[0])
    command = ["--only", "ptb", "--mirror", folder, "--to", str(tmp_path / "to")]
    assert main(["data", "fetch", "v2", *command]) == 0
    assert content(tmp_path, PTB) == CONTENT[PTB]
    path.rename(path.with_name(path.name.replace("ptb", "pile")))
    command[1] = "pile"
    assert main(["data", "fetch", "v3", *command]) == 1  # a set of another version, or of another name
    assert "holds neither v3_small_gptneox20b/pile/val/part-0-00000.npy nor v3/pile.npy" in capsys.readouterr().err


def test_files_put_in_place_by_hand_are_taken_in(tmp_path):
    path = PTB.file(tmp_path / "to")
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[PTB])
    to = str(tmp_path / "to")
    assert main(["data", "fetch", "v2", "--only", "ptb", "--to", to, "--mirror", to]) == 0
    assert content(tmp_path, PTB) == CONTENT[PTB]
    path.write_bytes(CONTENT[PTB][:-1])
    assert main(["data", "fetch", "v2", "--only", "ptb", "--to", to, "--mirror", to]) == 1
    assert path.exists()  # bad, but the user's


def test_a_mirror_whose_record_tells_of_damage(fetch, tmp_path, capsys):
    fetch("v2", "--only", "ptb")
    mirror = tmp_path / "mirror"
    shutil.copytree(tmp_path / "to", mirror)
    command = ["data", "fetch", "v2", "--only", "ptb", "--to", str(tmp_path / "other"), "--mirror", str(mirror)]
    PTB.file(mirror).write_bytes(CONTENT[ICE])
    assert main(command) == 1
    assert "ptb.npy: damaged: its content is not what the record beside it says" in capsys.readouterr().err
    assert not PTB.file(tmp_path / "other").exists()
    PTB.file(mirror).write_bytes(CONTENT[PTB])
    assert main(command) == 0
    assert read_record(PTB.file(tmp_path / "other")) == read_record(PTB.file(tmp_path / "to"))


@pytest.mark.parametrize("what", ["record", "file"])
def test_what_cannot_be_read_of_a_mirror_fails_no_other_set(tmp_path, capsys, what):
    mirror = tmp_path / "mirror"
    PTB.file(mirror).parent.mkdir(parents=True)
    PTB.file(mirror).write_bytes(CONTENT[PTB])
    if what == "record":
        ICE.file(mirror).write_bytes(CONTENT[ICE])
        ICE.file(mirror).with_name("ice.npy.json").mkdir()
    else:
        ICE.file(mirror).symlink_to("/proc/self/mem")  # reading its first byte fails, whoever reads
    command = ["data", "fetch", "v2", "--only", "ptb", "ice", "--mirror", str(mirror), "--to", str(tmp_path / "to")]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert f"error: v2/ice: {ICE.file(mirror)}{'.json' if what == 'record' else ''}: cannot be read (I" in error
    assert "make room" not in error
    assert content(tmp_path, PTB) == CONTENT[PTB]
    assert leftovers(tmp_path) == []


def test_files_of_another_tokenizer_are_left_alone(fetch, tmp_path, capsys):
    fetch("v2", "--only", "ptb")
    record = PTB.file(tmp_path / "to").with_name("ptb.npy.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"tokenizer": "0123"}))
    assert fetch("v2", "--only", "ptb") == 1
    assert "a file of another tokenizer is there; choose another --to" in capsys.readouterr().err


def test_a_copy_that_may_be_cut_is_remarked_on(tmp_path, capsys):
    path = tmp_path / "mirror" / PTB.path
    path.parent.mkdir(parents=True)
    path.write_bytes(np.arange(1, 5000, dtype="<u2").tobytes())
    command = ["data", "fetch", "v2", "--only", "ptb", "--mirror", str(tmp_path / "mirror")]
    assert main([*command, "--to", str(tmp_path / "to")]) == 0
    assert "v2/ptb ends within a document" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected v2 or v3"),
        (["v4"], "expected v2 or v3, found 'v4'"),
        (["v2", "--only", "pyle"], "no set of v2; did you mean 'pile'?"),
        (["v3", "--only", "ptb"], "--only ptb: no set of v3; there are c4_en, dolma_books"),
        (["v3", "--only", "dolma_common_crawl"], "did you mean 'dolma_common-crawl'?"),
        (["v2", "--mirror", "no-such-folder"], "--mirror no-such-folder: no such folder"),
        (["v2", "--mirror", "s3://bucket"], "expected http://..., https://... or a folder"),
        (["v2", "--mirror", "http://[::1/x"], "--mirror http://[::1/x: no valid URL"),
        (["v2", "--mirror", "http://host/é"], "no valid URL; other characters than ASCII's are written %XX"),
        (["v2", "--mirror", f"http://{'h' * 64}/x"], "no valid URL"),
        (["v2", "--mirror", "http://host:port/x"], "no valid URL"),
        (["v2", "--mirror", "http:///x"], "no valid URL"),
        (["v2", "--mirror", "http://host/a b"], "no valid URL"),
        (["v2", "--mirror", "http://me:secret@host/x"], "--mirror: a URL without a user's name and password"),
        (["v2", "--onyl", "ptb"], "unknown option --onyl; did you mean '--only'?"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "fetch", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert "secret" not in line
    assert list(tmp_path.iterdir()) == []


def test_help_is_light():
    script = "import sys; sys.modules['numpy'] = None; from stackexp.cli import main; main(['data', 'fetch', '--help'])"
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert "--mirror" in ended.stdout


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["data", "fetch", "v2", "--to", str(tmp_path / "file")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'file' / 'v2'}: cannot be written (Not a directory)")


SMALL_DISK = """
import resource, sys
from stackexp.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_is_named_and_the_same_command_goes_on(fetch, server, tmp_path):
    command = ["data", "fetch", "v2", "--only", "ptb", "--mirror", server.url, "--to", str(tmp_path / "to")]
    ended = subprocess.run([sys.executable, "-c", SMALL_DISK, *command], capture_output=True, text=True)
    assert ended.returncode == 1
    [line] = [line for line in ended.stderr.replace("\r", "\n").splitlines() if "error" in line]
    assert line.strip().startswith(f"error: {tmp_path / 'to'}: cannot be written (File too large); make room")
    assert not PTB.file(tmp_path / "to").exists()
    assert fetch("v2", "--only", "ptb") == 0
    assert server.requests[-1][1:] == ("bytes=4000-", 206)
    assert content(tmp_path, PTB) == CONTENT[PTB]


def test_a_silent_server_is_given_up(fetch, server, monkeypatch, capsys):
    monkeypatch.setattr(download, "TIMEOUT", 0.05)
    monkeypatch.setattr(download, "ATTEMPTS", 2)
    server.pause, server.ranges = 0.5, False
    begin = time.monotonic()
    assert fetch("v2", "--only", "ptb") == 1
    assert time.monotonic() - begin < 5
    assert "timed out" in capsys.readouterr().err
