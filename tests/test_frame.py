"""`load_runs`: one row per run folder, with its state, options, results and scores."""

import json
import math
import os
import tracemalloc
from pathlib import Path

import pandas as pd
import pytest
from language_runs import finish, write_run

import stackexp
from stackexp.cli import main
from stackexp.config.compose import compose, to_yaml
from stackexp.errors import RunError
from stackexp.files import write_hashed_json
from stackexp.frame import get_options, get_scores, load_runs, name_arm, read_rows, read_run
from stackexp.runs import RunFolder

V2_SCORES = {"v2/c4": {"loss": 3.0, "perplexity": 21.0}}


@pytest.fixture
def runs(tmp_path) -> Path:
    """A finished run of two, in a folder."""
    finish(write_run(tmp_path / "runs/a/20260101-000000-0000", "model.memory=null", losses=[5.0, 4.0, 3.0]), 3.5)
    write_run(tmp_path / "runs/queue-seed=1-0123abcd", "model.memory=queue", seed=1, losses=[6.0])
    return tmp_path / "runs"


def add_validation(run: Path, sets: dict, **record) -> None:
    contents = {"checkpoint": f"{run.name}/checkpoints/00000010", "step": 10, "overrides": [], "time": "", "sets": sets}
    write_hashed_json(run / f"validate-{len(list(run.glob('validate*')))}.json", contents | record)


def test_a_row_for_each_run(runs):
    frame = stackexp.load_runs(runs)
    assert isinstance(frame, pd.DataFrame)
    assert list(frame["arm"]) == ["a", "queue"]
    assert list(frame["state"]) == ["finished", "unfinished"]
    assert list(frame["step"]) == [10, 1]
    assert list(frame["seed"]) == [0, 1]
    assert frame["seed"].dtype == "Int64"
    assert list(frame["train_loss"]) == [3.0, 6.0]
    assert frame["val/held-out/loss"][0] == frame["val/average/loss"][0] == frame["best_loss"][0] == 3.5
    assert math.isnan(frame["val/held-out/loss"][1])
    assert math.isnan(load_runs(runs / "queue-seed=1-0123abcd")["best_loss"][0]), "a column that no run has"
    assert frame.loc[frame["state"] == "finished", "parameters"].tolist() == [1000]
    assert frame["bytes"][1] == sum(path.stat().st_size for path in (runs / "queue-seed=1-0123abcd").iterdir())
    finish(runs / "a/20260101-000000-0000", 3.5, parameters=10**400)
    assert load_runs(runs)["parameters"][0] == 10**400, "numbers beyond 64 bits are kept"


def test_runs_behind_links_are_found_once(runs, tmp_path):
    elsewhere = tmp_path / "scratch" / "b"
    finish(write_run(elsewhere, losses=[5.0]), 3.0)
    (runs / "linked").symlink_to(elsewhere.parent)
    (runs / "again").symlink_to(elsewhere)
    (runs / "a" / "loop").symlink_to(runs)
    assert [Path(row["path"]).resolve() for row in read_rows([runs])] == [
        runs / "a/20260101-000000-0000",
        elsewhere,
        runs / "queue-seed=1-0123abcd",
    ]


def test_options_have_types_and_keep_null_apart_from_missing(runs):
    plain, queue = read_rows([runs])
    assert plain["model.memory"] is None
    assert "model.memory" not in queue
    assert queue["model.memory.discipline"] == "queue"
    rows = read_rows(runs)
    assert [list(row.items()) for row in rows] == [list(plain.items()), list(queue.items())]
    assert get_options(queue) == RunFolder(runs / "queue-seed=1-0123abcd").read_options()
    assert get_scores(plain) == {"held-out": {"loss": 3.5, "perplexity": 350.0}}
    frame = load_runs([runs])
    kinds = {"model.hidden_size": "Int64", "optimizer.lr": "float64", "model.causal": "boolean", "name": "object"}
    assert {key: str(frame[key].dtype) for key in kinds} == kinds


