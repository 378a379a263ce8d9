"""Mirrors of metrics.jsonl in Weights & Biases (offline) and MLflow (a local database), with the real libraries."""

import json
import logging
import shutil
import threading

import pytest
from forks import Forks
from records import only_run
from wandb_files import read_history

from stackexp.cli import main
from stackexp.config.compose import compose
from stackexp.errors import ConfigError
from stackexp.runs import RunFolder
from stackexp.training import loop, mirrors
from stackexp.training.mirrors import Mirror, MlflowService, check_installed

QUIET = ("logging.progress_bar=false", "logging.tensorboard=false")


@pytest.fixture
def wandb(monkeypatch):
    library = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    return library


@pytest.fixture
def client(monkeypatch, tmp_path):
    """The client of an empty MLflow database."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")


def read_lines(run: RunFolder) -> list[dict]:
    """Return the lines of metrics.jsonl without the clock."""
    return [{tag: value for tag, value in line.items() if tag != "time"} for line in run.read_metrics()]


def stop_at(run: RunFolder, step: int) -> None:
    """Turn a finished run into one that was killed after the checkpoint of `step`."""
    run.result.unlink()
    for path in run.list_checkpoints():
        if int(path.name) > step:
            shutil.rmtree(path)


def test_wandb_receives_every_line_and_the_final_scores(wandb, tiny, tmp_path):
    assert main(["fit", "--config", str(tiny), *QUIET, "logging.mirrors=[wandb]", "trainer.keep_checkpoints=9"]) == 0
    run = only_run(tmp_path / "runs")
    (folder,) = run.path.glob("wandb/offline-run-*")
    (file,) = folder.glob("*.wandb")
    history = read_history(file)
    lines, figures = read_lines(run), history[-1]
    assert [{tag: row[tag] for tag in line} for line, row in zip(lines, history[:-1], strict=True)] == lines
    assert figures["val/loss/average"] == json.loads(run.result.read_text())["average"]["loss"]

    stop_at(run, 8)
    assert main(["fit", "--config", str(tiny), *QUIET, "logging.mirrors=[wandb]", "--run", str(run.path)]) == 0
    folders = sorted(run.path.glob("wandb/offline-run-*"))
    run_id = (run.path / "mirror.wandb").read_text()
    assert len(folders) == 2
    assert all(path.name.endswith(run_id) for path in folders), "both sessions belong to one run"
    (file,) = folders[1].glob("*.wandb")
    assert [row["step"] for row in read_history(file)[:-1]] == [line["step"] for line in lines]


def test_mlflow_continues_the_same_run(client, tiny, tmp_path):
    options = (*QUIET, "logging.mirrors=[mlflow]", "trainer.keep_checkpoints=9")
    assert main(["fit", "--config", str(tiny), *options]) == 0
    run = only_run(tmp_path / "runs")
    (experiment,) = client.search_experiments(filter_string="name = 'tiny'")
    (mirrored,) = client.search_runs([experiment.experiment_id])
    assert mirrored.info.status == "FINISHED"
    assert mirrored.info.run_name == run.path.name
    assert mirrored.data.params["model.hidden_size"] == "32"
    for tag in ("train/loss", "val/loss/average"):
        expected = {line["step"]: line[tag] for line in read_lines(run) if tag in line}
        history = client.get_metric_history(mirrored.info.run_id, tag)
        assert {point.step: point.value for point in history} == expected

    stop_at(run, 8)
    overrides = ("trainer.max_steps=14", "trainer.val_check_interval=14")
    assert main(["fit", "--config", str(tiny), *options, *overrides, "--run", str(run.path)]) == 0
    (mirrored,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(mirrored.info.run_id, "train/loss")
    assert [point.step for point in history] == [*range(1, 13), *range(9, 15)], "repeated steps are sent again"
    assert {point.step: point.value for point in history} == {
        line["step"]: line["train/loss"] for line in read_lines(run) if "train/loss" in line
    }


def test_mlflow_receives_options_with_any_name(client, tiny, tmp_path):
    config = compose([str(tiny)], ["data.validation.json+email=texts"])
    run_id, _ = MlflowService().open(RunFolder(tmp_path / "run"), config, None)
    assert client.get_run(run_id).data.params["data.validation.json_email"] == "texts"


def test_lines_that_a_killed_session_did_not_send_are_sent_later(client, tiny, tmp_path, monkeypatch):
    """The first session has no mirror at all."""
    assert main(["fit", "--config", str(tiny), *QUIET, "trainer.keep_checkpoints=9"]) == 0
    run = only_run(tmp_path / "runs")
    stop_at(run, 8)
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    options = ("logging.mirrors=[mlflow]", "logging.root=${oc.env:RUNS}", "--run", str(run.path))
    assert main(["fit", "--config", str(tiny), *QUIET, *options]) == 0
    (mirrored,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    history = client.get_metric_history(mirrored.info.run_id, "train/loss")
    assert [point.step for point in history] == list(range(1, 13))
    assert mirrored.data.params["logging.root"] == "${oc.env:RUNS}", "values of the environment may be secrets"


@pytest.mark.process
def test_only_the_first_process_mirrors(client, tiny, tmp_path):
    options = ("trainer.devices=2", "trainer.strategy=ddp", "data.micro_batch_size=2", "logging.mirrors=[mlflow]")
    Forks(tmp_path).run("fit", "--config", tiny, *QUIET, *options, ranks=2)
    (mirrored,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    history = client.get_metric_history(mirrored.info.run_id, "train/loss")
    assert [point.step for point in history] == list(range(1, 13))


class Failing:
    """A service that fails with its second line."""

    def open(self, run, config, run_id):
        self.count = 0
        return "id", 0

    def write(self, line):
        self.count += 1
        if self.count == 2:
            raise ConnectionError("no route to host\nmore")

    def close(self, is_finished):
        raise AssertionError("a failed service is not used again")


def test_a_failing_service_is_reported_once_and_training_goes_on(tiny, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(mirrors.SERVICES, "wandb", Failing)
    monkeypatch.setattr(loop, "check_installed", lambda config: None)
    with caplog.at_level(logging.WARNING):
        assert main(["fit", "--config", str(tiny), *QUIET, "logging.mirrors=[wandb]"]) == 0
    run = only_run(tmp_path / "runs")
    messages = [r.getMessage() for r in caplog.records if "mirrors" in r.getMessage()]
    assert messages == [
        f"logging.mirrors: wandb: no route to host; nothing more is sent to it, but {run.metrics} has every line"
    ]
    assert len(read_lines(run)) == 14


def test_a_service_that_hangs_delays_the_end_only_briefly(tmp_path, monkeypatch, caplog):
    released = threading.Event()

    class Hanging(Failing):
        def write(self, line):
            released.wait(60)

    monkeypatch.setitem(mirrors.SERVICES, "wandb", Hanging)
    monkeypatch.setattr(mirrors, "CLOSE_TIMEOUT_SECONDS", 0.1)
    mirror = Mirror("wandb", RunFolder(tmp_path), compose(["quickstart"]))
    mirror.write({"step": 1})
    mirror.close(is_finished=True)
    released.set()
    assert "wandb: still sending after 0.1 s" in caplog.text


@pytest.mark.parametrize("has_folder", [False, True])
def test_missing_library_is_one_line(tmp_path, monkeypatch, has_folder):
    """A folder named wandb, which offline runs leave, is not the library."""
    if has_folder:
        (tmp_path / "wandb").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    config = compose(["quickstart"], ["logging.mirrors=[wandb]"])
    with pytest.raises(
        ConfigError, match=r"^logging.mirrors: wandb: not installed; run pip install 'stackexp\[wandb\]'$"
    ):
        check_installed(config)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[wandbb]", "logging.mirrors: 'wandbb' is not one of wandb, mlflow; did you mean 'wandb'?"),
        ("[mlflow,mlflow]", "logging.mirrors: mlflow is named twice; name it once"),
    ],
)
def test_mistakes_in_the_config(value, message):
    with pytest.raises(ConfigError) as caught:
        compose(["quickstart"], [f"logging.mirrors={value}"])
    assert message in str(caught.value)
