"""Several processes on several machines make one set: `--part I/N`, then the command without it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from corpora import files_of, write_many

from stackexp.data.locking import locked
from stackexp.data.packing import BAD_LINES, TAIL, damaged_file, unit_name
from stackexp.data.prepare import prepare
from stackexp.data.shards import TokenSet
from stackexp.errors import ConfigError, RunError
from stackexp.verbs.data_prepare import main

SETTINGS = {"context_length": 64, "unit_bytes": 20_000, "progress": False, "workers": 1}
COUNT = 12  # units


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_many(tmp_path_factory.mktemp("source"), 2 * COUNT)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    """The set as one process makes it."""
    folder = tmp_path_factory.mktemp("whole") / "set"
    prepare(source, folder, vocab_size=300, **SETTINGS)
    assert len(units(folder)) == COUNT
    return folder


def units(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("unit.*"))


@pytest.mark.parametrize("count", [1, 3, 20])
def test_parts_in_any_order_make_the_same_set(source, whole, tmp_path, count):
    for number in reversed(range(1, count + 1)):
        assert prepare(source, tmp_path / "set", vocab_size=300, part=(number, count), **SETTINGS) is None
        assert not (tmp_path / "set" / "corpus.json").exists()
    made = {unit: (tmp_path / "set" / unit).stat().st_ino for unit in units(tmp_path / "set")}
    corpus = prepare(source, tmp_path / "set", vocab_size=300, **SETTINGS)
    assert files_of(tmp_path / "set") == files_of(whole)
    assert {unit: (tmp_path / "set" / unit).stat().st_ino for unit in units(tmp_path / "set")} == made, "none anew"
    assert corpus == TokenSet(whole).corpus


def test_a_part_does_its_own_units_and_the_merge_what_is_missing(source, whole, tmp_path):
    prepare(source, tmp_path / "set", vocab_size=300, part=(2, 5), **SETTINGS)
    assert units(tmp_path / "set") == [unit_name(n) for n in (1, 6, 11)]
    prepare(source, tmp_path / "set", vocab_size=300, **SETTINGS)
    assert files_of(tmp_path / "set") == files_of(whole)
    before = files_of(tmp_path / "set")
    assert prepare(source, tmp_path / "set", vocab_size=300, part=(1, 5), **SETTINGS) is None
    assert files_of(tmp_path / "set") == before


DAMAGE = {
    "shard.00000.mds": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\7"),
    TAIL: lambda path: path.write_bytes(path.read_bytes()[:-2]),
    BAD_LINES: lambda path: path.unlink(),
    "unit.json": lambda path: path.write_text(path.read_text()[:-9]),
}


def test_damaged_units_are_named_and_done_again_when_merged(source, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "set")
    (tmp_path / "set" / "corpus.json").unlink()
    for number, (name, harm) in enumerate(DAMAGE.items()):
        folder = tmp_path / "set" / unit_name(number)
        assert damaged_file(folder) is None
        harm(folder / name)
        assert damaged_file(folder) == name
    capsys.readouterr()
    prepare(source, tmp_path / "set", vocab_size=300, **SETTINGS)
    assert files_of(tmp_path / "set") == files_of(whole)
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path}/set/{unit_name(n)}/{name}: missing or damaged; {unit_name(n)} is done again"
        for n, name in enumerate(DAMAGE)
    ]


def test_a_finished_set_that_is_damaged_is_mended(source, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "set")
    shard = tmp_path / "set" / unit_name(3) / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-1])
    prepare(source, tmp_path / "set", vocab_size=300, **SETTINGS)
    assert files_of(tmp_path / "set") == files_of(whole)
    assert f"damaged: {shard}: missing or not as long as index.json records" in capsys.readouterr().err


@pytest.mark.parametrize("given", [True, False])
def test_a_tokenizer_that_was_exchanged_is_refused(source, whole, tmp_path, given):
    """Of tokenizers trained here only the units tell which one it was."""
    shutil.copytree(whole, tmp_path / "set")
    tokenizer = tmp_path / "set" / "tokenizer.json"
    own = {"tokenizer": shutil.copy(tokenizer, tmp_path)} if given else {"vocab_size": 300}
    if given:
        shutil.rmtree(tmp_path / "set")
        prepare(source, tmp_path / "set", part=(1, 9), **own, **SETTINGS)
    else:
        (tmp_path / "set" / "corpus.json").unlink()
    tokenizer.write_text(tokenizer.read_text().replace('"lstrip": false', '"lstrip": true', 1))
    message = r"tokenizer\.json: not " + ("/.*; delete it" if given else "the tokenizer that unit.00000 was made with;")
    with pytest.raises(RunError, match=message) as error:
        prepare(source, tmp_path / "set", **own, **SETTINGS)
    assert "\n" not in str(error.value)


def test_the_folder_is_not_listed_for_every_unit(source, tmp_path, monkeypatch):
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(str(path)) or scandir(path))
    prepare(source, tmp_path / "set", vocab_size=300, **SETTINGS)
    assert listed.count(str(tmp_path / "set")) < COUNT


def test_parts_of_another_set_are_refused(source, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "set")
    with pytest.raises(RunError, match="another context length"):
        prepare(source, tmp_path / "set", vocab_size=300, part=(1, 2), **SETTINGS | {"context_length": 32})


SCRIPT = """
import sys
from pathlib import Path
from stackexp.data.prepare import prepare
source, folder, part = sys.argv[1:]
part = tuple(map(int, part.split("/"))) if part else None
prepare(Path(source), Path(folder), vocab_size=300, context_length=64, unit_bytes=20_000, progress=False, workers=1,
        part=part)
