"""Checkpoints: complete or absent after a kill, damage is detected, and code in them is not run."""

import copy
import errno
import os
import pickle
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
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
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.testing import assert_close

from stackexp.config.compose import to_yaml
from stackexp.errors import RunError
from stackexp.models import checkpoints
from stackexp.models.checkpoints import CheckpointWriter, Reader
from stackexp.runs import MANIFEST, write_manifest


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


def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path):
    writer, path = CheckpointWriter(), tmp_path / "00000003"
    state = make_state() | {"callbacks": {"Mine": {"best": np.float64(1)}}}
    with pytest.raises(RunError, match="state of a callback, loader or data module has other values than tensors"):
        writer.save(path, collect_tensors(*make_model()), state, lambda: None)
    assert not list(tmp_path.iterdir())


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


def write_forever(folder: Path) -> None:
    torch.manual_seed(0)
    writer = CheckpointWriter()
    for number in range(10**6):
        tensors = {"model": {"x": torch.full((10**6,), number), "y": torch.full((10,), number)}}
        writer.save(folder / f"{number:08d}", tensors, make_state(step=number, number=number), lambda: None)


def test_a_kill_while_writing_leaves_complete_checkpoints_only(forks, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (process,) = forks.start(folder, function=write_forever)
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
    checkpoints.average_checkpoints([saved], file, QUICKSTART)
    for path, layers, message in (
        (saved, [(4, 16), (16, 1)], "00000003: different architecture: 0.weight is [16, 8], but [16, 4]"),
        (saved, [(8, 16)], "different architecture: 1.bias is [1], but absent"),
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
    assert checkpoints.average_checkpoints(folders, file, QUICKSTART) == 4
    assert_close(load_file(file), expected)
    assert checkpoints.average_checkpoints(folders[2:], file, QUICKSTART) == 4
    assert_equal(load_file(file), model.state_dict())


def test_a_consolidated_file_has_the_weights_and_the_config(saved, tmp_path):
    file = tmp_path / "model.safetensors"
    assert checkpoints.average_checkpoints([saved], file, QUICKSTART) == 4
    (model, _), (other, _) = make_model(), make_model()
    checkpoints.load_weights(model, saved)
    assert_equal(load_file(file), model.state_dict())
    checkpoints.load_weights(other, file)
    assert_equal(other.state_dict(), model.state_dict())
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["stackexp_config"] == to_yaml(QUICKSTART)
    assert {path.name for path in tmp_path.iterdir()} == {saved.name, file.name}
    again = []
    for _ in range(8):  # safetensors would write several keys of metadata in any order
        checkpoints.average_checkpoints([saved], file, QUICKSTART)
        again.append(file.read_bytes())
    assert len(set(again)) == 1
    file.write_bytes(file.read_bytes()[:-10])
    assert "cannot be read as safetensors" in get_error(checkpoints.load_weights, other, file)


def rewrite_state(path: Path, state: Any) -> None:
    """Replace the state of a checkpoint, and its hash."""
    torch.save(state, path / "state.pt")
    write_manifest(path, 3, None)


def read_all(path: Path) -> None:
    """Load everything that a resumed run loads."""
    checkpoints.load_state(path)
    checkpoints.check_files(path)
    checkpoints.load_tensors(collect_tensors(*make_model()), path)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.pt", "manifest.json"])
def test_every_flipped_bit_is_detected(saved, name):
    file = saved / name
    content, generator = file.read_bytes(), random.Random(0)
    read_all(saved)
    for position in generator.sample(range(8 * len(content)), 40):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        file.write_bytes(flipped)
        assert "damaged" in get_error(read_all, saved)


def test_a_checkpoint_copied_over_another_step_is_refused(saved):
    copied = saved.rename(saved.with_name("00000060"))
    assert "00000060: damaged (the checkpoint of step 3 under another name)" in get_error(
        checkpoints.load_state, copied
    )
    read_all(copied.rename(saved.with_name("my-copy")))


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __deepcopy__(self, _: dict) -> "Malicious":  # the writer copies what it saves
        return self

    def __reduce__(self) -> tuple:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("location", ["metadata", "value", "state"])
def test_code_in_a_checkpoint_is_not_run(tmp_path, location):
    model, optimizer = make_model()
    take_step(model, optimizer)
    tensors, marker, path = collect_tensors(model, optimizer), tmp_path / "code-was-run", tmp_path / "00000003"
    if location == "value":
        tensors["optimizer"]["param_groups"][0]["lr"] = Malicious(marker)
    save(path, tensors, make_state())
    if location == "metadata":
        (path / ".metadata").write_bytes(pickle.dumps(Malicious(marker)))
        write_manifest(path, 3, None)
    if location == "state":
        rewrite_state(path, make_state() | {"x": Malicious(marker)})
    assert "damaged" in get_error(read_all, path)
    assert not marker.exists()


class Attribute:
    """Is pickled as `getattr(owner, name)`, as Python 3.11.2 does with enumerations."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple:
        return getattr, (self.owner, self.name)


def test_memory_formats_are_the_only_attributes_in_metadata(saved):
    metadata = Reader(saved).read_metadata()
    metadata.planner_data = Attribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    assert Reader(saved).read_metadata().planner_data is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    metadata.planner_data = Attribute(torch.Size, "__new__")
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    write_manifest(saved, 3, None)
    assert "contains an attribute of <class 'torch.Size'>" in get_error(checkpoints.check_files, saved)


def test_tensor_file_outside_the_checkpoint_is_refused(saved):
    metadata = Reader(saved).read_metadata()
    for item in metadata.storage_data.values():
        item.relative_path = "../elsewhere"
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    write_manifest(saved, 3, None)
    assert "../elsewhere is not in its manifest.json" in get_error(checkpoints.check_files, saved)


def test_incompatible_checkpoints_are_refused_in_one_line(saved, tmp_path):
    old, empty = tmp_path / "model.ckpt", tmp_path / "empty"
    torch.save(make_state(version=1), old)
    empty.mkdir()
    assert f"{tmp_path}/nowhere: no such checkpoint" in get_error(checkpoints.load_state, tmp_path / "nowhere")
    assert f"{old}: a checkpoint is a folder" in get_error(checkpoints.load_state, old)
    assert f"{empty}: not a stackexp checkpoint" in get_error(checkpoints.load_state, empty)
    rewrite_state(saved, make_state(version=99))
    assert "checkpoint version 99 is not supported" in get_error(checkpoints.load_state, saved)
    for state in ({"weights": torch.zeros(3)}, torch.zeros(3)):
        rewrite_state(saved, state)
        assert "not a stackexp checkpoint" in get_error(checkpoints.load_state, saved)


@pytest.mark.parametrize(("file", "content"), [("*.distcp", "half"), ("*.distcp", None), (".metadata", b"x" * 100)])
def test_damaged_files_are_reported_in_one_line(saved, file, content):
    (path,) = saved.glob(file)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == "half" else content)
    model, optimizer = make_model()
    (saved / MANIFEST).rename(saved / "moved")
    for read in (checkpoints.load_state, checkpoints.check_files):
        assert "00000003: damaged (manifest.json is missing)" in get_error(read, saved)
    (saved / "moved").rename(saved / MANIFEST)
    messages = [
        get_error(checkpoints.check_files, saved),
        get_error(checkpoints.load_tensors, collect_tensors(model, optimizer), saved),
        get_error(checkpoints.load_weights, model, saved),
    ]
    state = saved / "state.pt"
    for length in (700, 0):
        state.write_bytes(state.read_bytes()[:length])
        write_manifest(saved, 3, None)
        messages.append(get_error(checkpoints.load_state, saved))
    assert all("00000003: damaged" in message and "use an older one" in message for message in messages)


@pytest.mark.parametrize("text", ["", "5", "null", "[", "a: [b"])
def test_a_safetensors_file_without_a_valid_config_is_reported(tmp_path, text):
    file = tmp_path / "model.safetensors"
    save_file({"0.weight": torch.ones(2)}, file, metadata={"stackexp_config": text})
    assert "its metadata has no valid config; write the file again" in get_error(checkpoints.read_config, file)


def test_weights_that_are_no_floating_point_numbers_are_refused(saved, tmp_path):
    weights, (model, _) = checkpoints.read_weights(saved), make_model()
    save_file(weights | {"0.weight": weights["0.weight"] > 0}, tmp_path / "x.safetensors")
    message = get_error(checkpoints.load_weights, model, tmp_path / "x.safetensors")
    assert "0.weight is torch.bool, not torch.float32; write it again" in message
