"""Data files are verified against their recorded hash on first use, and names in them stay inside their folder."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from evaluation_files import IDS, TOKENIZER, open_one, read_tokens
from loaders import build_config, build_loader, read_samples, write_set

from stackexp.config.compose import compose
from stackexp.config.data import explain_set_name
from stackexp.data import shards
from stackexp.data.shards import DamagedFileError, TokenSet, verify_file
from stackexp.data.token_files import write_token_file
from stackexp.data.tokenizer import compute_fingerprint
from stackexp.datamodules.node_storage import SourceError
from stackexp.datamodules.pretraining import PretrainingData
from stackexp.errors import ConfigError, RunError
from stackexp.files import compute_sha256

pytestmark = pytest.mark.usefixtures("cache")


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 4
    path.write_bytes(content)


def zero_second_half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


def test_file_is_hashed_once_until_it_changes(tmp_path, monkeypatch):
    hashed = []
    monkeypatch.setattr(shards, "compute_sha256", lambda path: hashed.append(path) or compute_sha256(path))
    path = tmp_path / "file"
    path.write_bytes(b"content")
    digest = compute_sha256(path)
    verify_file(path, None)
    assert hashed == []
    for _ in range(3):
        verify_file(path, digest)
    assert hashed == [path]
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    verify_file(path, digest)
    assert hashed == [path, path]
    path.write_bytes(b"Content")
    for _ in range(2):  # a failure is not remembered as a success
        with pytest.raises(DamagedFileError, match=f"{path}: damaged, its SHA-256 is not the recorded one"):
            verify_file(path, digest)


def test_without_a_writable_cache_files_are_still_verified(tmp_path, monkeypatch):
    monkeypatch.setenv("STACKEXP_CACHE", "/dev/null/cache")
    path = tmp_path / "file"
    path.write_bytes(b"content")
    digest = compute_sha256(path)
    verify_file(path, digest)
    flip_bit(path)
    with pytest.raises(DamagedFileError):
        verify_file(path, digest)


@pytest.mark.parametrize(("damage", "num_workers"), [(flip_bit, 0), (zero_second_half, 1)])
def test_damaged_training_shard_is_named(tmp_path, damage, num_workers):
    folder = write_set(tmp_path / "set", 0, 40)
    config = build_config(path=str(folder), num_workers=num_workers)
    read_samples(build_loader(config))
    shard = min(folder.rglob("shard*"))
    damage(shard)
    with pytest.raises(SourceError, match=rf"^{shard}: damaged, its SHA-256"):
        read_samples(build_loader(config))


def test_damaged_copy_in_the_cache_is_downloaded_again(tmp_path):
    remote = write_set(tmp_path / "remote", 0, 40)
    config = build_config(remote=str(remote), path=str(tmp_path / "copy"))
    before = read_samples(build_loader(config))
    shard = max((tmp_path / "copy").rglob("shard*"))
    content = shard.read_bytes()
    flip_bit(shard)
    assert read_samples(build_loader(config)) == before
    assert shard.read_bytes() == content


@pytest.mark.parametrize("damage", [flip_bit, zero_second_half])
def test_damaged_evaluation_sets_are_named(tmp_path, damage):
    folder = write_set(tmp_path / "set", 0, 40)
    dataset = open_one(folder)
    assert len(read_tokens(dataset)) == len(TokenSet(folder)) * 16
    shard = max(folder.rglob("shard*"))
    damage(shard)
    with pytest.raises(RunError, match=rf"^{shard}: damaged, its SHA-256"):
        read_tokens(open_one(folder))

    file = tmp_path / "ids.npy"
    fields = {"tokenizer": compute_fingerprint(TOKENIZER), "source": "test"}
    write_token_file(file, [np.array(IDS)], vocab_size=300, **fields)
    assert read_tokens(open_one(file)) == IDS
    damage(file)
    with pytest.raises(RunError, match=rf"^{file}: damaged, its SHA-256"):
        open_one(file)


@pytest.mark.parametrize("name", ["../../outside.mds", "/outside.mds", "unit/../../outside.mds", 5, ""])
def test_shard_outside_the_folder_is_refused(tmp_path, name):
    folder = write_set(tmp_path / "set", 0, 40)
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0]["raw_data"]["basename"] = name
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(RunError, match="is outside the folder"):
        TokenSet(folder)
    remote = build_config(remote=str(folder), path=str(tmp_path / "copy"))
    with pytest.raises(RunError, match="is outside the folder"):
        read_samples(build_loader(remote))
    assert not list(tmp_path.rglob("outside*"))


@pytest.mark.parametrize("name", ["average", "whole", "loss", "", " ", "a/b", "a\nb", "\x1b[31m"])
def test_unusable_set_names_are_refused(tmp_path, name):
    config, shards = tmp_path / "x.yaml", {"kind": "shards", "path": "train", "validation": {name: "held-out"}}
    config.write_text(json.dumps({"defaults": ["quickstart"], "data": shards}))
    with pytest.raises(ConfigError) as in_config:
        compose([str(config)])
    assert explain_set_name(name) in str(in_config.value)
    data = PretrainingData(build_config(path="unused"), seed=0)
    with pytest.raises(ConfigError, match=r"^--sets: ") as on_command_line:
        data.select_sets("validate", [f"{name}=unused"])
    assert all(str(caught.value).isprintable() for caught in (in_config, on_command_line))


INDEX_FIELDS = ["column_encodings", "column_names", "column_sizes", "compression", "format", "hashes", "version"]
INDEX_FIELDS += ["samples", "raw_data", "zip_data"]


@pytest.mark.parametrize(
    "change", [*({name: "x"} for name in INDEX_FIELDS), {"zip_dat\u00e1": None}, {"samples": None}], ids=str
)
def test_a_changed_entry_of_the_index_is_refused(tmp_path, change):
    folder = write_set(tmp_path / "set", 0, 6)
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0] |= change
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(RunError, match=r"index\.json: missing or corrupt; prepare the set again"):
        TokenSet(folder)
