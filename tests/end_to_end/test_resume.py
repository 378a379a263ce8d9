"""SIGKILL in the middle of a run, then the same command with --ckpt_path last."""

import json
from pathlib import Path

from processes import Program, kill, wait_until

from stackexp.cli import main
from stackexp.runs import RunFolder

INTERVALS = ("trainer.max_steps=60", "trainer.checkpoint_interval=7", "trainer.val_check_interval=14")


def losses(run: RunFolder) -> dict[int, float]:
    return {line["step"]: line["loss/train"] for line in run.read_metrics() if "loss/train" in line}


def record(run: RunFolder) -> list[dict[str, float]]:
    """Every line of metrics.jsonl, less what depends on the clock."""
    clock = ("time", "throughput/tokens_per_second", "throughput/flops_per_second")
    return [{tag: value for tag, value in line.items() if tag not in clock} for line in run.read_metrics()]


def only_run(folder: Path) -> RunFolder:
    (path,) = folder.glob("tiny/*")
    return RunFolder(path)


def kill_after(step: int, program: Program, folder: Path, *command: object) -> None:
    """Start the command and kill it as soon as it has recorded `step`."""
    process = program.start(*command)
    try:
        wait_until(lambda: any(step in losses(RunFolder(path)) for path in folder.glob("tiny/*")), process)
    finally:
        kill(process)


def test_resume_after_sigkill_is_exact(program, tiny, tmp_path):
    program.run("fit", "--config", tiny, *INTERVALS)
    reference = only_run(tmp_path / "runs")
    assert sorted(losses(reference)) == list(range(1, 61))

    # Twice within one checkpoint interval, with a loader process; two micro-batches make a step.
    elsewhere = tmp_path / "killed"
    command = ("fit", "--config", tiny, *INTERVALS, f"logging.root={elsewhere}", "data.num_workers=1")
    kill_after(17, program, elsewhere, *command)
    kill_after(19, program, elsewhere, *command, "--ckpt_path", "last")
    run = only_run(elsewhere)
    assert not run.finished, "the kills came too late to test anything"

    program.run(*command, "--ckpt_path", "last")
    assert only_run(elsewhere) == run, "it goes on in its own folder"
    assert run.finished
    assert record(run) == record(reference), "bit for bit: losses, gradient norms, probes and validations, each once"
    assert len(json.loads((run.path / "environment.json").read_text())) == 3, "one entry a session"


def test_a_kill_during_validation_loses_no_validation(program, tiny, tmp_path):
    command = ("fit", "--config", tiny, *INTERVALS, "trainer.max_steps=30")
    program.run(*command)
    reference = only_run(tmp_path / "runs")

    elsewhere = tmp_path / "killed"
    command = (*command, f"logging.root={elsewhere}")
    kill_after(14, program, elsewhere, *command)
    program.run(*command, "--ckpt_path", "last")
    assert record(only_run(elsewhere)) == record(reference)


def test_checkpoints_at_the_end_of_an_epoch_and_older_ones(tiny, tmp_path):
    """An epoch has 376 steps: resumed right after it, and from an older checkpoint, the record stays one history."""
    few = ("fit", "--config", str(tiny), "trainer.max_steps=380", "trainer.val_check_interval=null")
    few = (*few, "trainer.checkpoint_interval=94", "trainer.keep_checkpoints=9", "logging.progress_bar=false")
    assert main([*few]) == 0
    run = only_run(tmp_path / "runs")
    assert [path.stem for path in sorted(run.checkpoints.iterdir())] == [f"{s:08d}" for s in (94, 188, 282, 376, 380)]
    reference = record(run)

    run.result.unlink()
    assert main([*few, "--ckpt_path", str(run.checkpoints / "00000376.ckpt")]) == 0
    assert record(run) == reference
    run.result.unlink()
    assert main([*few, "--ckpt_path", str(run.checkpoints / "00000282.ckpt")]) == 0
    assert record(run) == reference
    assert len(list((tmp_path / "runs" / "tiny").iterdir())) == 1


def test_a_run_killed_after_its_last_step_is_finished_by_resuming(tiny, tmp_path):
    assert main(["fit", "--config", str(tiny)]) == 0
    run = only_run(tmp_path / "runs")
    before, lines = json.loads(run.result.read_text()), record(run)
    run.result.unlink()
    assert main(["fit", "--config", str(tiny), "--ckpt_path", "last"]) == 0
    after = json.loads(run.result.read_text())
    for result in (before, after):
        del result["seconds_of_last_session"]
    assert after == before
    assert record(run) == lines


def test_more_steps_than_a_finished_run_had(tiny, tmp_path):
    """From a finished run's last checkpoint, in a folder of its own."""
    assert main(["fit", "--config", str(tiny)]) == 0
    finished = only_run(tmp_path / "runs")
    more = ("fit", "--config", str(tiny), "trainer.max_steps=16", f"logging.root={tmp_path}/more")
    assert main([*more, "--ckpt_path", str(finished.newest_checkpoint())]) == 0
    assert sorted(losses(only_run(tmp_path / "more"))) == [13, 14, 15, 16]
    assert finished.finished


def test_a_branch_of_another_name_leaves_the_run_it_comes_from_alone(tiny, tmp_path):
    fit = ("fit", "--config", str(tiny), "trainer.keep_checkpoints=9")
    assert main([*fit]) == 0
    run = only_run(tmp_path / "runs")
    run.result.unlink()
    before = record(run), sorted(run.checkpoints.iterdir())
    assert main([*fit, "name=branch", "--ckpt_path", str(run.checkpoints / "00000004.ckpt")]) == 0
    assert (record(run), sorted(run.checkpoints.iterdir())) == before
    (branch,) = map(RunFolder, tmp_path.glob("runs/branch/*"))
    assert sorted(losses(branch)) == list(range(5, 13))


def test_more_steps_follow_the_new_schedule_from_the_first_on(tiny, tmp_path):
    assert main(["fit", "--config", str(tiny), "schedule.final_fraction=0"]) == 0
    first = only_run(tmp_path / "runs").newest_checkpoint()
    more = ("fit", "--config", str(tiny), "schedule.final_fraction=0", "trainer.max_steps=24", "name=more")
    assert main([*more, "--ckpt_path", str(first)]) == 0
    (run,) = map(RunFolder, tmp_path.glob("runs/more/*"))
    rates = [line["optimizer/lr"] for line in run.read_metrics() if "optimizer/lr" in line]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 1e-3, "not the end of the old schedule"
