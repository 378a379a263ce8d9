"""The files of a checkpoint: damage is detected, and code in them is not run."""

import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_models import collect_tensors, get_error, make_model, make_state, save, save_small_model, take_step
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from stackexp.models import checkpoints
from stackexp.models.checkpoints import Reader
from stackexp.runs import MANIFEST, read_manifest, write_manifest


@pytest.fixture
def saved(tmp_path) -> Path:
    return save_small_model(tmp_path / "00000003")


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


@pytest.mark.parametrize("name", ["__0_0.distcp", "state.pt"])
def test_file_of_another_checkpoint_is_detected(saved, tmp_path, name):
    model, optimizer = make_model()
    take_step(model, optimizer)
    other = tmp_path / "00000004"
    save(other, collect_tensors(model, optimizer), make_state(step=4))
    shutil.copy(other / name, saved / name)
    assert f"damaged ({name} has changed since it was written)" in get_error(read_all, saved)


def test_a_missing_manifest_is_detected(saved):
    (saved / "manifest.json").unlink()
    for read in (checkpoints.load_state, checkpoints.check_files):
        assert "00000003: damaged (manifest.json is missing)" in get_error(read, saved)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_checkpoint_copied_over_another_step_is_refused(saved, is_old):
    if is_old:  # earlier versions wrote only the hashes
        (saved / MANIFEST).write_text(json.dumps(read_manifest(saved)["files"]))
        read_all(saved)
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
    assert "../elsewhere is outside its folder" in get_error(checkpoints.check_files, saved)


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


@pytest.mark.parametrize("length", [0, 700])
def test_a_damaged_state_is_reported_in_one_line(saved, length):
    state = saved / "state.pt"
    state.write_bytes(state.read_bytes()[:length])
    write_manifest(saved, 3, None)
    message = get_error(checkpoints.load_state, saved)
    assert "00000003: damaged" in message
    assert "use an older one" in message


@pytest.mark.parametrize(("file", "content"), [("*.distcp", "half"), ("*.distcp", None), (".metadata", b"x" * 100)])
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
