"""Resumed runs: after SIGKILL, from older checkpoints, in branches, and for more steps."""

import json
from pathlib import Path

import pytest
from forks import Forks
from records import losses, only_run, record

from stackexp import runs
from stackexp.cli import main
from stackexp.data.shards import TokenSet
from stackexp.files import read_json
from stackexp.runs import RunFolder
from stackexp.training.objectives import sum_earlier_sessions

INTERVALS = ("trainer.max_steps=30", "trainer.checkpoint_interval=7", "trainer.val_check_interval=14")


def kill_after(step: int, forks: Forks, folder: Path, *command: object) -> None:
    """Start the command, and kill it once `step` is logged and a checkpoint is saved."""
    started = forks.start(*command)
    started.kill_when(
        lambda: any(step in losses(run) and run.list_checkpoints() for run in map(RunFolder, folder.glob("tiny/*")))
    )


@pytest.mark.process
def test_resume_after_sigkill_is_exact(forks, tiny, tmp_path):
    """Two kills within one checkpoint interval, with a data worker and two micro-batches per step."""
    forks.run("fit", "--config", tiny, *INTERVALS)
    reference = only_run(tmp_path / "runs")
    assert sorted(losses(reference)) == list(range(1, 31))

    elsewhere = tmp_path / "killed"
    command = ("fit", "--config", tiny, *INTERVALS, f"logging.root={elsewhere}", "data.num_workers=1")
    kill_after(17, forks, elsewhere, *command)
    kill_after(19, forks, elsewhere, *command, "--ckpt_path", "last")
    run = only_run(elsewhere)
    assert not run.is_finished, "the kills came too late"

    forks.run(*command, "--ckpt_path", "last")
    assert only_run(elsewhere).path == run.path, "the run resumes in its own folder"
    assert run.is_finished
    assert record(run) == record(reference), "bit for bit: losses, gradient norms, probes and validations, once each"
    assert len(read_json(run.path / "environment.json")) == 3, "one entry per session"


@pytest.mark.process
def test_resume_restores_the_data_position_across_epochs(corpus, tiny, tmp_path):
    """The run resumes right after an epoch, and from an older checkpoint."""
    epoch = len(TokenSet(corpus["left"])) // 8
    few = ("fit", "--config", str(tiny), f"data.path={corpus['left']}", f"trainer.max_steps={2 * epoch + 2}")
    few = (*few, "trainer.val_check_interval=null", "trainer.checkpoint_interval=1", "trainer.keep_checkpoints=99")
    few = (*few, "logging.progress_bar=false")
    assert main([*few]) == 0
    run = only_run(tmp_path / "runs")
    reference = record(run)
    for step in (epoch, epoch - 2):
        root = tmp_path / f"branch-{step}"
        assert main([*few, f"logging.root={root}", "--ckpt_path", str(run.checkpoints / f"{step:08d}")]) == 0
        assert record(only_run(root)) == [line for line in reference if line["step"] > step]
    assert record(run) == reference


@pytest.mark.parametrize("step", [12, 18])
def test_validation_missed_by_a_kill_runs_on_resume_over_all_sets(tiny, tmp_path, step):
    """The checkpoint of the step is there; its validation is not in the log."""
    fit = ("fit", "--config", str(tiny), "trainer.max_steps=18", "trainer.checkpoint_interval=6")
    fit = (*fit, "trainer.keep_checkpoints=9", "logging.progress_bar=false")
    assert main([*fit]) == 0
    run = only_run(tmp_path / "runs")
    reference = record(run)
    assert all(f"val/loss/{name}" in reference[-1] for name in ("left", "right"))
    run.result.unlink()
    lines = [line for line in run.read_metrics() if line["step"] <= step]
    before = [line for line in lines if line["step"] < step or "train/loss" in line]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in before))
    for later in run.list_checkpoints():
        if int(later.name) > step:
            runs.remove_checkpoint(later)
    assert main([*fit, "--ckpt_path", str(run.checkpoints / f"{step:08d}")]) == 0
    assert record(run) == reference


