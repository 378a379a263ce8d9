"""Mistakes that show only while working: each ends in one clear line, and leaves nothing half-written."""

import os
import shutil
import signal
import subprocess

import pytest
import torch
from processes import kill, wait_until

from stackexp.cli import main
from stackexp.runs import RunFolder


@pytest.fixture
def run(tiny, tmp_path) -> RunFolder:
    """A run killed after its last step: checkpoints, but no result."""
    assert main(["fit", "--config", str(tiny)]) == 0
    run = RunFolder(next((tmp_path / "runs" / "tiny").iterdir()))
    run.result.unlink()
    return run


def fails(capsys, *argv: object) -> str:
    """The one line that a failing command prints."""
    capsys.readouterr()
    assert main([str(argument) for argument in argv]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    return line


def test_checkpoints_that_cannot_be_resumed(capsys, run, tiny, tmp_path):
    fit = ("fit", "--config", tiny, "trainer.max_steps=14", "--ckpt_path")
    before = sorted(tmp_path.glob("runs/*/*"))

    assert "no such checkpoint" in fails(capsys, *fit, tmp_path / "nowhere.ckpt")

    newest = run.newest_checkpoint()
    truncated = tmp_path / "truncated.ckpt"
    truncated.write_bytes(newest.read_bytes()[:5000])
    assert f"{truncated}: damaged" in fails(capsys, *fit, truncated)
    truncated.write_bytes(b"")
    assert f"{truncated}: damaged" in fails(capsys, *fit, truncated)

    foreign = tmp_path / "foreign.ckpt"
    torch.save({"weights": torch.zeros(3)}, foreign)
    assert "not a stackexp checkpoint" in fails(capsys, *fit, foreign)

    line = fails(capsys, *fit, newest, "model.hidden_size=64")
    assert "another architecture" in line
    assert "model.hidden_size is 32 in the checkpoint, 64 in the config" in line
    line = fails(capsys, *fit, newest, "model.memory.discipline=queue")
    assert "model.memory.discipline is stack in the checkpoint, queue in the config" in line

    line = fails(capsys, *fit, newest, "optimizer.lr=1")
    assert "optimizer.lr is 0.003 in the checkpoint, 1.0 in the config" in line
    line = fails(capsys, *fit, newest, "trainer.max_steps=8")
    assert "already at step 12" in line
    assert "trainer.max_steps" in line

    line = fails(capsys, "validate", "--run", run.path, "model.hidden_size=64")
    assert "another architecture" in line

    assert sorted(tmp_path.glob("runs/*/*")) == before, "no new run folder"


def test_nothing_to_resume(capsys, tiny):
    assert "no unfinished run" in fails(capsys, "fit", "--config", tiny, "--ckpt_path", "last")


def test_devices_that_the_machine_does_not_have(capsys, tiny, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert "trainer.accelerator=cuda" in fails(capsys, "fit", "--config", tiny, "trainer.accelerator=cuda")
    assert not (tmp_path / "runs").exists()


def test_a_corpus_that_cannot_be_used_leaves_no_run_folder(capsys, corpus, tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path}/empty" in fails(capsys, "fit", "--config", tiny, f"data.path={tmp_path}/empty")
    assert "data.vocab_size" in fails(capsys, "fit", "--config", tiny, "data.vocab_size=299")
    assert "data.context_length=32" in fails(
        capsys, "fit", "--config", tiny, "data.context_length=64", "data.global_batch_tokens=512"
    )
    damaged = tmp_path / "damaged"
    shutil.copytree(corpus["train"], damaged)
    shard = next(damaged.rglob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-100])
    assert shard.name in fails(capsys, "fit", "--config", tiny, f"data.path={damaged}")
    assert not (tmp_path / "runs").exists()


def test_token_ids_beyond_the_vocabulary(capsys, corpus, tiny, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(corpus["train"], damaged)
    for shard in damaged.rglob("*.mds"):
        contents = shard.read_bytes()
        shard.write_bytes(contents[: -len(contents) // 2] + b"\xff" * (len(contents) - len(contents) // 2))
    line = fails(capsys, "fit", "--config", tiny, f"data.path={damaged}")
    assert "token id 65535" in line
    assert "data.vocab_size 300" in line
    (run,) = tmp_path.glob("runs/tiny/*")
    assert not RunFolder(run).finished


def test_a_loss_that_is_not_finite_stops_the_run(capsys, tiny, tmp_path):
    line = fails(capsys, "fit", "--config", tiny, "optimizer.lr=1e30", "trainer.checkpoint_interval=1")
    assert "step " in line
    assert "samples [" in line
    (run,) = map(RunFolder, tmp_path.glob("runs/tiny/*"))
    assert f"last good checkpoint: {run.newest_checkpoint()}" in line
    checkpoint = torch.load(run.newest_checkpoint(), weights_only=True)
    assert f"step {checkpoint['global_step'] + 1}: " in line
    assert not run.finished


def test_one_process_at_a_time_in_a_folder(capsys, run, tiny):
    with run.lock():
        line = fails(capsys, "fit", "--config", tiny, "trainer.max_steps=14", "--ckpt_path", "last")
    assert "another process is running in this folder" in line


def test_interrupted_from_the_keyboard(program, tiny, tmp_path):
    process = program.start("fit", "--config", tiny, "trainer.max_steps=100000", "trainer.val_check_interval=null")
    try:
        wait_until(lambda: any(tmp_path.glob("runs/tiny/*/checkpoints/*.ckpt")), process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        kill(process)
    assert process.returncode == 130
    assert "--ckpt_path last" in output.splitlines()[-1]
    assert "Traceback" not in output


def mount_small_disk(folder) -> bool:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(folder)]
    return os.geteuid() == 0 and shutil.which("mount") and subprocess.run(command, capture_output=True).returncode == 0


def test_a_full_disk_loses_no_checkpoint(program, tiny, tmp_path):
    disk = tmp_path / "disk"
    if not mount_small_disk(disk):
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        command = ("fit", "--config", tiny, f"logging.root={disk}", "trainer.max_steps=2000")
        output = program.run(*command, "trainer.keep_checkpoints=1000", "trainer.val_check_interval=null", expect=1)
        assert "no space left" in output.splitlines()[-1]
        assert "Traceback" not in output
        (run,) = map(RunFolder, disk.glob("tiny/*"))
        assert not run.finished
        assert not list(run.checkpoints.glob(".*")), "no half-written checkpoint"
        torch.load(run.newest_checkpoint(), weights_only=True)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
