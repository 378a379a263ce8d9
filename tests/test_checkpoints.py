"""Checkpoints: written completely or not at all, from a copy; damage and mismatches are reported in one line."""

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
from stackexp.training.callbacks.checkpoint import rescale_progress
from stackexp.training.resume import check_resumable

QUICKSTART = compose(["quickstart"])


def make_state(config=QUICKSTART, **changes: Any) -> dict[str, Any]:
    """Return the part of `state.pt` that these tests read."""
    state = {"version": checkpoints.VERSION, "config": to_dict(config)}
    return {"global_step": 3, "stackexp": state | changes}


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.rand(4, 8)).square().sum().backward()
    optimizer.step()


def collect_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def assert_equal(ours: Any, theirs: Any) -> None:
    """Compare nested dicts and lists of tensors bit for bit."""
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


def get_error(function, *arguments: Any) -> str:
    """Return the message of the RunError that a call raises: one line."""
    with pytest.raises(RunError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def saved(tmp_path) -> Path:
    """A checkpoint of `make_model` after one step."""
    model, optimizer = make_model()
    take_step(model, optimizer)
    save(tmp_path / "00000003", collect_tensors(model, optimizer), make_state())
    return tmp_path / "00000003"


def test_a_checkpoint_holds_its_own_step_while_training_continues(tmp_path, monkeypatch):
    """The writer is blocked while further steps change every tensor in place."""
    write, may_write = FileSystemWriter.write_data, threading.Event()

    def write_late(self, *args):
        assert may_write.wait(60)
        return write(self, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_late)
    model, optimizer = make_model()
    take_step(model, optimizer)
    expected = copy.deepcopy(collect_tensors(model, optimizer))
    writer, calls, path = CheckpointWriter(), [], tmp_path / "00000003"
    writer.save(path, collect_tensors(model, optimizer), make_state(), lambda: calls.append(path.exists()))
    for _ in range(3):
        take_step(model, optimizer)
    assert not path.exists()
    assert not calls
    may_write.set()
    writer.wait()
    assert calls == [True], "on_saved is called once the checkpoint is in place"

    loaded = collect_tensors(*make_model())
    checkpoints.load_tensors(loaded, path)
    assert_equal(loaded, expected)
    with pytest.raises(AssertionError):
        assert_equal(collect_tensors(model, optimizer), expected)
    assert checkpoints.load_state(path) == make_state()


def write_forever(folder: Path) -> None:
    torch.manual_seed(0)
    writer = CheckpointWriter()
    for number in range(10**6):
        tensors = {"model": {"x": torch.full((10**6,), number), "y": torch.full((10,), number)}}
        writer.save(folder / f"{number:08d}", tensors, make_state(number=number), lambda: None)


def test_a_kill_while_writing_leaves_complete_checkpoints_only(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (process,) = Forks(tmp_path).start(folder, function=write_forever)
    deadline = time.monotonic() + 60
    while len(list(folder.glob("0*"))) < 3 or not list(folder.glob(".0*")):  # stopped inside the fourth checkpoint
        os.kill(process.pid, signal.SIGCONT)
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.003)
        os.kill(process.pid, signal.SIGSTOP)
    process.kill()
    process.join()
    complete = sorted(folder.glob("0*"))
    assert len(list(folder.iterdir())) == len(complete) + 1
    for path in complete:
        tensors = {"x": torch.zeros(10**6, dtype=torch.int64), "y": torch.zeros(10, dtype=torch.int64)}
        checkpoints.load_tensors({"model": tensors}, path)
        number = checkpoints.load_state(path)["stackexp"]["number"]
        assert path.name == f"{number:08d}"
        assert all((tensor == number).all() for tensor in tensors.values())


@pytest.mark.parametrize("function", ["os.fsync", "torch.distributed.checkpoint.FileSystemWriter.write_data"])
def test_failed_write_leaves_no_files(tmp_path, monkeypatch, function):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(function, fail)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "1", {"model": {"x": torch.zeros(3)}}, make_state())
    assert not list(tmp_path.iterdir())


def test_incompatible_checkpoints_are_refused_in_one_line(saved, tmp_path):
    old, empty = tmp_path / "model.ckpt", tmp_path / "empty"
    torch.save(make_state(version=1), old)
    empty.mkdir()
    assert f"{tmp_path}/nowhere: no such checkpoint" in get_error(checkpoints.load_state, tmp_path / "nowhere")
    assert f"{old}: checkpoints of version 2 are folders" in get_error(checkpoints.load_state, old)
    assert f"{empty}: not a stackexp checkpoint" in get_error(checkpoints.load_state, empty)
    torch.save(make_state(version=99), saved / "state.pt")
    assert "checkpoint version 99 is not supported" in get_error(checkpoints.load_state, saved)
    for state in ({"weights": torch.zeros(3)}, torch.zeros(3)):
        torch.save(state, saved / "state.pt")
        assert "not a stackexp checkpoint" in get_error(checkpoints.load_state, saved)


