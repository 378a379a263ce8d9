"""The shard files of a prepared set."""

import hashlib

import numpy as np

from stackexp.data import shards
from stackexp.data.shards import ShardWriter


def test_index_entries_record_size_and_hash_of_each_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 16)  # two sequences
    writer = ShardWriter(tmp_path, 4, np.dtype(np.uint16))
    writer.write(np.arange(18, dtype=np.uint16))
    assert writer.close().tolist() == [16, 17]
    assert len(writer.shards) == 2
    for shard in writer.shards:
        data = (tmp_path / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"]
        assert shard["raw_data"]["hashes"] == {"sha256": hashlib.sha256(data).hexdigest()}
        assert shard["hashes"] == ["sha256"]
