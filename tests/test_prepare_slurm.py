"""`data prepare --launcher slurm`, on a real Slurm."""

import re
from pathlib import Path

import pytest
from corpora import files_of, write_many
from slurm import wait_for

from stackexp.errors import ConfigError, RunError
from stackexp.sweeps import slurm as slurm_module
from stackexp.verbs.data_prepare import main

SETTINGS = ["--vocab-size", "300", "--context-length", "64", "--unit-bytes", "20000"]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Fifty units of work."""
    return write_many(tmp_path_factory.mktemp("source") / "of text", 100)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> dict[str, bytes]:
    """The set that one process makes."""
    folder = tmp_path_factory.mktemp("whole") / "set"
    assert main([str(source), "--to", str(folder), *SETTINGS, "--workers", "1"]) == 0
    return files_of(folder)


def submit(capsys, source: Path, folder: Path, *options: str) -> list[str]:
    """The ids of the array and of the job that merges."""
    capsys.readouterr()
    assert main([str(source), "--to", str(folder), *SETTINGS, "--launcher", "slurm", *options]) == 0
    return re.findall(r"^job (\d+):", capsys.readouterr().out, re.MULTILINE)


def logs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "jobs").iterdir())}


def test_an_array_makes_the_set_that_one_process_makes(slurm, source, whole, tmp_path, capsys):
    folder = tmp_path / "a set"
    array, merge = submit(capsys, source, folder, "--tasks", "3", "--partition", "main", "--time", "10:00")
    message = rf"a set: Slurm is at it already, jobs {array},{merge}; wait for them, or end them with scancel"
    with pytest.raises(RunError, match=message) as error:
        submit(capsys, source, folder, "--tasks", "3")
    assert "\n" not in str(error.value)
    shown = slurm.output("scontrol", "show", "job", merge)
    assert f"Dependency=afterany:{array}" in shown
    assert "TimeLimit=00:10:00" in shown
    wait_for(lambda: not slurm.squeue())
    assert (folder / "corpus.json").exists(), logs(folder)
    assert files_of(folder) == whole
    found = logs(folder)
    assert sorted(found) == [*(f"{array}_{n}.txt" for n in (1, 2, 3)), f"{merge}-merge.txt"]
    assert all(f"part {n} of 3 is done" in found[f"{array}_{n}.txt"] for n in (1, 2, 3))
    assert submit(capsys, source, folder, "--tasks", "3") == [], "it is done"
    assert not slurm.squeue()


def test_a_node_that_fails_and_a_task_that_is_cancelled_lose_nothing(slurm, source, whole, tmp_path, capsys):
    folder = tmp_path / "set"
    slurm.output("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    array, _ = submit(capsys, source, folder, "--tasks", "2", "--workers", "2")  # one after the other, on n0
    wait_for(lambda: list(folder.glob("unit.*")))
    slurm.kill_node("n0")  # part 1 is at work still
    slurm.output("scancel", f"{array}_2")
    slurm.output("scontrol", "update", "NodeName=n1", "State=RESUME")
    wait_for(lambda: slurm.squeue().get(f"{array}_1") == "PENDING")
    assert not (folder / "corpus.json").exists()
    slurm.hurry()
    wait_for(lambda: not slurm.squeue())
    assert (folder / "corpus.json").exists(), logs(folder)
    assert files_of(folder) == whole


def test_what_slurm_refuses_is_one_line(slurm, source, tmp_path, capsys):
    with pytest.raises(RunError, match=r"sbatch: .*invalid partition") as error:
        submit(capsys, source, tmp_path / "set", "--tasks", "2", "--partition", "nowhere")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="--time: expected '24:00:00'"):
        submit(capsys, source, tmp_path / "other", "--tasks", "2", "--time", "soon")
    assert not (tmp_path / "other").exists()
    with pytest.raises(RunError, match="no such file or folder"):
        submit(capsys, tmp_path / "missing", tmp_path / "other", "--tasks", "2")
    options = ["--launcher", "slurm", "--tasks", "2", "--tokenizer", str(tmp_path / "none.json")]
    with pytest.raises(RunError, match=r"not a readable tokenizer\.json"):
        main([str(source), "--to", str(tmp_path / "other"), *options])
    assert not slurm.squeue()


def test_an_array_without_its_merge_is_told(source, tmp_path, capsys, monkeypatch):
    answers = iter(["17", RunError("sbatch: too many jobs")])

    def submit_or_refuse(*_) -> str:
        if isinstance(answer := next(answers), RunError):
            raise answer
        return answer

    for name, stand_in in {
        "available": lambda: True,
        "jobs_named": lambda name: [],
        "submit": submit_or_refuse,
    }.items():
        monkeypatch.setattr(slurm_module, name, stand_in)
    message = (
        r"job 17, an array of 2 tasks, is submitted, but not .* \(sbatch: too many jobs\).*merge them with: .* prepare"
    )
    with pytest.raises(RunError, match=message) as error:
        submit(capsys, source, tmp_path / "set", "--tasks", "2")
    assert "\n" not in str(error.value)
    assert "--part" not in str(error.value)


def test_without_slurm(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(slurm_module, "available", lambda: False)
    with pytest.raises(ConfigError, match="there is no sbatch here"):
        submit(capsys, source, tmp_path / "set", "--tasks", "2")
    assert not (tmp_path / "set").exists()
