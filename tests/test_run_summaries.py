"""`runs list`, `runs show`, `runs remove`, and what they do with damaged run folders."""

import json
import random
import shutil
from pathlib import Path

import pytest

from stackexp.cli import main
from stackexp.errors import RunError
from stackexp.files import hold_lock
from stackexp.frame import read_run
from stackexp.models.checkpoints import find_checkpoint
from stackexp.runs import RunFolder
from stackexp.sweeps.trials import CLAIM

RECORDS = ("metrics.jsonl", "result.json", "config.yaml", "environment.json", "data.jsonl")


@pytest.fixture
def run(trained, tmp_path, monkeypatch) -> RunFolder:
    """A copy of a finished run, at runs/tiny/ID of the working directory."""
    shutil.copytree(trained, tmp_path / "runs" / "tiny" / trained.name)
    monkeypatch.chdir(tmp_path)
    return RunFolder(Path("runs/tiny") / trained.name)


def test_the_row_of_a_run_that_was_trained(run):
    row = read_run(run)
    assert (row["state"], row["step"], row["max_steps"], row["tokens"]) == ("finished", 12, 12, 12 * 256)
    assert row["train_loss"] == run.read_result().train_loss["last_20_steps"]
    assert row["best_loss"] == min(x["val/loss/average"] for x in list(run.read_metrics())[-1:])
    assert row["bytes"] == sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
    with run.lock():
        assert read_run(run)["state"] == "running"
    run.result.unlink()
    unfinished = read_run(run)
    assert unfinished["state"] == "unfinished"
    assert [unfinished[key] for key in ("step", "tokens")] == [12, 12 * 256]
    assert unfinished["train_loss"] == pytest.approx(row["train_loss"])


def test_a_copy_has_the_figures_of_its_result(run):
    assert main(["runs", "copy", "runs", "--to", "copies"]) == 0
    copy, original = read_run(RunFolder(Path("copies/tiny") / run.path.name)), read_run(run)
    assert {key for key in copy if copy[key] != original.get(key)} <= {"path", "bytes", "last_change"}
    with pytest.raises(RunError, match="a copy without checkpoints; give the original run"):
        find_checkpoint(RunFolder(Path("copies/tiny") / run.path.name), None)


def test_a_copy_names_the_files_of_other_sets_without_their_folders(run, trained, corpus):
    assert main(["validate", "--run", str(run.path), "--sets", f"mine={corpus['left']}"]) == 0
    assert main(["runs", "copy", "runs", "--to", "copies"]) == 0
    (record,) = (path for path in Path("copies").rglob("*.json") if "mine" in path.name)
    assert json.loads(record.read_text())["paths"] == {"mine": Path(corpus["left"]).name}
    assert str(Path(corpus["left"]).parent) not in record.read_text()


def test_copies_of_runs_with_the_same_name_are_refused_before_any_is_written(run, invoke):
    shutil.copytree(run.path, Path("other/tiny") / run.path.name)
    assert "have the same name; copy them separately" in invoke("runs copy runs other --to copies", expect=2)
    assert not Path("copies").exists()


def test_links_are_not_removed_and_a_run_given_twice_is_removed_once(run, invoke):
    Path("link").symlink_to(run.path)
    error = invoke("runs remove link --yes", expect=1)
    assert f"link: a symbolic link; give the run folder, {run.path.resolve()}" in error
    assert len(invoke("runs remove", run.path, f"{run.path}/", "--yes").splitlines()) == 1
    assert not run.path.exists()


def test_damaged_and_unfinished_folders_can_be_shown_and_removed(run, invoke):
    run.environment.write_text("")
    assert "environment.json: not valid JSON" in invoke("runs show", run.path)
    run.config.unlink()
    invoke("runs remove", run.path, "--yes")
    assert not run.path.exists()


def test_list_show_and_remove(run, invoke):
    rows = invoke("runs list").splitlines()
    assert rows[0].split() == ["state", "step", "loss", "best", "size", "run"]
    assert rows[2].split()[:2] == ["finished", "12/12"]
    assert rows[2].endswith(str(run.path))
    assert max(map(len, rows)) <= 80

    run.result.unlink()
    (listed,) = json.loads(invoke("runs list --state unfinished --json"))
    assert (listed["path"], listed["state"]) == (str(run.path), "unfinished")
    shown = invoke("runs show", run.path)
    assert f"python -m stackexp fit --run {run.path}" in shown
    assert "00000008, 00000012" in shown
    assert len(json.loads(invoke("runs show", run.path, "--json"))["sessions"]) == 1

    assert "--yes" in invoke("runs remove", run.path)
    assert run.path.is_dir()
    with run.lock():
        invoke("runs remove", run.path, "--yes", expect=74)
    with hold_lock(run.path / CLAIM, "a worker that has just claimed the trial"):
        invoke("runs remove", run.path, "--yes", expect=74)
    Path("mine").mkdir()
    Path("mine/config.yaml").touch()
    invoke("runs remove mine --yes", expect=1)
    assert Path("mine/config.yaml").exists()
    invoke("runs remove", run.path, "--yes")
    assert not run.path.exists()


def mutate(content: bytes, generator: random.Random) -> bytes:
    """Cut, flip, overwrite or insert bytes, or replace the file by another JSON value."""
    kind = generator.randrange(6)
    position = generator.randrange(len(content))
    if kind == 0:
        return content[:position]
    if kind == 1:
        return content[:position] + bytes([content[position] ^ 1 << generator.randrange(8)]) + content[position + 1 :]
    if kind == 2:
        return content[:position] + b"\xff\x00" + content[position + 2 :]
    if kind == 3:
        return content[:position] + generator.choice([b"{", b'"', b"\n", b"null", b"-"]) + content[position:]
    if kind == 4:
        return generator.choice([b"[]", b"5\n", b"null", b'{"step": "x"}\n', b'"\n"', b"[" * 4000, b"{}\n", b""])
    lines = content.splitlines(keepends=True)
    del lines[generator.randrange(len(lines))]
    return b"".join(lines)


@pytest.mark.parametrize("file", RECORDS)
def test_damaged_records_never_cause_a_traceback(run, capsys, file):
    """Every reader ends with 0, or with an error of one line."""
    path, generator = run.path / file, random.Random(file)
    original = path.read_bytes()
    compare = ["report", "compare", str(run.path), str(run.path)]
    commands = [["runs", "list"], ["runs", "show", str(run.path)], [*compare, "--csv", "x.csv"]]
    for number in range(10):
        path.write_bytes(mutate(original, generator))
        for command in [*commands, *[[*compare, "--figure", "x.png"]] * (number < 2)]:  # drawing is slow
            code = main(command)
            captured = capsys.readouterr()
            assert code in (0, 1, 2)
            assert code == 0 or captured.err.splitlines()[-1].startswith("error: "), (command, captured.err)
