"""What is on the disk, and that it can be checked."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np

from stackexp.data.shards import ShardWriter, write_json


def test_every_shard_has_its_hash(tmp_path):
    writer = ShardWriter(tmp_path, 4, np.dtype(np.uint16))
    writer.full = 8  # two sequences to a shard
    writer.write(np.arange(18, dtype=np.uint16))
    assert writer.close().tolist() == [16, 17]
    assert len(writer.shards) == 2
    for shard in writer.shards:
        data = (tmp_path / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"]
        assert shard["raw_data"]["hashes"] == {"sha256": hashlib.sha256(data).hexdigest()}
        assert shard["hashes"] == ["sha256"]


def test_json_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A crash of the machine after `replace` must not leave an empty corpus.json: that would mean done."""
    path, synced = tmp_path / "corpus.json", []

    def fsync(descriptor: int) -> None:
        assert not path.exists()
        synced.append(Path(f"/proc/self/fd/{descriptor}").read_text())

    monkeypatch.setattr(os, "fsync", fsync)
    write_json(path, {"tokens": 3})
    assert synced == [path.read_text()]
    assert json.loads(synced[0]) == {"tokens": 3}
