"""Errors found at run time: each prints one line and leaves no files."""

import shutil

import pytest
import torch

from stackexp.cli import main
from stackexp.files import compute_sha256, read_json, write_json
from stackexp.runs import RunFolder


@pytest.fixture
def run(tiny, tmp_path) -> RunFolder:
    """A run killed after its last step: checkpoints, but no result."""
    assert main(["fit", "--config", str(tiny)]) == 0
    run = RunFolder(next((tmp_path / "runs" / "tiny").iterdir()))
    run.result.unlink()
    return run


def test_unusable_checkpoint_or_busy_folder_is_refused(invoke, run, tiny, tmp_path):
    fit = ("fit --config", tiny, "trainer.max_steps=14", "--ckpt_path")
    before = sorted(tmp_path.glob("runs/*/*"))
    assert "no such checkpoint" in invoke(*fit, tmp_path / "nowhere", expect=1)

    newest, damaged = run.newest_checkpoint(), tmp_path / "damaged"
    shutil.copytree(newest, damaged)
    (damaged / "state.pt").write_bytes(b"x" * 100)
    assert f"{damaged}: damaged" in invoke(*fit, damaged, expect=1)

    for override, message in {
        "model.hidden_size=64": "different architecture: model.hidden_size is 32 in the checkpoint, 64 in the config",
        "model.memory.discipline=queue": "model.memory.discipline is stack in the checkpoint, queue in the config",
        "optimizer.lr=1": "different run: optimizer.lr is 0.003 in the checkpoint, 1.0 in the config",
        "trainer.max_steps=8": "already at step 12 of trainer.max_steps 8",
    }.items():
        assert message in invoke(*fit, newest, override, expect=1)
    assert "different architecture" in invoke("validate --run", run.path, "model.hidden_size=64", expect=1)
    assert sorted(tmp_path.glob("runs/*/*")) == before, "no new run folder"
    with run.lock():
        line = invoke(*fit, "last", expect=74)
    assert "another process" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_unavailable_devices_are_reported(invoke, tiny, tmp_path):
    error = invoke("fit --config", tiny, "trainer.accelerator=cuda", expect=1)
    assert "trainer.accelerator=cuda: torch finds no GPU; use auto or cpu" in error
    assert not (tmp_path / "runs").exists()


def test_unusable_corpus_creates_no_run_folder(invoke, corpus, tiny, tmp_path):
    empty, damaged = tmp_path / "empty", tmp_path / "damaged"
    empty.mkdir()
    shutil.copytree(corpus["train"], damaged)
    shard = next(damaged.rglob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-100])
    for overrides, message in {
        (f"data.path={empty}",): str(empty),
        ("data.vocab_size=299",): "data.vocab_size",
        ("data.context_length=64", "data.global_batch_tokens=512"): "data.context_length=32",
        (f"data.path={damaged}",): shard.name,
    }.items():
        assert message in invoke("fit --config", tiny, *overrides, expect=1)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        (
            "EarlyStopping",
            "{monitor: val_loss}",
            "Early stopping conditioned on metric `val_loss` which is not available",
        ),
        ("LearningRateMonitor", "{}", "Cannot use `LearningRateMonitor` callback with `Trainer` that has no logger"),
    ],
)
def test_mistakes_in_the_options_of_callbacks_are_reported(invoke, tiny, name, options, reason):
    entry = f'{{class: "lightning.pytorch.callbacks:{name}", options: {options}}}'
    line = invoke("fit --config", tiny, f"trainer.callbacks=[{entry}]", "trainer.val_check_interval=4", expect=1)
    assert line.startswith(f"error: trainer.callbacks: {reason}")
    assert "; last good checkpoint: " in line


def test_token_ids_beyond_the_vocabulary_are_reported(invoke, corpus, tiny, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(corpus["train"], damaged)
    for shard in damaged.rglob("*.mds"):
        contents = shard.read_bytes()
        shard.write_bytes(contents[: -len(contents) // 2] + b"\xff" * (len(contents) - len(contents) // 2))
    index = read_json(damaged / "index.json")
    for entry in index["shards"]:  # otherwise the changed shards are refused
        entry["raw_data"]["hashes"]["sha256"] = compute_sha256(damaged / entry["raw_data"]["basename"])
    write_json(damaged / "index.json", index)
    line = invoke("fit --config", tiny, f"data.path={damaged}", expect=1)
    assert "token id 65535" in line
    assert "data.vocab_size 300" in line
    (run,) = tmp_path.glob("runs/tiny/*")
    assert not RunFolder(run).is_finished
