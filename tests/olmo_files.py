"""Small substitutes for OLMo's perplexity sets, and their files as written by `data fetch`."""

from pathlib import Path

import numpy as np

from stackexp.data import olmo
from stackexp.data.olmo import OlmoSet, list_olmo_sets
from stackexp.data.token_files import TokenFile
from stackexp.files import compute_sha256

PTB, ICE = OlmoSet("v2", "ptb"), OlmoSet("v2", "ice")


def make_ids(seed: int, count: int = 5000, end: int = 0) -> bytes:
    """Return two documents of random ids as raw uint16."""
    ids = np.random.default_rng(seed).integers(0, olmo.VOCAB_SIZE, count).astype("<u2")
    ids[[count // 2, -1]] = end
    return ids.tobytes()


CONTENT = {olmo_set: make_ids(n) for n, olmo_set in enumerate([*list_olmo_sets("v2"), *list_olmo_sets("v3")])}


def read_fetched(tmp_path: Path, olmo_set: OlmoSet) -> bytes:
    """Return the bytes of a set in `tmp_path`/to after checking them against the record."""
    path = olmo_set.file(tmp_path / "to")
    record = TokenFile(path).record
    assert record is not None
    assert record.sha256 == compute_sha256(path)
    return path.read_bytes()


def list_part_files(tmp_path: Path) -> list[str]:
    """Return the names of unfinished downloads of V2 in `tmp_path`/to."""
    return [path.name for path in (tmp_path / "to" / "v2").glob(".*") if ".part" in path.name]
