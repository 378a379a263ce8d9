"""Copies of runs that are small enough to commit, and documents whose tables are made from them."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from language_runs import finish, write_run

from stackexp.evaluation.scores import write_chunk_losses
from stackexp.files import read_hashed_json, write_hashed_json
from stackexp.frame import load_runs
from stackexp.reports.ablation import build_ablation


@pytest.fixture
def runs(empty_folder) -> Path:
    """Return the folder `runs` in the working directory, with two finished runs and an unfinished one."""
    for seed, (arm, memory) in enumerate((("transformer", "null"), ("stacktrans", "stacktrans"), ("queue", "queue"))):
        run = write_run(Path("runs", f"{arm}-seed=0-0123abc{seed}"), f"model.memory={memory}", losses=[9.0, 3.0])
        if arm != "queue":
            loss = 3.0 - 0.1 * seed
            finish(run, loss)
            write_chunk_losses(run / "validate.json", "held-out", np.array([[loss - 0.1, loss + 0.1], [1.0, 1.0]]))
        record = {"step": 10, "overrides": [], "time": "", "checkpoint": f"/secret/{run.name}/checkpoints/00000010"}
        write_hashed_json(run / "validate.json", record)
        origin = {"path": "/secret/init.safetensors", "sha256": "0"}
        (run / "environment.json").write_text(json.dumps([{"commit": "aa", "host": "secret", "origin": origin}]))
        (run / "checkpoints" / "00000010").mkdir(parents=True)
    return Path("runs")


def test_reports_read_copies_like_the_runs(runs, invoke):
    (runs / "transformer-seed=0-0123abc0" / ".stackexp").unlink()  # a run of an earlier version
    assert len(invoke("runs copy runs --to copies").split()) == 2
    ours, copies = build_ablation([runs]), build_ablation([Path("copies")])
    assert [table.rows for table in copies.tables] == [table.rows for table in ours.tables]
    files = [path for path in Path("copies").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2 * 8000
    assert not any("secret" in path.read_text() for path in files if path.suffix == ".json")
    assert "exists already; remove it first" in invoke("runs copy runs --to copies", expect=2)
    error = invoke("runs copy runs/queue-seed=0-0123abc2 --to other", expect=2)
    assert "no finished runs; give folders with a result.json" in error


def test_copies_keep_the_names_of_arms(runs, invoke):
    identifier = "20261123-210406-08a1"
    for path in (f"a/{identifier}", f"b/{identifier}", "c/seed=0-0123abcd", "mine", "nested/d-seed=0-0123abcd"):
        finish(write_run(runs / path), 3.0)
    shutil.rmtree(runs / "transformer-seed=0-0123abc0")
    invoke("runs copy runs --to copies")
    arms = load_runs("runs").query("state == 'finished'")["arm"]
    assert sorted(load_runs("copies")["arm"]) == sorted(arms) == ["a", "b", "c", "d", "mine", "stacktrans"]
    assert Path("copies", "a", identifier, "result.json").is_file()
    invoke("runs copy runs/a --to other/a")
    assert Path("other", "a", identifier, "result.json").is_file()


def test_copies_have_tests_but_no_validations_of_other_runs(runs, invoke):
    run = runs / "stacktrans-seed=0-0123abc1"
    record = read_hashed_json(run / "validate.json", "")
    for name in ("test.json", "test-to-500-every-9-of-512.json"):  # of a formal language; `report formal` reads both
        write_hashed_json(run / name, record)
    other = record | {"checkpoint": "runs/queue-seed=0-0123abc2/checkpoints/00000010"}
    write_hashed_json(run / "validate-other.json", other)
    (run / "interventions.json").write_text("{}")
    write_chunk_losses(run / "result.json", "held-out", np.ones((2, 2)))
    write_chunk_losses(run / "validate-other.json", "held-out", np.ones((2, 2)))
    invoke("runs copy", run, "--to", "copies")
    names = {path.name for path in Path("copies", run.name).iterdir()}
    tests = {"test.json", "test-to-500-every-9-of-512.json"}
    assert {*tests, "validate.json", "validate.chunks", "result.chunks", "interventions.json"} <= names
    assert not [name for name in names if "other" in name]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("validate-notes.json", '{"note": 1}', "validate-notes.json: not as it was written"),
        ("environment.json", '[{"origin": 5}]', "the origin of a session is 5"),
        ("result.json", "{", "result.json: not valid JSON"),
        ("test.json", "{}", "test.json: not as it was written: its sha256 is wrong or missing; move it elsewhere, or"),
        ("result.json", None, "result.json: a symbolic link"),
        ("validate.chunks/held-out.npy", None, "held-out.npy: a symbolic link"),
    ],
)
def test_a_run_that_cannot_be_copied_leaves_no_files(runs, invoke, file, content, message):
    """A link in a run of another person could lead to a private file."""
    run = runs / "stacktrans-seed=0-0123abc1"
    if content is None:
        (run / file).rename("private")
        (run / file).symlink_to(Path("private").resolve())
    else:
        (run / file).write_text(content)
    Path("copies").mkdir()
    mine = Path("copies", f".{run.name}.new")
    mine.mkdir()
    assert message in invoke("runs copy", run, "--to", "copies", expect=1)
    assert list(Path("copies").iterdir()) == [mine]


def test_a_pipe_among_the_losses_of_chunks_is_one_line(runs, invoke):
    run = runs / "stacktrans-seed=0-0123abc1"
    (run / "validate.chunks" / "held-out.npy").unlink()
    os.mkfifo(run / "validate.chunks" / "held-out.npy")
    error = invoke("runs copy", run, "--to", "copies", expect=1)
    assert error.endswith("held-out.npy: not a regular file; replace it by one")


def test_tables_of_a_document_are_replaced(runs, invoke):
    command = "python -m stackexp report ablation runs --markdown --tables"
    document = Path("results.md")
    form = "<!-- {command} -->\n{table}<!-- end of report -->\n"
    document.write_text("before\n" + 2 * form.format(command=command, table="old\n") + "after\n")
    assert invoke("report all --update results.md") == 2 * f"{command}\n"
    printed = invoke(*command.split()[3:])
    assert "| stacktrans" in printed
    assert "- Losses are means" not in printed, "--tables prints no notes"
    assert printed == "\n".join(invoke(*command.split()[3:], i) for i in (1, 2))
    assert "--tables 3: the report has 2 tables" in invoke(*command.split()[3:], "3", expect=2)
    trains = "python -m stackexp verdict mine.yaml"
    Path("other.md").write_text(form.format(command=trains, table="old\n"))
    assert f"`{trains}` would train; add --report" in invoke("report all --update other.md", expect=1)
    assert document.read_text() == "before\n" + 2 * form.format(command=command, table=printed) + "after\n"


COMMAND = "<!-- python -m stackexp report ablation nowhere -->\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [(COMMAND, "expected tables between"), (f"{COMMAND}<!-- end of report -->", "nowhere: no such folder")],
)
def test_a_document_that_cannot_be_updated_is_left_alone(text, message, empty_folder, invoke):
    Path("a.md").write_text(text)
    error = invoke("report all --update a.md", expect=1)
    assert message in error
    assert Path("a.md").read_text() == text
