"""The hash log of training data, which shows whether two runs trained on the same sequences in the same order.

The file data.jsonl in a run folder has lines such as
{"step": 20, "tokens": 81920, "hash": "3f...", "sequences": {"web": 60, "code": 20}}.
Hash and counts cover everything since the first step.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from stackexp import files
from stackexp.errors import RunError

FILE_NAME = "data.jsonl"


def hash_sequence(tokens: np.ndarray) -> int:
    """Return a 64-bit hash of token ids [T], independent of their integer type."""
    return int.from_bytes(hashlib.blake2b(tokens.astype("<u4").tobytes(), digest_size=8).digest(), "little")


def update_hash(previous: str, sequence_hashes: np.ndarray) -> str:
    """Return the rolling hash after one more optimizer step on sequences with these hashes, uint64 [N].

    `previous` is "" before the first step. The hash is h_n = blake2b(h_{n-1}, sorted sequence hashes). It depends on
    the global batches and their order, not on how they are split into processes, micro-batches and workers.
    """
    digest = hashlib.blake2b(bytes.fromhex(previous), digest_size=16)
    digest.update(np.sort(sequence_hashes).astype("<u8").tobytes())
    return digest.hexdigest()


def truncate_hash_log(folder: Path, step: int) -> None:
    """Delete the lines of a run's data.jsonl after `step`; create the file if it is missing."""
    files.write_json_lines(folder / FILE_NAME, [line for line in read_hash_log(folder) if line["step"] <= step])


def read_hash_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's data.jsonl; none if there is no such file.

    Raises RunError for a damaged line. A last line cut off by a kill is skipped.
    """
    return list(files.read_json_lines(folder / FILE_NAME))


def read_hashes(folder: Path) -> dict[int, str]:
    """Return the rolling hashes of a run by step. Raises RunError for a line without one."""
    try:
        return {line["step"]: line["hash"] for line in read_hash_log(folder)}
    except (KeyError, TypeError) as error:
        raise RunError(f"{folder / FILE_NAME}: a line has no {error}; delete the line") from None
