"""`data prepare --launcher slurm` on a real Slurm."""

import re
from pathlib import Path

import pytest
from corpora import prepare_set, read_files, write_many
from processes import wait_until

from stackexp.cli import main
from stackexp.errors import RunError
from stackexp.sweeps import slurm as slurm_commands

SETTINGS = ["--vocab-size", "300", "--context-length", "64", "--unit-bytes", "20000", "--launcher", "slurm"]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Return a folder of fifty units."""
    return write_many(tmp_path_factory.mktemp("source") / "of text", 100)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> dict[str, bytes]:
    """Return the files of the set that one process prepares."""
    folder = tmp_path_factory.mktemp("whole") / "set"
    prepare_set(source, folder, unit_bytes=20_000)
    return read_files(folder)


def submit(source: Path, folder: Path, *options: str) -> int:
    return main(["data", "prepare", str(source), "--to", str(folder), *SETTINGS, *options])


def submit_jobs(capsys, source: Path, folder: Path, *options: str) -> list[str]:
    """Submit and return the ids of the array and the merge job."""
    capsys.readouterr()
    assert submit(source, folder, *options) == 0
    return re.findall(r"^job (\d+):", capsys.readouterr().out, re.MULTILINE)


def assert_refused(capsys, code: int, message: str, source: Path, folder: Path, *options: str) -> None:
    capsys.readouterr()
    assert submit(source, folder, "--tasks", "2", *options) == code
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


def logs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "jobs").iterdir())}


def test_array_prepares_the_same_set_as_one_process(slurm, source, whole, tmp_path, capsys):
    folder = tmp_path / "a set"
    array, merge = submit_jobs(capsys, source, folder, "--tasks", "3", "--partition", "main", "--time", "10:00")
    message = rf"a set: already prepared by Slurm jobs {array},{merge}; wait for them, or run scancel"
    assert_refused(capsys, 1, message, source, folder)
    shown = slurm.output("scontrol", "show", "job", merge)
    assert f"Dependency=afterany:{array}" in shown
    assert "TimeLimit=00:10:00" in shown
    wait_until(lambda: not slurm.squeue())
    assert (folder / "corpus.json").exists(), logs(folder)
    assert read_files(folder) == whole
    found = logs(folder)
    assert sorted(found) == [*(f"{array}_{n}.txt" for n in (1, 2, 3)), f"{merge}-merge.txt"]
    assert all(f"part {n} of 3 is done" in found[f"{array}_{n}.txt"] for n in (1, 2, 3))
    assert submit_jobs(capsys, source, folder, "--tasks", "3") == [], "the set is finished"
    assert not slurm.squeue()


@pytest.mark.process
def test_failed_node_and_cancelled_task_lose_no_data(slurm, source, whole, tmp_path, capsys):
    folder = tmp_path / "set"
    slurm.output("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    array, _ = submit_jobs(capsys, source, folder, "--tasks", "2", "--workers", "2")  # one after the other, on n0
    wait_until(lambda: list(folder.glob("unit.*")))
    slurm.kill_node("n0")  # while part 1 is running
    slurm.output("scancel", f"{array}_2")
    slurm.output("scontrol", "update", "NodeName=n1", "State=RESUME")
    wait_until(lambda: slurm.squeue().get(f"{array}_1") == "PENDING")
    assert not (folder / "corpus.json").exists()
    slurm.hurry()
    wait_until(lambda: not slurm.squeue())
    assert (folder / "corpus.json").exists(), logs(folder)
    assert read_files(folder) == whole


def test_refusals_by_slurm_are_one_line_errors(slurm, source, tmp_path, capsys):
    assert_refused(capsys, 1, r"sbatch: .*invalid partition", source, tmp_path / "set", "--partition", "nowhere")
    other = tmp_path / "other"
    assert_refused(capsys, 2, "--time: expected '24:00:00'", source, other, "--time", "soon")
    assert not other.exists()
    assert_refused(capsys, 1, "no such file or folder", tmp_path / "missing", other)
    assert not slurm.squeue()


def test_refused_merge_job_is_reported_with_its_command(source, tmp_path, capsys, monkeypatch):
    answers = iter(["17", RunError("sbatch: too many jobs")])

    def submit_or_refuse(*_) -> str:
        if isinstance(answer := next(answers), RunError):
            raise answer
        return answer

    monkeypatch.setattr(slurm_commands, "is_available", lambda: True)
    monkeypatch.setattr(slurm_commands, "find_job_ids", lambda name: [])
    monkeypatch.setattr(slurm_commands, "submit_job", submit_or_refuse)
    message = r"job 17 with 2 tasks is submitted, but .* \(sbatch: too many jobs\).*merge them with: (?!.*--part)"
    assert_refused(capsys, 1, message, source, tmp_path / "set")


def test_missing_slurm_is_a_one_line_error(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(slurm_commands, "is_available", lambda: False)
    assert_refused(capsys, 2, "sbatch not found", source, tmp_path / "set")
    assert not (tmp_path / "set").exists()
