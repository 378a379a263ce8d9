"""Loggers with the real libraries: TensorBoard, CSV, W&B (offline), MLflow (a local database), and own classes."""

import json
import logging
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, WandbLogger
from records import only_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2
from wandb_files import read_history

from stackexp.cli import main
from stackexp.config.compose import compose
from stackexp.errors import ConfigError
from stackexp.files import write_json_lines
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.modules.scores import tag_scores
from stackexp.runs import RunFolder
from stackexp.training.callbacks.steps import Throughput
from stackexp.training.loggers import (
    TITLES,
    HeatMaps,
    RunTensorBoard,
    build_layout,
    build_loggers,
    find_sent_lines,
    open_logger,
    send_line,
    write_points,
)
from stackexp.training.trainer import build_callbacks

QUIET = ("logging.progress_bar=false", "trainer.keep_checkpoints=9")
LOSS = "train/loss"


def fit(config, *options: str) -> None:
    assert main(["fit", "--config", str(config), *QUIET, *options]) == 0


def read_curve(folder, tag: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in read_events(folder).Scalars(tag)]


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


@pytest.mark.process
def test_wandb_and_mlflow_receive_every_line_and_continue_after_a_kill(wandb, client, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    options = ("logging.loggers=[wandb,mlflow]", "logging.root=${oc.env:RUNS}")
    fit(tiny, *options)
    run = only_run(tmp_path / "runs")
    (file,) = run.path.glob("wandb/offline-run-*/*.wandb")
    *history, figures = read_history(file)
    lines = read_lines(run)
    assert [row["trainer/global_step"] for row in history] == [line["step"] for line in lines]
    assert all(line.items() - {("step", line["step"])} <= row.items() for line, row in zip(lines, history, strict=True))
    assert figures["val/loss/average"] == json.loads(run.result.read_text())["average"]["loss"]
    (experiment,) = client.search_experiments(filter_string="name = 'tiny'")
    (logged,) = client.search_runs([experiment.experiment_id])
    assert (logged.info.status, logged.info.run_name) == ("FINISHED", run.path.name)
    assert logged.data.params["model.hidden_size"] == "32"
    assert logged.data.params["logging.root"] == "${oc.env:RUNS}", "values of the environment may be secrets"
    for tag in (LOSS, "val/loss/average"):
        points = client.get_metric_history(logged.info.run_id, tag)
        assert {p.step: p.value for p in points} == {line["step"]: line[tag] for line in lines if tag in line}

    stop_at(run, 8)
    fit(tiny, *options, "trainer.max_steps=14", "trainer.val_check_interval=14", "--run", str(run.path))
    lines = read_lines(run)
    folders = sorted(run.path.glob("wandb/offline-run-*"))
    assert len(folders) == 2
    run_id = (run.path / "logger.wandb").read_text()
    assert all(path.name.endswith(run_id) for path in folders), "both sessions belong to one run"
    (file,) = folders[1].glob("*.wandb")
    steps = [row["trainer/global_step"] for row in read_history(file)[:-1]]
    assert steps == [line["step"] for line in lines], "offline runs cannot be continued"
    (logged,) = client.search_runs([experiment.experiment_id])
    points = [(point.step, point.value) for point in client.get_metric_history(logged.info.run_id, LOSS)]
    assert [step for step, _ in points] == list(range(1, 15))
    expected = {line["step"]: line[LOSS] for line in lines if LOSS in line}
    assert {step: dict(points)[step] for step in (8, 13, 14)} == {step: expected[step] for step in (8, 13, 14)}


class Lines(Logger):
    """A logger of a user."""

    name, version = "lines", 0

    def log_hyperparams(self, params): ...

    def log_metrics(self, metrics, step=None): ...


def open_wandb() -> Logger:
    """A logger of an online run, which W&B resumes with its summary."""
    pytest.importorskip("wandb")
    summary: dict[str, float] = {}
    run = SimpleNamespace(summary=summary, log=summary.update, define_metric=lambda *_, **__: None)
    logger = WandbLogger(offline=True)
    logger._experiment = run
    return logger


def open_mlflow() -> Logger:
    pytest.importorskip("mlflow")
    return MLFlowLogger("lines", tracking_uri=os.environ["MLFLOW_TRACKING_URI"])


@pytest.mark.parametrize("open_one", [Lines, open_wandb, open_mlflow])
def test_a_logger_receives_the_lines_that_earlier_sessions_have_not_sent(client, tmp_path, open_one):
    run, logger = RunFolder(tmp_path), open_one()
    step_1, step_2 = ({"step": n, "tokens": 8 * n, "time": 1.5, LOSS: 5.5 - n, "train/lr": 0.1} for n in (1, 2))
    validation = {"step": 2, "tokens": 16, "time": 2.5, "val/loss/average": 3.25}
    write_json_lines(run.metrics, [])
    assert not find_sent_lines(logger, run).includes(step_1), "a new run"
    for line in (step_1, step_2):
        send_line(logger, line)
    write_json_lines(run.metrics, [step_1, step_2])
    sent = find_sent_lines(logger, run)
    assert [sent.includes(line) for line in (step_1, step_2, validation)] == [True, True, False]
    assert sent.includes(step_2 | {LOSS: 3.6}), "repeated on a GPU, which rounds differently"
    assert not sent.includes(step_2 | {"step": 3})

    write_json_lines(run.metrics, [step_1, step_2, validation])
    is_known = open_one is Lines  # a kill may have been between writing and sending; only servers can be asked
    assert find_sent_lines(logger, run).includes(validation) == is_known
    send_line(logger, validation)
    assert find_sent_lines(logger, run).includes(validation)


def test_a_logger_of_the_user_receives_no_line_twice_after_two_kills(tmp_path):
    run, logger, options = RunFolder(tmp_path), Lines(), []
    logger.log_hyperparams = options.append
    lines = [{"step": step, "tokens": 8 * step, "time": 1.5, LOSS: 4.5} for step in range(1, 12)]
    for last in (0, 11, 9):  # a new run, and sessions after kills at steps 11 and 9
        write_json_lines(run.metrics, lines[:last])
        open_logger(logger, compose(["quickstart"]), run)
        sent = find_sent_lines(logger, run)
    assert all(sent.includes(line) for line in lines)
    assert not sent.includes(lines[-1] | {"step": 12})
    assert len(options) == 1, "only of the new run"


def test_local_files_have_each_step_once_after_a_kill(tiny, tmp_path):
    loggers = "logging.loggers=[tensorboard,csv]"
    fit(tiny, loggers)
    run = only_run(tmp_path / "runs")
    expected = [(line["step"], pytest.approx(line[LOSS])) for line in read_lines(run) if LOSS in line]
    stop_at(run, 8)
    fit(tiny, loggers, "--run", str(run.path))
    assert read_curve(run.path, LOSS) == expected
    rows = [line.split(",") for line in (run.path / "csv" / "metrics.csv").read_text().splitlines()]
    step, loss = rows[0].index("step"), rows[0].index(LOSS)
    assert [(int(row[step]), float(row[loss])) for row in rows[1:] if row[loss]] == expected
    assert not (run.path / "hparams.yaml").exists()


def test_files_in_the_folder_of_the_users_own_logger_are_kept(tmp_path):
    logger = CSVLogger(tmp_path / "results", name="", version="")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.txt").write_text("kept")
    open_logger(logger, compose(["quickstart"]), RunFolder(tmp_path / "run"))
    assert (tmp_path / "results" / "thesis.txt").read_text() == "kept"


@pytest.mark.process
def test_only_the_first_process_logs(client, tiny, forks):
    options = ("trainer.devices=2", "trainer.strategy=ddp", "data.micro_batch_size=2", "logging.loggers=[mlflow]")
    forks.run("fit", "--config", tiny, *QUIET, *options, ranks=2)
    (logged,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    history = client.get_metric_history(logged.info.run_id, LOSS)
    assert [point.step for point in history] == list(range(1, 13))


OWN = """
import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger

class Failing(Logger):
    name, version = "failing", 0
    count = 0

    def log_hyperparams(self, params): pass

    def log_metrics(self, metrics, step=None):
        Failing.count += 1
        if Failing.count == 2:
            raise ConnectionError("no route to host\\nmore")

    def finalize(self, status): assert status == "success", "Lightning calls it, too"

class Recorder(pl.Callback):
    def __init__(self, file):
        self.file = file

    def on_train_batch_end(self, trainer, module, *_):
        with open(self.file, "a") as file:
            names = [type(logger).__name__ for logger in trainer.loggers]
            print(trainer.global_step, trainer.datamodule is not None, *names, file=file)
"""


@pytest.fixture
def own(tmp_path):
    """A Python file of the user with a logger and a callback, in the folder of the config."""
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_callbacks_and_loggers_of_the_user(tiny, own, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("STACKEXP_TRUST_PLUGINS", "1")
    recorder = f"{{class: '{own}:Recorder', options: {{file: {tmp_path}/steps}}}}"
    with caplog.at_level(logging.WARNING):
        fit(tiny, f"trainer.callbacks=[{recorder}]", f"logging.loggers=['{own}:Failing']")
    run = only_run(tmp_path / "runs")
    assert len(read_lines(run)) == 14
    messages = [r.getMessage() for r in caplog.records if "loggers" in r.getMessage()]
    text = "logging.loggers: Failing: no route to host; nothing more is sent to it, but "
    assert messages == [f"{text}{run.metrics} has every line"]
    steps = (tmp_path / "steps").read_text().split("\n")[:-1]
    assert steps == [f"{batch // 2} True Failing" for batch in range(1, 25)]
    assert str(own) in run.config.read_text(), "found again by `fit --run` in any folder"


def test_each_entry_of_a_logger_receives_the_options_once(own, tmp_path, monkeypatch):
    monkeypatch.setenv("STACKEXP_TRUST_PLUGINS", "1")
    own.write_text(f"{OWN}\nclass Named(Failing):\n    def __init__(self, path): super().__init__()\n")
    run, received = RunFolder(tmp_path), []
    for path in ("a", "b", "a"):
        entry = f"{{class: '{own}:Named', options: {{path: {path}}}}}"
        config = compose(["quickstart"], [f"logging.loggers=[{entry}]"])
        (logger,) = build_loggers(config, run)
        logger.log_hyperparams = lambda _, path=path: received.append(path)
        open_logger(logger, config, run)
        find_sent_lines(logger, run)
    assert received == ["a", "b"]


def test_the_logger_and_the_callback_of_the_docs(tiny, empty_folder, capsys):
    text = (Path(__file__).parents[1] / "docs" / "runs.md").read_text()
    for name in ("my_loggers.py", "my_callbacks.py"):
        [code] = re.findall(rf"```python\n(# {name}\n.*?)```", text, re.DOTALL)
        Path(name).write_text(code)
    loggers = "logging.loggers=[tensorboard, {class: 'my_loggers.py:LossFile', options: {path: losses.txt}}]"
    fit(tiny, loggers, "trainer.callbacks=[{class: 'my_callbacks.py:PrintNorm', options: {every: 6}}]")
    losses = [line.split() for line in Path("losses.txt").read_text().splitlines()]
    assert {int(step) for step, _ in losses} >= set(range(1, 13))
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if re.fullmatch(r"\d+ \d+\.\d+", line)]
    assert printed == ["0", "6", "6", "12"], "after each micro-batch"


def test_files_of_callbacks_follow_the_trust_rules_of_plugins(own, tmp_path, monkeypatch):
    config, project = tmp_path / "foreign.yaml", tmp_path / "project"
    (project / ".git").mkdir(parents=True)
    monkeypatch.chdir(project)
    config.write_text("defaults: [quickstart]\ntrainer: {callbacks: ['own.py:Recorder']}\n")
    with pytest.raises(ConfigError, match=r"own.py is outside the project .* add --trust-plugins"):
        compose([str(config)])
    monkeypatch.setenv("STACKEXP_TRUST_PLUGINS", "1")
    assert compose([str(config)]).trainer.callbacks == [f"{own}:Recorder"]


@pytest.mark.parametrize("entry", ["own:Missing", "nowhere:X", "{class: 'json:JSONDecoder', options: {strict: 1}}"])
def test_a_logger_that_cannot_be_built_is_one_line(own, empty_folder, tmp_path, entry):
    with pytest.raises(ConfigError, match=r"^logging.loggers: ") as caught:
        build_loggers(compose(["quickstart"], [f"logging.loggers=[{entry}]"]), RunFolder(tmp_path / "run"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("has_folder", [False, True])
def test_missing_library_is_one_line(tmp_path, monkeypatch, has_folder):
    """A folder named wandb, which offline runs leave, is not the library."""
    if has_folder:
        (tmp_path / "wandb").mkdir()
    config = compose(["quickstart"], ["logging.loggers=[wandb]"])
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match=r"wandb: not installed; run pip install 'stackexp\[wandb\]'$"):
        build_loggers(config, RunFolder(tmp_path))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("logging.loggers=[wandbb]", "found 'wandbb'; did you mean 'wandb'?"),
        ("logging.loggers=[mlflow,mlflow]", "mlflow is named twice"),
        ("logging.mirrors=[wandb]", "renamed; use logging.loggers"),
        ("logging.tensorboard=false", "add tensorboard to logging.loggers"),
        ("trainer.callbacks=[Recorder]", "expected module:Class, found 'Recorder'"),
        ("trainer.callbacks=[{class: 'a:B', x: 3}]", "expected the keys class and options"),
        ("trainer.callbacks=[{class: 'a:B', options: 3}]", "expected a mapping, found 3"),
    ],
)
def test_mistakes_in_the_config(override, words):
    with pytest.raises(ConfigError) as caught:
        compose(["quickstart"], [override])
    assert words in str(caught.value)


@pytest.mark.parametrize("key", ["trainer.callbacks", "logging.loggers"])
@pytest.mark.parametrize("name", ["subprocess:Popen", "os:system", "stackexp.runs:RunFolder"])
def test_classes_that_are_no_callbacks_or_loggers_are_not_called(tmp_path, key, name):
    """A config may come from somebody else: its options must not become the arguments of just any function."""
    entry = {"class": name, "options": {"args": ["touch", str(tmp_path / "ran")]}}
    config = compose(["quickstart"], [f"{key}={json.dumps([entry])}"])
    base, build = {
        "trainer.callbacks": ("Callback", lambda: build_callbacks(config, *[None] * 4)),
        "logging.loggers": ("Logger", lambda: build_loggers(config, RunFolder(tmp_path))),
    }[key]
    message = rf"^{re.escape(key)}: {name}: not a {base}; derive it from lightning\.pytorch"
    with pytest.raises(ConfigError, match=message):
        build()
    assert not (tmp_path / "ran").exists()


# TensorBoard


@pytest.fixture(scope="module")
def probed_line() -> dict[str, float]:
    """Return everything that a real module and callback log at a probed step, with two layers."""
    small = ["hidden_size=16", "num_layers=2", "intermediate_size=16", "num_heads=2", "num_kv_heads=1"]
    overrides = [f"model.{option}" for option in (*small, "vocab_size=300")]
    module = LanguageModeling(compose(["quickstart"], [*overrides, "data.vocab_size=300", "trainer.z_loss=0.1"]))
    module.probe = True
    module.training_step({"tokens": torch.arange(16).view(2, 8), "index": torch.arange(2)}, 0).backward()
    module.configure_gradient_clipping(module.configure_optimizers()["optimizer"])
    callback, trainer = Throughput(), SimpleNamespace(global_step=0, world_size=1)
    callback.on_train_start(trainer, module)
    trainer.global_step = 1
    callback.on_train_batch_end(trainer, module)
    return {"step": 1, "tokens": 16, "time": 1000.0} | module.step_metrics.drain()


SETS = {
    f: {f"val/{f}/{name}" for name in ("left", "right", "average")} for f in ("loss", "perplexity", "bits_per_byte")
}


V3_AVERAGES = {f"val/whole/v3/average/{figure}" for figure in ("perplexity", "exp_mean_loss")}
SHOWN_TAGS = {
    "Training": {
        "loss": {"train/loss"} | SETS["loss"],
        "loss by tokens": {"loss/train_by_tokens"},
        "gradient norm": {"train/grad_norm"},
        "learning rate": {"train/lr"},
        "tokens per second": {"train/tokens_per_second"},
    },
    "Validation": {figure.replace("_", " "): tags for figure, tags in SETS.items()},
    "V2": {
        "loss": {"val/v2/a", "val/v2/average/loss"},
        "mean perplexity": {"val/v2/average/perplexity", "val/v2/average/exp_mean_loss"},
    },
    "V3": {"loss": {"val/whole/v3/a", "val/whole/v3/average/loss"}, "mean perplexity": V3_AVERAGES},
    "Formal languages": {
        "accuracy by length": {"test/accuracy_by_length"},
        "accuracy": {"train/accuracy", "val/accuracy/average"},
        "longest training string": {"train/max_length"},
    },
}


def read_events(folder) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


@pytest.mark.parametrize("objective", ["language_modeling", "transduction"])
def test_charts_show_their_tags_and_only_those_of_the_objective(probed_line, tmp_path, objective):
    names = ["left", "v2/a", "v3/a"] if objective == "language_modeling" else ["length_041"]
    logger = RunTensorBoard(tmp_path)
    logger.start(build_layout(objective, names), {"config": "a:\n  b: <i>*c*"}, {}, [])
    logger.log_line(probed_line)
    result = {"loss": 2.0, "perplexity": 7.4, "bits_per_byte": 1.0}
    tags = tag_scores("val/whole", {"v3/a": result}) | tag_scores("val", {"v2/a": result})
    tags = {tag: value for tag, value in tags.items() if not tag.endswith("/average")}
    tags |= tag_scores("val", {"left": result, "right": result})
    tags |= {"train/accuracy": 0.5, "val/accuracy/average": 0.5, "train/max_length": 4.0}
    logger.log_line({"step": 1, "tokens": 16, "time": 1001.0} | tags)
    logger.close()
    write_points(tmp_path, "test.lengths", [("test/accuracy_by_length", 1.0, 1), ("test/accuracy_by_length", 0.5, 2)])
    events = read_events(tmp_path)
    [text] = events.Tensors("config/text_summary")
    assert text.tensor_proto.string_val[0] == b"    a:\n      b: <i>*c*", "texts are shown as they are"
    tags = events.Tags()["scalars"]
    [layout] = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0])
    shown = {
        category.title: {
            # TensorBoard's plugin shows a tag if a regex matches from its beginning.
            chart.title: {tag for tag in tags for regex in chart.multiline.tag if re.match(regex, tag)}
            for chart in category.chart
        }
        for category in layout.category
    }
    hidden = ["Formal languages"] if objective == "language_modeling" else ["Validation", "V2", "V3"]
    assert shown == {group: charts for group, charts in SHOWN_TAGS.items() if group not in hidden}
    assert list(build_layout("language_modeling", [])) == ["Training"], "only charts that will be filled"
    assert list(build_layout("language_modeling", ["mine/a", "mine/b"])) == ["Training", "Validation", "MINE"]


