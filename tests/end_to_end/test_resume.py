"""SIGKILL in the middle of a run, then the same command with --ckpt_path last."""

from processes import kill, wait_until

from stackexp.runs import RunFolder

STEPS = ("trainer.max_steps=60", "trainer.checkpoint_interval=7", "trainer.val_check_interval=20")


def losses(run: RunFolder) -> dict[int, float]:
    return {line["step"]: line["loss/train"] for line in run.read_metrics() if "loss/train" in line}


def only_run(folder) -> RunFolder:
    (path,) = folder.glob("tiny/*")
    return RunFolder(path)


def test_resume_after_sigkill_is_exact(program, tiny, tmp_path):
    program.run("fit", "--config", tiny, *STEPS)
    uninterrupted = losses(only_run(tmp_path / "runs"))
    assert len(uninterrupted) == 60

    elsewhere = tmp_path / "killed"
    command = ("fit", "--config", tiny, *STEPS, f"logging.root={elsewhere}", "data.num_workers=1")
    process = program.start(*command)
    wait_until(lambda: any(len(losses(RunFolder(p))) > 17 for p in elsewhere.glob("tiny/*")), process)
    kill(process)
    run = only_run(elsewhere)
    killed_at = max(losses(run))
    assert 17 < killed_at < 60, "the kill came too late to test anything"
    assert not run.finished

    program.run(*command, "--ckpt_path", "last")
    assert only_run(elsewhere) == run, "it goes on in its own folder"
    assert run.finished
    assert losses(run) == uninterrupted, "bit for bit, before and after the kill"
    steps = [line["step"] for line in run.read_metrics() if "loss/train" in line]
    assert steps == list(range(1, 61)), "each step stands once"
