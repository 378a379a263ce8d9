"""Checkpoints: written completely or not at all, and from a copy of the tensors."""

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
from saved_models import (
    QUICKSTART,
    collect_tensors,
    get_error,
    make_model,
    make_state,
    save,
    save_small_model,
    take_step,
)
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.testing import assert_close

from stackexp.config.compose import to_yaml
from stackexp.models import checkpoints, weight_files
from stackexp.models.checkpoints import CheckpointWriter


@pytest.fixture
def saved(tmp_path) -> Path:
    return save_small_model(tmp_path / "00000003")


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


def test_progress_is_noted_while_files_grow(tmp_path, monkeypatch):
    """Otherwise the watchdog would end a run that waits for a slow disk."""
    monkeypatch.setattr(checkpoints, "POLL_SECONDS", 0.01)
    noted = threading.Event()
    write_data = FileSystemWriter.write_data

    def write_slowly(writer, *args):
        (file,) = Path(writer.path).glob("state.pt")
        assert noted.wait(10), "the size of the files so far"
        noted.clear()
        file.write_bytes(file.read_bytes() + b"x")
        assert noted.wait(10)
        return write_data(writer, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_slowly)
    writer = CheckpointWriter(noted.set)
    writer.save(tmp_path / "00000003", collect_tensors(*make_model()), make_state(), lambda: None)
    writer.wait()
    assert (tmp_path / "00000003").exists()


def write_forever(folder: Path) -> None:
    torch.manual_seed(0)
    writer = CheckpointWriter()
    for number in range(10**6):
        tensors = {"model": {"x": torch.full((10**6,), number), "y": torch.full((10,), number)}}
        writer.save(folder / f"{number:08d}", tensors, make_state(step=number, number=number), lambda: None)


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


def test_weights_of_a_different_architecture_are_named(saved, tmp_path):
    file = tmp_path / "model.safetensors"
    weight_files.average_checkpoints([saved], file, QUICKSTART)
    for path, layers, message in (
        (saved, [(4, 16), (16, 1)], "00000003: different architecture: 0.weight is [16, 8] in the checkpoint, [16, 4]"),
        (saved, [(8, 16)], "different architecture: 1.bias is [1] in the checkpoint, absent"),
        (file, [(8, 16), (16, 1), (1, 1)], "model.safetensors: different architecture: 2.bias is absent"),
    ):
        model = nn.Sequential(*(nn.Linear(*sizes) for sizes in layers))
        assert message in get_error(checkpoints.load_weights, model, path)


def test_an_average_is_the_mean_of_the_weights(tmp_path):
    model, optimizer = make_model()
    folders, expected = [tmp_path / f"0000000{step}" for step in (3, 4, 5)], {}
    for folder in folders:
        take_step(model, optimizer)
        save(folder, collect_tensors(model, optimizer), make_state(step=int(folder.name)))
        expected = {name: expected.get(name, 0) + weight / 3 for name, weight in model.state_dict().items()}
    file = tmp_path / "average.safetensors"
    assert weight_files.average_checkpoints(folders, file, QUICKSTART) == 4
    assert_close(load_file(file), expected)
    assert weight_files.average_checkpoints(folders[2:], file, QUICKSTART) == 4
    assert_equal(load_file(file), model.state_dict())


def test_a_consolidated_file_has_the_weights_and_the_config(saved, tmp_path):
    file = tmp_path / "model.safetensors"
    assert weight_files.average_checkpoints([saved], file, QUICKSTART) == 4
    (model, _), (other, _) = make_model(), make_model()
    checkpoints.load_weights(model, saved)
    assert_equal(load_file(file), model.state_dict())
    checkpoints.load_weights(other, file)
    assert_equal(other.state_dict(), model.state_dict())
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["stackexp_config"] == to_yaml(QUICKSTART)
    assert {path.name for path in tmp_path.iterdir()} == {saved.name, file.name}
    again = []
    for _ in range(8):  # safetensors writes the metadata in any order
        weight_files.average_checkpoints([saved], file, QUICKSTART)
        again.append(file.read_bytes())
    assert len(set(again)) == 1
    file.write_bytes(file.read_bytes()[:-10])
    assert "cannot be read as safetensors" in get_error(checkpoints.load_weights, other, file)