"""


def start(source: Path, folder: Path, part: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, source, folder, part], stderr=subprocess.PIPE, text=True)


def test_parts_at_once_and_the_same_part_twice_and_two_merges_write_each_unit_once(source, whole, tmp_path):
    processes = [start(source, tmp_path / "set", part) for part in ("1/2", "2/2", "1/2", "", "")]
    messages = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 5, messages
    assert sum("training a tokenizer" in message for message in messages) == 1
    assert sum("waiting for another process" in message for message in messages) >= 1
    assert all(line.startswith(("waiting for", "training a")) for text in messages for line in text.splitlines())
    assert files_of(tmp_path / "set") == files_of(whole)


def test_a_lock_is_shared_as_nfs_wants_it(tmp_path, monkeypatch):
    """It refuses a shared lock on a file that is not open for reading."""
    readable = []
    monkeypatch.setattr("fcntl.flock", lambda file, flags: readable.append(file.readable()))
    with locked(tmp_path / "lock", "the test", shared=True):
        assert readable == [True]


def test_who_merges_waits_for_the_parts(source, tmp_path):
    """The part is halted while it holds the folder."""
    part = start(source, tmp_path / "set", "1/1")
    wait_for(lambda: units(tmp_path / "set"))
    part.send_signal(signal.SIGSTOP)
    merge = start(source, tmp_path / "set", "")
    assert merge.stderr.readline() == f"waiting for another process to finish the preparation of {tmp_path}/set\n"
    assert not (tmp_path / "set" / "corpus.json").exists()
    part.send_signal(signal.SIGCONT)
    assert (part.wait(), merge.wait()) == (0, 0)
    assert (tmp_path / "set" / "corpus.json").exists()


def wait_for(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_verb_says_what_comes_next(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "to be restored")
    monkeypatch.delenv("RAYON_NUM_THREADS")
    command = [str(source), "--to", str(tmp_path / "set"), "--vocab-size", "300", "--context-length", "64"]
    assert main([*command, "--workers", "1", "--part", "1/1"]) == 0
    assert capsys.readouterr().out.endswith(
        "part 1 of 1 is done; when all are, the same command without --part merges them\n"
    )
    assert main([*command, "--workers", "1"]) == 0
    assert os.environ["RAYON_NUM_THREADS"] == "1", "the library's threads"
    assert np.array(TokenSet(tmp_path / "set")[0]).shape == (64,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--part 3/2", "--part: expected I/N with 1 <= I <= N, such as 3/64, found 3/2"),
        ("--part 0/2", "found 0/2"),
        ("--part 1", "found 1 "),
        ("--part -1/2", "--part"),
        ("--tasks 2", "--tasks is for --launcher slurm"),
        ("--partition main", "--partition is for --launcher slurm"),
        ("--launcher slurm", "say with --tasks N how many tasks share the work"),
        ("--launcher slurm --tasks 0", "--tasks: expected an integer >= 1, found 0"),
        ("--launcher slurm --tasks 2 --part 1/2", "give --part, or --launcher slurm"),
        ("--launcher pbs", "--launcher"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as error:
        main(["source", "--to", str(tmp_path / "set"), "--vocab-size", "300", *arguments.split()])
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
