"""Formal languages from the command line: fit, killed and resumed, tested, shown in TensorBoard, side by side."""

import json
from pathlib import Path

import numpy as np
import pytest
from forks import Forks
from records import assert_close, losses, only_run, record
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stackexp.runs import RunFolder
from stackexp.tasks import TASKS

TINY = ("model.hidden_size=16", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=2")
TINY += ("model.intermediate_size=16", "data.batch_size=4", "data.max_length=8", "data.validation_max_length=10")
TINY += ("data.validation_sequences=4", "data.eval_max_length=14", "data.eval_length_stride=2", "data.eval_sequences=6")
TINY += ("data.curriculum_steps=10", "data.curriculum_start=2", "trainer.accelerator=cpu", "trainer.max_steps=60")
TINY += (
    "schedule.warmup_steps=0",
    "trainer.val_check_interval=20",
    "trainer.checkpoint_interval=5",
    "logging.probe_interval=5",
)
NOISE = ("model.memory.axis=time", "model.memory.read=top", "model.memory.num_slots=4", "model.memory.action_noise=0.5")
FIT = ("fit", "--config", "formal/stacktrans", *TINY, *NOISE, "model.memory.eval_num_slots=5", "name=tiny")
FIT += ("trainer.keep_checkpoints=2",)
TESTED = [1, 3, 5, 7, 9, 11, 13]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("formal")


@pytest.fixture(scope="module")
def forks(folder) -> Forks:
    return Forks(folder)


@pytest.fixture(scope="module")
def printed(forks) -> str:
    return forks.run(*FIT)


@pytest.fixture(scope="module")
def run(folder, printed) -> RunFolder:
    return only_run(folder / "runs")


def result_of(run: RunFolder, file: str = "result.json") -> dict:
    return json.loads((run.path / file).read_text())


def test_a_run_killed_twice_ends_as_one_that_was_not(forks, folder, run):
    elsewhere = folder / "killed"
    command = (*FIT, f"logging.root={elsewhere}")

    def reached(step: int) -> bool:
        runs = map(RunFolder, elsewhere.glob("tiny/*"))
        return any(step in losses(run) and run.saved() for run in runs)

    for step, resume in ((12, ()), (27, ("--ckpt_path", "last"))):
        forks.start(*command, *resume).kill_when(lambda step=step: reached(step))
    killed = only_run(elsewhere)
    assert not killed.finished, "the kills came too late to test anything"
    forks.run(*command, "--ckpt_path", "last")
    assert record(killed) == record(run), "bit for bit, tokens and validations too"
    results = [result_of(each) | {"seconds_of_last_session": 0} for each in (killed, run)]
    assert results[0] == results[1]


def test_tokens_are_those_of_the_strings_that_came(run):
    tokens = 0
    for line in run.read_metrics():
        if "loss/train" in line:
            rng = np.random.default_rng([0, line["step"]])
            length = rng.integers(1, line["data/max_length"] + 1)
            tokens += 4 * (length + TASKS["reverse_string"].output_length(length))
        assert line["tokens"] == tokens
    longest = [line["data/max_length"] for line in run.read_metrics() if "data/max_length" in line]
    assert (longest[0], longest[5], longest[9:]) == (2, 5, [7, *[8] * 50])


def test_the_result_has_every_length_and_scores(run, printed):
    result = result_of(run)
    accuracy = {int(length): value for length, value in result["accuracy"].items()}
    assert sorted(accuracy) == TESTED
    assert result["score_9_14"] == pytest.approx(np.mean([accuracy[n] for n in (9, 11, 13)]))
    assert (result["task"], result["model"]) == ("reverse_string", "stacktrans")
    assert (result["sequences_per_length"], result["length_stride"]) == (6, 2)
    validations = [line for line in run.read_metrics() if "validation/loss/average" in line]
    assert [line["step"] for line in validations] == [20, 40, 60]
    best = min(validations, key=lambda line: line["validation/loss/average"])
    assert result["tested_step"] == best["step"]
    assert result["validation_accuracy"] == best["validation/accuracy/average"]
    assert result["validation_loss"] == best["validation/loss/average"]
    mean = np.mean([best["validation/accuracy/length_009"], best["validation/accuracy/length_010"]])
    assert result["validation_accuracy"] == pytest.approx(mean)
    assert f"{result['score_9_14']:.3f}" in printed
    assert "o stacktrans" in printed
    told = [line for line in printed.splitlines() if "slots" in line]
    assert [line.partition(":")[0] for line in told] == ["model.memory.num_slots", "model.memory.eval_num_slots"]
    assert not (run.path / "data.jsonl").exists()
    assert not run.tokenizer.exists()
    assert not (run.path / "test.partial.jsonl").exists()


def events_of(run: RunFolder) -> EventAccumulator:
    events = EventAccumulator(str(run.path))
    events.Reload()
    return events


def test_what_is_tested_is_the_checkpoint_of_the_lowest_validation_loss(forks, run, folder):
    """Here training goes astray after it: the rate rises to 3."""
    rising = ("optimizer.lr=3", "trainer.gradient_clip_val=null", "trainer.max_steps=40", "schedule.warmup_steps=39")
    rising += ("schedule.decay_steps=1", "schedule.final_fraction=1")
    rising += ("trainer.val_check_interval=4", "trainer.checkpoint_interval=4")
    forks.run(*FIT, *rising, f"logging.root={folder / 'spoilt'}")
    spoilt_run = only_run(folder / "spoilt")
    validations = [line for line in spoilt_run.read_metrics() if "validation/loss/average" in line]
    best = min(validations, key=lambda line: line["validation/loss/average"])
    assert len(validations) == 10
    assert best["step"] < 40, "it did not go astray"
    result = result_of(spoilt_run)
    assert (result["tested_step"], result["steps"]) == (best["step"], 40)
    assert result["validation_loss"] == best["validation/loss/average"]
    forks.run("test", "--run", spoilt_run.path, "--ckpt_path", spoilt_run.checkpoints / f"{best['step']:08}")
    assert result_of(spoilt_run, f"test-{best['step']:08}.json")["accuracy"] == result["accuracy"]
    forks.run("test", "--run", spoilt_run.path, "--ckpt_path", "last")
    assert result_of(spoilt_run, "test-last.json")["step"] == 40


def test_tensorboard_has_accuracy_against_length(run):
    events = events_of(run)
    accuracy = result_of(run)["accuracy"]
    points = {point.step: point.value for point in events.Scalars("length/accuracy")}
    assert points == pytest.approx({int(length): value for length, value in accuracy.items()})
    tags = events.Tags()["scalars"]
    assert {"accuracy/train", "data/max_length", "validation/accuracy/average", "final/score_9_14"} <= set(tags)
    assert len(events.Scalars("accuracy/train")) == 60


def test_a_test_of_a_finished_run(forks, run):
    before = run.result.read_text()
    text = forks.run("test", "--run", run.path, "data.eval_batch_size=4")
    again, result = result_of(run, "test.json"), result_of(run)
    assert again["accuracy"] == result["accuracy"]
    assert again["score_9_14"] == result["score_9_14"]
    assert again["step"] == result["tested_step"]
    assert "o stacktrans" in text

    forks.run("test", "--run", run.path, "data.eval_length_stride=1", "data.eval_sequences=7")
    more = result_of(run, "test.json")
    assert sorted(map(int, more["accuracy"])) == list(range(1, 15))
    assert (more["sequences_per_length"], more["length_stride"]) == (7, 1)
    points = {point.step for point in events_of(run).Scalars("length/accuracy")}
    assert points == set(range(1, 15)), "the curve takes the place of the one before"
    forks.run("test", "--run", run.path, "data.eval_length_stride=4")
    assert result_of(run, "test.json") == more, "a shorter test does not take the place of a longer one"
    forks.run("test", "--run", run.path, "data.eval_max_length=12", "data.eval_sequences=900")
    assert result_of(run, "test.json") == more, "nor one of other lengths, however many strings"
    assert (run.path / "test-to-11-every-2-of-900.json").exists()
    forks.run("test", "--run", run.path, "data.task=odds_first", "data.eval_sequences=2000")
    assert result_of(run, "test.json") == more, "nor one of another task"
    forks.run("test", "--run", run.path, "model.memory.eval_num_slots=40")
    assert result_of(run, "test.json") == more, "nor one of another model"
    assert run.result.read_text() == before


def test_a_test_of_an_older_checkpoint_leaves_the_curve_to_the_last(forks, run):
    before = {point.step: point.value for point in events_of(run).Scalars("length/accuracy")}
    older, newest = sorted(run.checkpoints.iterdir())[0], run.newest_checkpoint()
    assert older != newest
    forks.run("test", "--run", run.path, "--ckpt_path", older, "data.eval_max_length=10")
    assert result_of(run, f"test-{older.name}.json")["step"] == int(older.name) < 60
    assert {point.step: point.value for point in events_of(run).Scalars("length/accuracy")} == before


def test_a_validation_of_a_finished_run(forks, run):
    text = forks.run("validate", "--run", run.path)
    record = result_of(run, "validate.json")
    assert sorted(record["accuracy"]) == ["10", "9"]
    for key in ("validation_accuracy", "validation_loss"):
        assert record[key] == result_of(run)[key]
    assert "length    9  accuracy" in text


def test_two_devices_train_as_one(forks, folder):
    few = (*FIT, "model.memory.action_noise=0", "model.memory.axis=depth", "trainer.max_steps=20")
    forks.run(*few, f"logging.root={folder}/one")
    options = ("trainer.devices=2", "data.eval_batch_size=2", f"logging.root={folder}/two")
    forks.run(*few, *options, ranks=2)
    one, two = only_run(folder / "one"), only_run(folder / "two")
    assert_close(two, one, tolerance=1e-4)
    assert result_of(two)["accuracy"] == pytest.approx(result_of(one)["accuracy"], abs=0.05)


def test_a_run_killed_in_its_test_goes_on_with_the_lengths_that_are_left(forks, folder):
    command = (*FIT, f"logging.root={folder}/tested", "trainer.max_steps=4", "model.memory.axis=depth")
    command += ("data.eval_sequences=1200", "data.eval_length_stride=1")

    def lengths_done() -> int:
        return sum(len(path.read_text().splitlines()) for path in folder.glob("tested/tiny/*/test.partial.jsonl"))

    forks.start(*command).kill_when(lambda: lengths_done() >= 3)
    killed = only_run(folder / "tested")
    assert not killed.finished, "the kill came too late to test anything"
    assert "of 14 sets are scored already" in forks.run(*command, "--ckpt_path", "last")
    forks.run("test", "--run", killed.path)
    assert result_of(killed)["accuracy"] == result_of(killed, "test.json")["accuracy"]


def test_runs_of_formal_languages_can_be_compared(forks, run):
    score = f"{result_of(run)['score_9_14']:.3f}"
    assert score in forks.run("report", "compare", run.path)