def test_no_runs_give_an_empty_table_and_no_folder_an_error(tmp_path):
    assert len(load_runs(tmp_path)) == 0
    assert "state" in load_runs([tmp_path])
    with pytest.raises(RunError, match="nowhere: no such folder"):
        load_runs("nowhere")


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, True),
        ({"step": 5}, False),
        ({"overrides": ["data.eval_batch_size=2"]}, True),
        ({"overrides": ["model.memory.eval_num_slots=2"]}, False),
        ({"checkpoint": "other/00000010"}, False),
    ],
)
def test_later_validations_count_if_they_score_the_last_weights(runs, changes, counts):
    run = runs / "a/20260101-000000-0000"
    add_validation(run, V2_SCORES | {"mine": {"loss": 1.0}}, **changes)
    row = read_run(RunFolder(run))
    assert ("val/v2/c4/loss" in row) == counts
    assert "val/mine/loss" not in row  # would change the average


def test_a_loss_of_zero_is_finite_and_null_is_not(runs):
    run = finish(runs / "queue-seed=1-0123abcd", 3.5, sets={"a": {"loss": 0.0}, "b": {"loss": None, "tokens": 7}})
    assert get_scores(read_run(RunFolder(run))) == {"a": {"loss": 0.0}, "b": {"tokens": 7}}


def test_a_run_without_own_sets_has_the_scores_of_a_later_validation(runs):
    run = finish(runs / "queue-seed=1-0123abcd", 3.5, sets={}, average={})
    assert "best_loss" not in read_run(RunFolder(run))
    add_validation(run, {"mine": {"loss": 2.0}, "yours": {"loss": 4.0}})
    row = read_run(RunFolder(run))
    assert (row["val/average/loss"], row["best_loss"]) == (3.0, 3.0)


def test_best_includes_the_final_evaluation_unless_others_are_of_samples(tmp_path):
    whole = finish(write_run(tmp_path / "a", "data.eval_sequences=null", losses=[4.0]), 3.0)
    sample = finish(write_run(tmp_path / "b", "data.eval_sequences=8", losses=[4.0]), 3.0)
    for run in (whole, sample):
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 1, "tokens": 1024, "val/loss/average": 3.2}\n')
    assert read_run(RunFolder(whole))["best_loss"] == 3.0
    assert read_run(RunFolder(sample))["best_loss"] == 3.2


def test_best_excludes_losses_before_a_resume_with_another_evaluation(tmp_path):
    run = write_run(tmp_path / "a", "data.eval_sequences=8", losses=[5.0, 5.0, 5.0])
    with (run / "metrics.jsonl").open("a") as file:
        for step, loss in ((1, 3.1), (2, 3.2), (3, 3.3)):
            file.write(json.dumps({"step": step, "tokens": 1024 * step, "val/loss/average": loss}) + "\n")
    earlier = (run / "config.yaml").read_text()
    for changed, best in (("max_steps: 720", "max_steps: 700"), 3.1), (("eval_sequences: 8", "eval_sequences: 4"), 3.3):
        assert earlier.count(changed[0]) == 1
        (run / "config.step-2.yaml").write_text(earlier.replace(*changed))
        assert read_run(RunFolder(run))["best_loss"] == best


RECORDS = ("config.yaml", "metrics.jsonl", "result.json", "environment.json", "validate.json")
CONTENTS = ("{", "[]\n", '{"step": "x"}\n', '{"sets": {"a": 3}}\n', "\0\n", "5\n", "")
VALID = {("metrics.jsonl", "{"), ("metrics.jsonl", ""), ("environment.json", "[]\n")}  # cut off by a kill; no session


@pytest.mark.parametrize("file", [*RECORDS, ".lock"])
def test_damage_is_a_state_and_only_regular_files_are_read(runs, file):
    run = runs / "a/20260101-000000-0000"
    for content in CONTENTS if file != ".lock" else ():
        before = (run / file).read_bytes() if (run / file).exists() else None
        (run / file).write_text(content)
        row = read_rows(runs)[0]
        assert row["state"] == ("finished" if (file, content) in VALID else "damaged"), content
        assert (file in row["problem"]) == (row["state"] == "damaged")
        assert "\n" not in row["problem"]
        (run / file).unlink() if before is None else (run / file).write_bytes(before)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (run / file).unlink(missing_ok=True)
        make(run / file)
        row = read_rows([runs])[0]
        assert row["state"] == "damaged"
        assert "not a regular file" in row["problem"]


