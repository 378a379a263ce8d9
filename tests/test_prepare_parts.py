"""Several processes prepare one set: kills, parts, and merges at the same time."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from corpora import prepare_set, read_files, write_many
from processes import wait_until

from stackexp.data.shards import TokenSet
from stackexp.errors import RunError

UNIT_BYTES = 20_000
UNITS = 12


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_many(tmp_path_factory.mktemp("source"), 2 * UNITS)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    """Return the set as one process prepares it."""
    folder = tmp_path_factory.mktemp("whole") / "set"
    prepare_set(source, folder, unit_bytes=UNIT_BYTES)
    assert len(units_in(folder)) == UNITS
    return folder


def units_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("unit.*"))


@pytest.mark.parametrize("count", [1, 3, 20])
def test_parts_in_any_order_prepare_the_same_set(source, whole, tmp_path, count):
    folder = tmp_path / "set"
    for number in reversed(range(1, count + 1)):
        assert prepare_set(source, folder, part=(number, count), unit_bytes=UNIT_BYTES) is None
        assert not (folder / "corpus.json").exists()
    inodes = {unit: (folder / unit).stat().st_ino for unit in units_in(folder)}
    corpus = prepare_set(source, folder, unit_bytes=UNIT_BYTES)
    assert read_files(folder) == read_files(whole)
    assert {unit: (folder / unit).stat().st_ino for unit in units_in(folder)} == inodes, "a unit was written twice"
    assert corpus == TokenSet(whole).corpus


def test_damaged_unit_of_a_finished_set_is_prepared_again_alone(source, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "set")
    shard = next(folder.glob("unit.*/shard.00000.mds"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(
        RunError, match=r"damaged .*shard\.00000\.mds.*; delete the unit folder of that file and .*json"
    ):
        prepare_set(source, folder, unit_bytes=UNIT_BYTES)
    shutil.rmtree(shard.parent)
    (folder / "corpus.json").unlink()
    prepare_set(source, folder, unit_bytes=UNIT_BYTES)
    assert read_files(folder) == read_files(whole)


@pytest.mark.parametrize("given", [True, False])
def test_replaced_tokenizer_is_refused(source, whole, tmp_path, given):
    """A trained tokenizer is checked against the units, a given one against its original."""
    shutil.copytree(whole, tmp_path / "set")
    tokenizer = tmp_path / "set" / "tokenizer.json"
    settings = {"tokenizer": shutil.copy(tokenizer, tmp_path)} if given else {"vocab_size": 300}
    if given:
        shutil.rmtree(tmp_path / "set")
        prepare_set(source, tmp_path / "set", part=(1, 9), unit_bytes=UNIT_BYTES, **settings)
    else:
        (tmp_path / "set" / "corpus.json").unlink()
    tokenizer.write_text(tokenizer.read_text().replace('"lstrip": false', '"lstrip": true', 1))
    message = "differs from .*; delete it" if given else "not the tokenizer of unit"
    with pytest.raises(RunError, match=rf"tokenizer\.json: {message}") as error:
        prepare_set(source, tmp_path / "set", unit_bytes=UNIT_BYTES, **settings)
    assert "\n" not in str(error.value)


# Processes


def prepare_part(source: Path, folder: Path, part: tuple[int, int] | None) -> None:
    prepare_set(source, folder, unit_bytes=UNIT_BYTES, part=part)


def test_concurrent_parts_and_merges_write_each_unit_once(source, whole, forks, tmp_path):
    parts = [(1, 2), (2, 2), (1, 2), None, None]
    processes = [forks.start(source, tmp_path / "set", part, function=prepare_part) for part in parts]
    assert [process.join() for process in processes] == [[0]] * 5
    messages = [process.output.read_text() for process in processes]
    assert sum("training a tokenizer" in message for message in messages) == 1
    assert sum("waiting for another process" in message for message in messages) >= 1
    assert all(
        line.startswith(("waiting for", "training a", "tokenizing")) for text in messages for line in text.splitlines()
    )
    assert read_files(tmp_path / "set") == read_files(whole)


def test_merge_waits_for_running_parts(source, forks, tmp_path):
    part = forks.start(source, tmp_path / "set", (1, 1), function=prepare_part)
    wait_until(lambda: units_in(tmp_path / "set"))
    os.kill(part[0].pid, signal.SIGSTOP)  # while it holds the lock of the folder
    merge = forks.start(source, tmp_path / "set", None, function=prepare_part)
    line = f"waiting for another process to finish the preparation of {tmp_path}/set\n"
    wait_until(lambda: merge.output.exists() and merge.output.read_text() == line)
    assert not (tmp_path / "set" / "corpus.json").exists()
    os.kill(part[0].pid, signal.SIGCONT)
    assert (part.join(), merge.join()) == ([0], [0])
    assert (tmp_path / "set" / "corpus.json").exists()


SCRIPT = """
import sys
from pathlib import Path
from stackexp.data.prepare import Preparation, prepare
plan = Preparation(Path(sys.argv[1]), vocab_size=300, context_length=64, unit_bytes=20_000)
prepare(plan, Path(sys.argv[2]), workers=2)
"""


def start(source: Path, folder: Path) -> subprocess.Popen:
    """Start a preparation in a session of its own, with its workers."""
    return subprocess.Popen([sys.executable, "-c", SCRIPT, source, folder], start_new_session=True)


def members(group: int) -> list[int]:
    """Return the running processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(process_group) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def is_writing_unit(folder: Path) -> bool:
    return bool(list(folder.glob(".unit.*")))


MOMENTS = [
    lambda folder: (folder / "tokenizer.json").exists(),
    is_writing_unit,
    lambda folder: len(units_in(folder)) >= 4 and is_writing_unit(folder),
]


def kill_at(moment: Callable[[Path], bool], source: Path, folder: Path) -> None:
    """Kill the parent process at a moment, or after its end; its workers must exit."""
    process = start(source, folder)
    wait_until(lambda: moment(folder) or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not members(process.pid))  # no worker outlives its parent


@pytest.mark.process
def test_kills_neither_lose_nor_duplicate_documents(source, whole, tmp_path):
    for attempt in range(5):  # the machine may finish before the kills
        folder, counts = tmp_path / f"killed{attempt}", []
        for moment in MOMENTS:
            if not (folder / "corpus.json").exists():
                kill_at(moment, source, folder)
                counts.append(len(units_in(folder)))
        assert start(source, folder).wait() == 0
        if was_interrupted := any(0 < count < UNITS for count in counts):
            break
    assert was_interrupted, f"no kill hit an unfinished set: {counts}"
    assert not is_writing_unit(folder)
    assert read_files(folder) == read_files(whole)