MEMORIES = [
    *("memory=null", "memory=mhc", "memory=residual_stack", "memory.kind=nondeterministic_stack"),
    *("memory.axis=token_major", "memory.axis=time memory.feedback=true"),
    *("memory.action_noise=0.3", "memory.action_noise=0.3 memory.action_noise_warmup_steps=3"),
    "memory.axis=time memory.action_noise=0.3",
]


@pytest.mark.process
@pytest.mark.parametrize("memory", MEMORIES)
def test_resume_is_exact_for_every_kind_of_memory(tiny, tmp_path, memory):
    """No memory has a state beyond its parameters, except those that draw noise."""
    options = [f"model.{option}" for option in memory.split()]
    fit = ["fit", "--config", str(tiny), *options, "trainer.max_steps=4", "trainer.checkpoint_interval=2"]
    fit += ["trainer.val_check_interval=2", "trainer.keep_checkpoints=2", "logging.progress_bar=false"]
    assert main([*fit, "name=whole"]) == 0
    whole = only_run(tmp_path / "runs", "whole")
    assert main([*fit, "name=branch", "--ckpt_path", str(whole.checkpoints / "00000002")]) == 0
    assert record(only_run(tmp_path / "runs", "branch")) == [line for line in record(whole) if line["step"] > 2]


def test_a_run_killed_after_its_last_step_only_needs_its_evaluation(tiny, tmp_path):
    assert main(["fit", "--config", str(tiny)]) == 0
    run = only_run(tmp_path / "runs")
    before, lines = read_json(run.result), record(run)
    run.result.unlink()
    assert main(["fit", "--config", str(tiny), "--ckpt_path", "last"]) == 0
    after = read_json(run.result)
    for result in (before, after):
        del result["sha256"]
    earlier = sum_earlier_sessions(run.read_sessions(), list(run.read_metrics()))
    assert after.pop("seconds") > earlier > 0, "the first session counts"
    assert after | {"seconds": before["seconds"]} == before
    assert record(run) == lines


def test_a_finished_run_can_be_extended_in_a_new_folder(tiny, tmp_path):
    """The learning rate follows the new schedule from the first step."""
    fit = ("fit", "--config", str(tiny), "schedule.final_fraction=0")
    assert main([*fit]) == 0
    finished = only_run(tmp_path / "runs")
    more = (*fit, "trainer.max_steps=24", f"logging.root={tmp_path}/more")
    assert main([*more, "--ckpt_path", str(finished.newest_checkpoint())]) == 0
    run = only_run(tmp_path / "more")
    assert sorted(losses(run)) == list(range(13, 25))
    assert finished.is_finished
    rates = [line["train/lr"] for line in run.read_metrics() if "train/lr" in line]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 1e-3, "not the end of the old schedule"


def test_a_given_folder_resumes_until_the_run_is_finished(forks, tiny, tmp_path):
    """The config is in the folder."""
    forks.run("fit", "--config", tiny, *INTERVALS)
    run = RunFolder(tmp_path / "given")
    forks.start("fit", "--config", tiny, *INTERVALS, "--run", run.path).kill_when(lambda: 17 in losses(run))
    command = ("fit", "--run", run.path)
    forks.run(*command)
    assert record(run) == record(only_run(tmp_path / "runs"))
    before = run.result.read_text()
    assert "is finished" in forks.run(*command)
    assert run.result.read_text() == before


@pytest.mark.process
def test_best_and_newest_checkpoints_are_kept(capsys, invoke, tiny, tmp_path):
    """The learning rate rises without end, so the validation loss rises again."""
    often = ("trainer.max_steps=24", "trainer.val_check_interval=2", "trainer.checkpoint_interval=2")
    rising = ("schedule.kind=linear", "schedule.warmup_steps=23", "optimizer.lr=2.0")
    assert main(["fit", "--config", str(tiny), *often, *rising]) == 0
    run = only_run(tmp_path / "runs")
    validated = {x["step"]: x["val/loss/average"] for x in record(run) if "val/loss/average" in x}
    best = min(validated, key=validated.get)
    assert best < 20, "the loss did not rise again"
    assert [int(path.name) for path in run.list_checkpoints()] == [best, 22, 24]

    capsys.readouterr()
    printed = invoke("validate --run", run.path, "--ckpt_path", "best")
    assert f"{best:08d}" in printed
    assert f"{validated[best]:.4f}" in printed
