"""Checkpoints are written whole or not at all, from a copy, and say what does not fit."""

import copy
import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import Forks
from safetensors.torch import load_file, safe_open
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from stackexp.config.compose import compose, to_dict, to_yaml
from stackexp.errors import RunError
from stackexp.models import checkpoints
from stackexp.models.checkpoints import CheckpointWriter
from stackexp.training import checkpointing

QUICKSTART = compose(["quickstart"])


def state_of(config=QUICKSTART, **changes: Any) -> dict[str, Any]:
    """What `state.pt` holds, as far as these tests look."""
    state = {"version": checkpoints.VERSION, "config": to_dict(config)}
    return {"global_step": 3, "stackexp": state | changes}


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.rand(4, 8)).square().sum().backward()
    optimizer.step()


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def assert_equal(ours: Any, theirs: Any) -> None:
    """Bit for bit."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert_equal(ours[name], value)
    elif isinstance(theirs, list):
        for a, b in zip(ours, theirs, strict=True):
            assert_equal(a, b)
    else:
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


def save(path: Path, tensors: dict[str, Any], state: dict[str, Any]) -> None:
    writer = CheckpointWriter()
    writer.save(path, tensors, state, lambda: None)
    writer.wait()


@pytest.fixture
def saved(tmp_path) -> Path:
    """A checkpoint of `model_and_optimizer` after a step."""
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    save(tmp_path / "00000003", tensors_of(model, optimizer), state_of())
    return tmp_path / "00000003"


def test_a_checkpoint_holds_its_own_step_while_training_goes_on(tmp_path, monkeypatch):
    """The writer is held up; steps are taken meanwhile, which change every tensor in place."""
    write, may_write = FileSystemWriter.write_data, threading.Event()

    def slow(self, *args):
        assert may_write.wait(60)
        return write(self, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", slow)
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    then = copy.deepcopy(tensors_of(model, optimizer))
    writer, done, path = CheckpointWriter(), [], tmp_path / "00000003"
    writer.save(path, tensors_of(model, optimizer), state_of(), lambda: done.append(path.exists()))
    for _ in range(3):
        step(model, optimizer)
    assert not path.exists()
    assert not done
    may_write.set()
    writer.wait()
    assert done == [True], "told once the checkpoint is in place"

    other, other_optimizer = model_and_optimizer()
    loaded = tensors_of(other, other_optimizer)
    checkpoints.load_tensors(loaded, path)
    assert_equal(loaded, then)
    with pytest.raises(AssertionError):
        assert_equal(tensors_of(model, optimizer), then)
    assert checkpoints.read(path) == state_of()


def write_for_ever(folder: Path) -> None:
    torch.manual_seed(0)
    writer = CheckpointWriter()
    for number in range(10**6):
        tensors = {"model": {"x": torch.full((10**6,), number), "y": torch.full((10,), number)}}
        writer.save(folder / f"{number:08d}", tensors, state_of(number=number), lambda: None)


def test_a_kill_while_writing_leaves_whole_checkpoints_only(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (process,) = Forks(tmp_path).start(folder, function=write_for_ever)
    deadline = time.monotonic() + 60
    while len(list(folder.glob("0*"))) < 3 or not list(folder.glob(".0*")):  # stopped while it writes the fourth
        os.kill(process.pid, signal.SIGCONT)
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.003)
        os.kill(process.pid, signal.SIGSTOP)
    process.kill()
    process.join()
    whole = sorted(folder.glob("0*"))
    assert len(list(folder.iterdir())) == len(whole) + 1
    for path in whole:
        tensors = {"x": torch.zeros(10**6, dtype=torch.int64), "y": torch.zeros(10, dtype=torch.int64)}
        checkpoints.load_tensors({"model": tensors}, path)
        number = checkpoints.read(path)["stackexp"]["number"]
        assert path.name == f"{number:08d}"
        assert all((tensor == number).all() for tensor in tensors.values())


@pytest.mark.parametrize("fails", ["os.fsync", "torch.distributed.checkpoint.FileSystemWriter.write_data"])
def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch, fails):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fails, full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "1", {"model": {"x": torch.zeros(3)}}, state_of())
    assert not list(tmp_path.iterdir())


def test_what_is_no_checkpoint_of_ours_is_one_line(saved, tmp_path):
    old = tmp_path / "model.ckpt"
    torch.save(state_of(version=1), old)
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, says in {
        tmp_path / "nowhere": "no such checkpoint",
        old: "checkpoints are folders now",
        empty: "not a stackexp checkpoint",
    }.items():
        with pytest.raises(RunError, match=f"{path}: {says}") as caught:
            checkpoints.read(path)
        assert "\n" not in str(caught.value)
    for state, says in {
        "version": (state_of(version=99), "checkpoint version 99, but this stackexp reads version 2"),
        "foreign": ({"weights": torch.zeros(3)}, "not a stackexp checkpoint"),
        "tensor": (torch.zeros(3), "not a stackexp checkpoint"),
    }.values():
        torch.save(state, saved / "state.pt")
        with pytest.raises(RunError, match=says):
            checkpoints.read(saved)


@pytest.mark.parametrize("length", [0, 5, 700, -1])
def test_a_damaged_state_is_one_line(saved, length):
    state = saved / "state.pt"
    state.write_bytes(state.read_bytes()[:length])
    with pytest.raises(RunError, match=r"00000003: damaged.*use an older one") as caught:
        checkpoints.read(saved)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "no metadata", "bad metadata", "empty metadata"])
def test_damaged_tensors_are_one_line(saved, damage):
    metadata, data = saved / ".metadata", next(saved.glob("*.distcp"))
    if damage == "cut":
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    elif damage == "empty":
        data.write_bytes(b"")
    elif damage == "gone":
        data.unlink()
    elif damage == "no metadata":
        metadata.unlink()
    elif damage == "bad metadata":
        metadata.write_bytes(b"x" * 100)
    else:
        metadata.write_bytes(b"")
    model, optimizer = model_and_optimizer()
    for reading in (
        lambda: checkpoints.check_whole(saved),
        lambda: checkpoints.load_tensors(tensors_of(model, optimizer), saved),
        lambda: checkpoints.load_weights(model, saved),
    ):
        with pytest.raises(RunError, match=r"00000003: damaged.*use an older one") as caught:
            reading()
        assert "\n" not in str(caught.value)


def test_weights_of_another_architecture_are_named(saved, tmp_path):
    with pytest.raises(RunError, match=r"another architecture: 0.weight is \[16, 8\] in the checkpoint, \[16, 4\]"):
        checkpoints.load_weights(nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 1)), saved)
    with pytest.raises(RunError, match=r"another architecture: 1.bias is \[1\] in the checkpoint, absent"):
        checkpoints.load_weights(nn.Sequential(nn.Linear(8, 16)), saved)
    file = tmp_path / "model.safetensors"
    checkpoints.consolidate(saved, file, QUICKSTART)
    with pytest.raises(RunError, match=r"model.safetensors: another architecture: 2.bias is absent"):
        checkpoints.load_weights(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(1, 1)), file)


def test_consolidating(saved, tmp_path):
    file = tmp_path / "model.safetensors"
    assert checkpoints.consolidate(saved, file, QUICKSTART) == 4
    model, _ = model_and_optimizer()
    checkpoints.load_weights(model, saved)
    assert_equal(load_file(file), model.state_dict())
    other, _ = model_and_optimizer()
    checkpoints.load_weights(other, file)
    assert_equal(other.state_dict(), model.state_dict())
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["stackexp_config"] == to_yaml(QUICKSTART)
    assert {path.name for path in tmp_path.iterdir()} == {saved.name, file.name}
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(RunError, match="cannot be read as safetensors"):
        checkpoints.load_weights(other, file)


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("model.memory=null", "model.memory"),
        ("model.memory.read=top", "model.memory.read is global in the checkpoint, top in the config"),
        ("optimizer.lr=1", "another run: optimizer.lr is 0.004 in the checkpoint, 1.0 in the config"),
        ("data.global_batch_tokens=2048", "another run: data.global_batch_tokens"),
        ("trainer.precision=64-true", "another run: trainer.precision"),
        ("seed=1", "another run: seed is 0 in the checkpoint, 1 in the config"),
        ("model.num_layers=2", "model.num_layers is 6 in the checkpoint, 2 in the config"),
    ],
)
def test_what_keeps_a_run_from_going_on_is_named(tmp_path, override, difference):
    with pytest.raises(RunError, match=difference):
        checkpointing.check_resumable(tmp_path, state_of(), compose(["quickstart"], [override]))


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.max_steps=999", "name=x", "logging.root=elsewhere"],
        ["trainer.devices=2", "trainer.strategy=fsdp", "data.micro_batch_size=1"],
        ["trainer.num_nodes=2", "trainer.devices=2", "trainer.strategy=hsdp", "data.micro_batch_size=1"],
        ["trainer.checkpoint_minutes=5", "trainer.keep_checkpoints=7", "trainer.max_time=00:01:00:00"],
        ["trainer.activation_checkpointing=true", "trainer.reshard_after_forward=false", "trainer.skip_spikes=true"],
    ],
)
def test_where_and_how_long_a_run_goes_on_may_change(tmp_path, overrides):
    checkpointing.check_resumable(tmp_path, state_of(), compose(["quickstart"], overrides))


def test_micro_batches_are_counted_anew_where_a_step_has_others():
    """The last micro-batch before a checkpoint is not yet complete in Lightning's eyes."""
    progress = {"total": {"ready": 12, "completed": 11}, "current": {"ready": 8, "completed": 7}}
    checkpointing.rescale(progress, then=4, now=1)
    assert progress == {"total": {"ready": 3, "completed": 2}, "current": {"ready": 2, "completed": 1}}
    checkpointing.rescale(progress, then=1, now=2)
    assert progress == {"total": {"ready": 6, "completed": 5}, "current": {"ready": 4, "completed": 3}}