def test_lines_keep_their_time_and_evaluations_their_files(tmp_path):
    write_points(tmp_path, "test.lengths", [("test/accuracy_by_length", 1.0, 1)])
    (tmp_path / "events.out.tfevents.1.host").write_text("of an earlier session")
    logger = RunTensorBoard(tmp_path)
    for step in (1, 2):
        logger.log_line({"step": step, "tokens": 16 * step, "time": 1000.0 + step, LOSS: 5.0 - step})
    logger.close()
    events = read_events(tmp_path)
    assert [(p.step, p.value, p.wall_time) for p in events.Scalars(LOSS)] == [(1, 4.0, 1001.0), (2, 3.0, 1002.0)]
    assert [(p.step, p.value) for p in events.Scalars("loss/train_by_tokens")] == [(16, 4.0), (32, 3.0)]
    assert [(p.step, p.value) for p in events.Scalars("loss/train")] == [(1, 4.0), (2, 3.0)]
    tags = ["loss/train", "loss/train_by_tokens", "test/accuracy_by_length", LOSS]
    assert sorted(events.Tags()["scalars"]) == tags, "no step, tokens or time"
    assert not (tmp_path / "events.out.tfevents.1.host").exists()


def test_hyperparameters_are_written_when_the_run_starts(tmp_path):
    logger = RunTensorBoard(tmp_path)
    hyperparameters = {"optimizer.lr": 0.5, "model.memory.axis": "depth", "model.memory": None}
    hyperparameters["model.memory.num_heads"] = 2  # shown by the symbol of the paper
    logger.start({}, {}, hyperparameters, [LOSS, "val/loss/average"])
    logger.save()
    [path] = tmp_path.iterdir()
    values = [value for event in EventFileLoader(str(path)).Load() for value in event.summary.value]
    tags = [value.tag for value in values if value.tag.startswith("_hparams_/")]
    assert sorted(tags) == [f"_hparams_/{name}" for name in ("experiment", "session_end_info", "session_start_info")]
    [start] = [value for value in values if value.tag.endswith("session_start_info")]
    content = plugin_data_pb2.HParamsPluginData.FromString(start.metadata.plugin_data.content)
    written = {key: getattr(v, v.WhichOneof("kind")) for key, v in content.session_start_info.hparams.items()}
    assert written == {"optimizer.lr": 0.5, "model.memory.axis": "depth", "model.memory": "None", "H": 2}
    logger.finish(3.0, 9)
    logger.close()
    assert read_curve(tmp_path, "train/final_loss") == [(9, 3.0)]