@pytest.mark.parametrize("length", [0, 5, 700, -1])
def test_a_damaged_state_is_reported_in_one_line(saved, length):
    state = saved / "state.pt"
    state.write_bytes(state.read_bytes()[:length])
    message = get_error(checkpoints.load_state, saved)
    assert "00000003: damaged" in message
    assert "use an older one" in message


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("*.distcp", "half"),
        ("*.distcp", b""),
        ("*.distcp", None),
        (".metadata", None),
        (".metadata", b"x" * 100),
        (".metadata", b""),
    ],
)
def test_damaged_tensor_files_are_reported_in_one_line(saved, file, content):
    (path,) = saved.glob(file)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == "half" else content)
    model, optimizer = make_model()
    for message in (
        get_error(checkpoints.check_files, saved),
        get_error(checkpoints.load_tensors, collect_tensors(model, optimizer), saved),
        get_error(checkpoints.load_weights, model, saved),
    ):
        assert "00000003: damaged" in message
        assert "use an older one" in message


def test_weights_of_a_different_architecture_are_named(saved, tmp_path):
    file = tmp_path / "model.safetensors"
    checkpoints.consolidate(saved, file, QUICKSTART)
    for path, layers, message in (
        (saved, [(4, 16), (16, 1)], "00000003: different architecture: 0.weight is [16, 8] in the checkpoint, [16, 4]"),
        (saved, [(8, 16)], "different architecture: 1.bias is [1] in the checkpoint, absent"),
        (file, [(8, 16), (16, 1), (1, 1)], "model.safetensors: different architecture: 2.bias is absent"),
    ):
        model = nn.Sequential(*(nn.Linear(*sizes) for sizes in layers))
        assert message in get_error(checkpoints.load_weights, model, path)


def test_a_consolidated_file_has_the_weights_and_the_config(saved, tmp_path):
    file = tmp_path / "model.safetensors"
    assert checkpoints.consolidate(saved, file, QUICKSTART) == 4
    (model, _), (other, _) = make_model(), make_model()
    checkpoints.load_weights(model, saved)
    assert_equal(load_file(file), model.state_dict())
    checkpoints.load_weights(other, file)
    assert_equal(other.state_dict(), model.state_dict())
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["stackexp_config"] == to_yaml(QUICKSTART)
    assert {path.name for path in tmp_path.iterdir()} == {saved.name, file.name}
    file.write_bytes(file.read_bytes()[:-10])
    assert "cannot be read as safetensors" in get_error(checkpoints.load_weights, other, file)


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("model.memory=null", "model.memory"),
        ("model.memory.read=top", "model.memory.read is global in the checkpoint, top in the config"),
        ("model.num_layers=2", "different architecture: model.num_layers is 6 in the checkpoint, 2 in the config"),
        ("optimizer.lr=1", "different run: optimizer.lr is 0.004 in the checkpoint, 1.0 in the config"),
        ("data.global_batch_tokens=2048", "different run: data.global_batch_tokens"),
        ("trainer.precision=64-true", "different run: trainer.precision"),
        ("seed=1", "different run: seed is 0 in the checkpoint, 1 in the config"),
    ],
)
def test_the_first_option_that_prevents_resuming_is_named(tmp_path, override, difference):
    assert difference in get_error(check_resumable, tmp_path, make_state(), compose(["quickstart"], [override]))


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.max_steps=999", "name=x", "logging.root=elsewhere"],
        ["trainer.devices=2", "trainer.strategy=fsdp", "data.micro_batch_size=1"],
        ["trainer.num_nodes=2", "trainer.devices=2", "trainer.strategy=hsdp", "data.micro_batch_size=1"],
        ["trainer.checkpoint_interval_minutes=5", "trainer.keep_checkpoints=7", "trainer.max_time=00:01:00:00"],
        ["trainer.activation_checkpointing=true", "trainer.reshard_after_forward=false", "trainer.skip_spikes=true"],
    ],
)
def test_devices_duration_and_logging_may_change_on_resume(tmp_path, overrides):
    check_resumable(tmp_path, make_state(), compose(["quickstart"], overrides))


def test_progress_is_rescaled_to_another_number_of_micro_batches_per_step():
    """In a checkpoint, Lightning has not completed the last micro-batch."""
    progress = {"total": {"ready": 12, "completed": 11}, "current": {"ready": 8, "completed": 7}}
    rescale_progress(progress, before=4, now=1)
    assert progress == {"total": {"ready": 3, "completed": 2}, "current": {"ready": 2, "completed": 1}}
    rescale_progress(progress, before=1, now=2)
    assert progress == {"total": {"ready": 6, "completed": 5}, "current": {"ready": 4, "completed": 3}}