@pytest.mark.parametrize(
    "change",
    [
        ("seed: 1", "seed: x", "seed: expected an integer, found 'x'"),
        ("max_steps", "max_step", "trainer.max_steps: expected an integer, found None"),
        ("plugins: []", "plugins: 5", "plugins: expected a list, found 5"),
        ("  max_length: 40\n", "", "data.max_length: expected an integer, found None"),
        ("eval_max_length: 500", "eval_max_length: y", "data.eval_max_length: expected an integer, found 'y'"),
    ],
)
def test_a_config_without_the_options_that_reports_read_is_damaged(tmp_path, change):
    path = write_run(tmp_path / "runs/a") / "config.yaml"
    before, after, problem = change
    text = to_yaml(compose(["formal/lstm"], ["seed=1"]))
    assert before in text
    path.write_text(text.replace(before, after))
    (row,) = read_rows(tmp_path / "runs")
    assert (row["state"], row["problem"]) == ("damaged", f"{path}: {problem}; restore the file")


def test_metrics_are_read_in_bounded_memory(runs):
    line = json.dumps({"step": 7, "tokens": 7, "train/loss": 2.0, "train/lr": 0.1}) + "\n"
    (runs / "a/20260101-000000-0000/metrics.jsonl").write_text(line * 100_000)
    assert load_runs(runs)["train_loss"][0] == 3.0  # of result.json
    run = str(runs / "a/20260101-000000-0000")
    for command in (["runs", "list", str(runs)], ["runs", "show", run], ["report", "compare", run]):
        assert main(command) == 0  # imports
        tracemalloc.start()
        assert main(command) == 0
        assert tracemalloc.get_traced_memory()[1] < 4e6
        tracemalloc.stop()


@pytest.mark.parametrize("file", [*RECORDS, "data.jsonl", ".stackexp", "benchmarks.json"])
def test_no_command_waits_for_a_pipe_in_a_run(runs, file, tmp_path, capsys):
    run = runs / "a/20260101-000000-0000"
    (run / file).unlink(missing_ok=True)
    os.mkfifo(run / file)
    for command in (["runs", "show"], ["report", "compare"], ["report", "ablation"], ["report", "benchmarks"]):
        assert main([*command, str(run)]) in (0, 1, 2)
        assert "Traceback" not in capsys.readouterr().err
    assert main(["runs", "copy", str(run), "--to", str(tmp_path / "copies")]) in (0, 1, 2)


def test_arms_are_named_after_the_trial_or_the_config():
    names = {
        "runs/quickstart/20261123-210406-08a1": "quickstart",
        "runs/ablation/normalized-identity-seed=1-06471341": "normalized-identity",
        "runs/grid/H=2-d_s=4-seed=0-06471341": "H=2-d_s=4",
        "runs/grid/seed=0-06471341": "grid",
        "runs/grid/seed=0-lr=0.001-06471341": "lr=0.001",
        "runs/grid/H=2-seed=10-lr=0.001-06471341": "H=2-lr=0.001",
        "runs/noise/wide-seed=0-shuffle_seed=1-06471341": "wide",
        "runs/mine": "mine",
        "runs/exp-20261123": "exp-20261123",
        "runs/exp-20261323": "exp",
    }
    assert {path: name_arm(Path(path)) for path in names} == names


def test_a_repeated_key_is_damage(runs):
    run = runs / "a/20260101-000000-0000"
    text = (run / "config.yaml").read_text()
    for old, new in (("\nseed: 0\n", "\nseed: 0\nseed: 7\n"), ("\n  max_steps: ", "\n  max_steps: 3\n  max_steps: ")):
        assert old in text
        (run / "config.yaml").write_text(text.replace(old, new))
        assert "duplicate key" in read_rows(runs)[0]["problem"]