def make_probes(steps: list[int], layers: int) -> list[dict[str, float]]:
    names = ("push", "pop", "no_op", "entropy", "occupancy", "read_share")
    tags = [f"memory/{name}/layer_{layer:02d}" for name in names for layer in range(layers)]
    return [{"step": s, "tokens": s, "time": 0.0} | {tag: (s + i) % 7 / 7 for i, tag in enumerate(tags)} for s in steps]


def test_the_heat_map_is_an_image_of_all_layers_and_probes(tmp_path):
    logger = RunTensorBoard(tmp_path)
    for line in make_probes([1, 10, 20], layers=32):
        logger.log_line(line)
    logger.finish(3.0, 20)
    logger.close()
    events = read_events(tmp_path)
    assert len(events.Tags()["images"]) == 6
    [image] = events.Images("memory/heat_map/push")
    assert image.step == 20
    assert image.encoded_image_string.startswith(b"\x89PNG")
    heat_maps = HeatMaps()
    assert not heat_maps
    assert not heat_maps.add({"step": 1, "train/loss": 2.0})
    for line in make_probes(list(range(1, 1200)), layers=2):
        assert heat_maps.add(line)
    heat_maps.add(make_probes([1200], layers=2)[0] | {"memory/push/layer_00": None})  # not finite
    assert [name for name, _ in heat_maps.draw()] == sorted(TITLES)
