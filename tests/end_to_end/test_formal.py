"""Formal languages from the command line: fit, kill, resume, test, validate, TensorBoard and comparison."""

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from forks import Forks
from records import assert_close, losses, only_run, record
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stackexp.files import read_json
from stackexp.runs import RunFolder
from stackexp.tasks import TASKS

TINY = ("model.hidden_size=16", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=2")
TINY += ("model.intermediate_size=16", "data.batch_size=4", "data.max_length=8", "data.validation_max_length=10")
TINY += ("data.validation_sequences=4", "data.eval_max_length=14", "data.eval_length_stride=2", "data.eval_sequences=6")
TINY += ("data.curriculum_steps=10", "data.curriculum_start=2", "trainer.accelerator=cpu", "trainer.max_steps=60")
TINY += ("schedule.warmup_steps=0", "trainer.val_check_interval=20", "trainer.checkpoint_interval=5")
NOISE = ("model.memory.axis=time", "model.memory.read=top", "model.memory.num_slots=4", "model.memory.action_noise=0.5")
FIT = ("fit", "--config", "formal/stacktrans", *TINY, *NOISE, "model.memory.eval_num_slots=5", "name=tiny")
FIT += ("trainer.keep_checkpoints=2", "logging.probe_interval=5")
TESTED_LENGTHS = [1, 3, 5, 7, 9, 11, 13, 14]
LOSS = "val/loss/average"


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


def read_result(run: RunFolder, file: str = "result.json") -> dict:
    return read_json(run.path / file)


def read_validations(run: RunFolder) -> list[dict]:
    return [line for line in run.read_metrics() if LOSS in line]


def read_curve(run: RunFolder) -> dict[int, float]:
    events = EventAccumulator(str(run.path)).Reload()
    return {point.step: point.value for point in events.Scalars("test/accuracy_by_length")}


@pytest.mark.process
def test_a_run_killed_twice_resumes_exactly(forks, folder, run):
    elsewhere = folder / "killed"
    command = (*FIT, f"logging.root={elsewhere}")

    def has_reached(step: int) -> bool:
        return any(step in losses(run) and run.list_checkpoints() for run in map(RunFolder, elsewhere.glob("tiny/*")))

    for step, resume in ((12, ()), (27, ("--ckpt_path", "last"))):
        forks.start(*command, *resume).kill_when(lambda step=step: has_reached(step))
    killed = only_run(elsewhere)
    assert not killed.is_finished, "the kills came too late"
    forks.run(*command, "--ckpt_path", "last")
    assert record(killed) == record(run), "bit for bit, tokens and validations too"
    results = [read_result(each) | {"seconds": 0, "sha256": ""} for each in (killed, run)]
    assert results[0] == results[1]


def test_tokens_count_the_strings_of_each_step(run):
    tokens = 0
    for line in run.read_metrics():
        if "train/loss" in line:
            rng = np.random.default_rng([0, line["step"]])
            length = rng.integers(1, line["train/max_length"] + 1)
            tokens += 4 * (length + TASKS["reverse_string"].output_length(length))
        assert line["tokens"] == tokens


def test_the_result_has_the_accuracy_at_every_test_length(run, printed):
    result, validations = read_result(run), read_validations(run)
    accuracy = {int(length): value for length, value in result["accuracy"].items()}
    assert sorted(accuracy) == TESTED_LENGTHS
    assert result["score_9_14"] == pytest.approx(
        np.interp(range(9, 15), TESTED_LENGTHS, list(accuracy.values())).mean()
    )
    assert [line["step"] for line in validations] == [20, 40, 60]
    best = min(validations, key=lambda line: line[LOSS])
    assert result["validation_loss"] == best[LOSS]
    mean = np.mean([best["val/accuracy/length_009"], best["val/accuracy/length_010"]])
    assert result["validation_accuracy"] == pytest.approx(mean)
    warnings = [line.partition(":")[0] for line in printed.splitlines() if "slots" in line]
    assert warnings == ["model.memory.num_slots", "model.memory.eval_num_slots"]
    assert not (run.path / "result.partial.jsonl").exists()
    assert read_curve(run) == pytest.approx(accuracy)


def test_the_checkpoint_with_the_lowest_validation_loss_is_tested(forks, folder):
    """The learning rate rises to 3, so that training diverges after the best checkpoint."""
    rising = ("optimizer.lr=3", "trainer.gradient_clip_val=null", "trainer.max_steps=40", "schedule.warmup_steps=39")
    rising += ("schedule.decay_steps=1", "schedule.final_fraction=1")
    rising += ("trainer.val_check_interval=4", "trainer.checkpoint_interval=4")
    forks.run(*FIT, *rising, f"logging.root={folder / 'diverged'}")
    diverged = only_run(folder / "diverged")
    validations = read_validations(diverged)
    best = min(validations, key=lambda line: line[LOSS])
    assert len(validations) == 10
    assert best["step"] < 40, "training did not diverge"
    result = read_result(diverged)
    assert (result["tested_step"], result["steps"]) == (best["step"], 40)
    assert result["validation_loss"] == best[LOSS]
    forks.run("test", "--run", diverged.path, "--ckpt_path", diverged.checkpoints / f"{best['step']:08}")
    assert read_result(diverged, f"test-{best['step']:08}.json")["accuracy"] == result["accuracy"]
    forks.run("test", "--run", diverged.path, "--ckpt_path", "last")
    assert read_result(diverged, "test-last.json")["step"] == 40


def test_losses_of_other_validation_sets_do_not_choose_the_tested_checkpoint(forks, folder, run):
    resumed = RunFolder(Path(shutil.copytree(run.path, folder / "changed" / "tiny" / "0")))
    resumed.result.unlink()
    longer = ("data.validation_max_length=40", "trainer.max_steps=80")
    printed = forks.run("fit", "--run", resumed.path, *longer)
    assert "data.validation_max_length changes from 10 to 40 after step 60" in printed
    result, (*earlier, last) = read_result(resumed), read_validations(resumed)
    assert min(line[LOSS] for line in earlier) < last[LOSS], "longer strings are harder"
    assert (result["tested_step"], result["validation_loss"]) == (80, last[LOSS])


@pytest.mark.process
def test_a_more_thorough_test_replaces_the_previous_one(forks, run):
    before = run.result.read_text()
    printed = forks.run("test", "--run", run.path, "data.eval_batch_size=4")
    first, result = read_result(run, "test.json"), read_result(run)
    assert first["accuracy"] == result["accuracy"]
    assert first["score_9_14"] == result["score_9_14"]
    assert first["step"] == result["tested_step"]
    assert f"{result['score_9_14']:.3f}" in printed

    forks.run("test", "--run", run.path, "data.eval_length_stride=1", "data.eval_sequences=7")
    thorough = read_result(run, "test.json")
    assert sorted(map(int, thorough["accuracy"])) == list(range(1, 15))
    assert (thorough["sequences_per_length"], thorough["length_stride"]) == (7, 1)
    curve = read_curve(run)
    assert set(curve) == set(range(1, 15)), "the new curve replaces the previous one"

    for less_thorough in (
        ("data.eval_length_stride=4",),
        ("data.eval_max_length=12", "data.eval_sequences=900"),  # other lengths, however many strings
        ("data.task=odds_first", "data.eval_sequences=2000"),
        ("model.memory.eval_num_slots=40",),
    ):
        printed = forks.run("test", "--run", run.path, *less_thorough, "--json")
        assert read_result(run, "test.json") == thorough
        assert json.loads(printed[printed.index("{") :])["accuracy"] != thorough["accuracy"], "that of this test"
    forks.run("test", "--run", f"{run.path}/../{run.path.name}")  # the same run by another path
    assert read_result(run, "test.json") == thorough
    assert (run.path / "test-to-12-every-2-of-900.json").exists()

    older = run.list_checkpoints()[0]
    forks.run("test", "--run", run.path, "--ckpt_path", older, "data.eval_max_length=10")
    assert read_result(run, f"test-{older.name}.json")["step"] == int(older.name) < 60
    assert read_curve(run) == curve
    assert run.result.read_text() == before


def test_validate_repeats_the_validation_of_the_fit(forks, run):
    printed = forks.run("validate", "--run", run.path)
    record = read_result(run, "validate.json")
    assert sorted(record["accuracy"]) == ["10", "9"]
    for key in ("validation_accuracy", "validation_loss"):
        assert record[key] == read_result(run)[key]
    assert "length    9  accuracy" in printed


def test_two_devices_train_like_one(forks, folder):
    few = (*FIT, "model.memory.action_noise=0", "model.memory.axis=depth", "trainer.max_steps=20")
    few += ("logging.probe_interval=100",)  # action_spread is a standard deviation over the tokens of one device
    forks.run(*few, f"logging.root={folder}/one")
    forks.run(*few, "trainer.devices=2", "data.eval_batch_size=2", f"logging.root={folder}/two", ranks=2)
    one, two = only_run(folder / "one"), only_run(folder / "two")
    assert_close(two, one, tolerance=1e-4)
    assert read_result(two)["accuracy"] == pytest.approx(read_result(one)["accuracy"], abs=0.05)


def test_a_run_killed_in_its_test_resumes_with_the_remaining_lengths(forks, folder):
    command = (*FIT, f"logging.root={folder}/tested", "trainer.max_steps=4", "model.memory.axis=depth")
    command += ("data.eval_sequences=1000", "data.eval_length_stride=1")

    def count_scored() -> int:
        with contextlib.suppress(FileNotFoundError):  # deleted at the end of the test
            return sum(len(path.read_text().splitlines()) for path in folder.glob("tested/tiny/*/result.partial.jsonl"))
        return 0

    forks.start(*command).kill_when(lambda: count_scored() >= 3)
    killed = only_run(folder / "tested")
    assert not killed.is_finished, "the kill came too late"
    assert "of 14 sets are scored already" in forks.run(*command, "--ckpt_path", "last")
    forks.run("test", "--run", killed.path)
    assert read_result(killed)["accuracy"] == read_result(killed, "test.json")["accuracy"]
