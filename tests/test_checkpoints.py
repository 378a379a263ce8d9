"""Checkpoints are written whole or not at all, and say what does not fit."""

import os
import subprocess
import sys
import time

import pytest
import torch

from stackexp.config.compose import compose, to_dict
from stackexp.errors import RunError
from stackexp.modules import checkpoints


def checkpoint(config, **changes):
    state = {"version": 1, "config": to_dict(config), "accumulate_grad_batches": config.accumulate_grad_batches}
    return {"state_dict": {}, "global_step": 3, "stackexp": state | changes}


def test_a_kill_while_writing_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / "1.ckpt"
    code = (
        "import sys, torch; from stackexp.modules.checkpoints import AtomicCheckpointIO\n"
        "for i in range(10**6):\n"
        "    AtomicCheckpointIO().save_checkpoint({'i': i, 'x': torch.full((10**6,), i)}, sys.argv[1])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.01)
    for pause in (0.011, 0.023, 0.037):  # looked at while it is being replaced, many times
        time.sleep(pause)
        state = torch.load(path, weights_only=True)
        assert (state["x"] == state["i"]).all()
    process.kill()
    process.wait()
    state = torch.load(path, weights_only=True)
    assert (state["x"] == state["i"]).all()


def test_a_failed_write_leaves_no_file_behind(tmp_path):
    with pytest.raises((AttributeError, TypeError, RuntimeError, OSError)):
        checkpoints.AtomicCheckpointIO().save_checkpoint({"x": lambda: None}, tmp_path / "1.ckpt")
    assert os.listdir(tmp_path) == []


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "1.ckpt"
    torch.save(checkpoint(compose(["quickstart"]), version=99), path)
    with pytest.raises(RunError, match="checkpoint version 99"):
        checkpoints.read(path)


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("model.memory=null", "model.memory"),
        ("model.memory.read=top", "model.memory.read is global in the checkpoint, top in the config"),
        ("optimizer.lr=1", "another run: optimizer.lr is 0.004 in the checkpoint, 1.0 in the config"),
        ("data.global_batch_tokens=2048", "another run: data.global_batch_tokens"),
        ("model.num_layers=2", "model.num_layers is 6 in the checkpoint, 2 in the config"),
    ],
)
def test_what_keeps_a_run_from_going_on_is_named(tmp_path, override, difference):
    saved = checkpoint(compose(["quickstart"]))
    checkpoints.check_resumable(tmp_path, saved, compose(["quickstart"], ["trainer.max_steps=999", "name=x"]))
    with pytest.raises(RunError, match=difference):
        checkpoints.check_resumable(tmp_path, saved, compose(["quickstart"], [override]))


@pytest.mark.parametrize(
    ("before", "after", "fits"),
    [
        (["data.micro_batch_size=1"], ["data.micro_batch_size=2"], False),
        (["trainer.devices=2", "data.micro_batch_size=2"], ["data.micro_batch_size=4"], True),
        (["trainer.devices=2", "data.micro_batch_size=2"], ["data.micro_batch_size=2"], False),
    ],
)
def test_a_step_must_stay_as_many_micro_batches(tmp_path, before, after, fits):
    """Lightning counts the position in the data in micro-batches."""
    saved = checkpoint(compose(["quickstart"], before))
    if fits:
        checkpoints.check_resumable(tmp_path, saved, compose(["quickstart"], after))
    else:
        with pytest.raises(RunError, match=r"micro-batches made a step.*data.micro_batch_size"):
            checkpoints.check_resumable(tmp_path, saved, compose(["quickstart"], after))


def test_flatten():
    assert checkpoints.flatten({"a": {"b": 1, "c": {"d": None}}, "e": [2]}) == {"a.b": 1, "a.c.d": None, "e": [2]}
