"""Mistakes that show only while working: each ends in one clear line, and leaves nothing half-written."""

import shutil

import pytest
import torch

from stackexp.cli import main
from stackexp.runs import RunFolder


@pytest.fixture
def run(tiny, tmp_path) -> RunFolder:
    """A run killed after its last step: checkpoints, but no result."""
    assert main(["fit", "--config", str(tiny)]) == 0
    run = RunFolder(next((tmp_path / "runs" / "tiny").iterdir()))
    run.result.unlink()
    return run


def fails(capsys, *argv: object, code: int = 1) -> str:
    """The one line that a failing command prints."""
    capsys.readouterr()
    assert main([str(argument) for argument in argv]) == code
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    return line


def test_checkpoints_that_cannot_be_resumed(capsys, run, tiny, tmp_path):
    fit = ("fit", "--config", tiny, "trainer.max_steps=14", "--ckpt_path")
    before = sorted(tmp_path.glob("runs/*/*"))

    assert "no such checkpoint" in fails(capsys, *fit, tmp_path / "nowhere")

    newest, old = run.newest_checkpoint(), tmp_path / "old.ckpt"
    old.write_bytes(b"x" * 100)
    assert f"{old}: checkpoints are folders now" in fails(capsys, *fit, old)
    for name in ("state.pt", ".metadata", "__0_0.distcp"):
        damaged = tmp_path / "damaged" / name.strip(".")
        shutil.copytree(newest, damaged)
        file = damaged / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        assert f"{damaged}: damaged" in fails(capsys, *fit, damaged)

    foreign = tmp_path / "foreign"
    foreign.mkdir()
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


def test_one_process_at_a_time_in_a_folder(capsys, run, tiny):
    with run.lock():
        line = fails(capsys, "fit", "--config", tiny, "trainer.max_steps=14", "--ckpt_path", "last", code=74)
    assert "another process is running in this folder" in line
