"""Read the file that Weights & Biases writes offline: records in the log format of LevelDB."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE_HEADER, BLOCK, RECORD_HEADER = 7, 32768, struct.Struct("<IHB")  # checksum, length, type
FULL, LAST = 1, 4


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return what was logged, one dict for each call of `log`."""
    from wandb.proto.wandb_internal_pb2 import Record

    history = []
    for data in _read_records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return history


def _read_records(data: bytes) -> Iterator[bytes]:
    position, record = FILE_HEADER, b""
    while position + RECORD_HEADER.size <= len(data):
        if BLOCK - position % BLOCK < RECORD_HEADER.size:  # the rest of a block is padding
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, position)
        position += RECORD_HEADER.size
        record += data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield record
            record = b""
