"""Other people's MDS shards, for `data inspect`: what their index says, their hashes, their documents."""

import json
from pathlib import Path

import numpy as np

from stackexp.data.tokenizer import get_end_of_text_id
from stackexp.errors import RunError, first_line
from stackexp.reports.data.inspection import SAMPLE, Inspection, Wish, whole_shards
from stackexp.reports.data.lengths import Documents, Lengths

LARGEST = 1 << 20  # no vocabulary is larger: tells which integers plain bytes are


def inspect_shards(path: Path, wish: Wish) -> Inspection:
    """Look at a folder of MDS shards with the column `tokens` or `text`. Raises RunError if its index is broken."""
    try:
        shards = json.loads((path / "index.json").read_text(encoding="utf-8"))["shards"]
        columns = shards[0]["column_names"]
        count = sum(shard["samples"] for shard in shards)
        entries = [_entry(path, shard) for shard in shards]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        raise RunError(f"{path}/index.json: missing or corrupt; copy the folder again") from e
    found = Inspection(path, "MDS shards")
    found.figures = {"samples": count, "shards": len(shards), "columns": columns}
    found.facts = {"samples": f"{count:,} in {len(shards):,} shards, columns {', '.join(columns)}"}
    unhashed = sum(not entry.get("hashes") for entry in entries)
    if unhashed:
        found.unchecked = f"{unhashed} shards have no hash in the index: only their lengths were compared"
    for _ in whole_shards(found, entries, wish):
        pass
    zipped = [shard for shard, entry in zip(shards, entries, strict=True) if entry is not shard["raw_data"]]
    if zipped:  # only their files can be looked at
        found.facts["compression"] = str(zipped[0].get("compression"))
        return found
    column = next((name for name in ("tokens", "text") if name in columns), None)
    if column and not found.damage:
        _look(found, column, wish)
    return found


def _entry(path: Path, shard: dict) -> dict:
    """What the index says of the file of the shard that is there. Raises KeyError if it says too little."""
    raw = shard["raw_data"]
    entry = shard["zip_data"] if shard.get("zip_data") and not (path / raw["basename"]).is_file() else raw
    _ = entry["basename"], entry["bytes"]
    return entry


def _look(found: Inspection, column: str, wish: Wish) -> None:
    """Count what is in all samples, and show some."""
    from streaming import LocalDataset  # takes seconds

    try:
        dataset = LocalDataset(str(found.path))
        chosen = set(wish.choose(len(dataset)))
        known = wish.tokenizer
        documents = Documents(get_end_of_text_id(known.tokenizer)) if known else None
        lengths, total, kind = Lengths(), 0, None
        for index in range(len(dataset)):
            value = dataset[index][column]
            if column == "text":
                size = len(value.encode())
                text = value[:SAMPLE]
            else:
                kind = kind or _dtype(value)
                ids = np.frombuffer(value, kind) if isinstance(value, bytes) else np.ravel(value)
                size, text = len(ids), None
                if documents:
                    documents.add(ids)
            if index in chosen:
                found.samples[f"sample {index:,}"] = text or _decode(ids[:SAMPLE], wish)
            total += size
            lengths.add(np.array([size]))
    except (OSError, ValueError, KeyError) as e:
        found.damage.append(f"{found.path}: cannot be read as MDS shards ({first_line(e)})")
        return
    if documents:
        documents.close()
        lengths = documents.lengths
    found.lengths, found.unit = lengths, "tokens" if column == "tokens" else "bytes"
    found.figures |= {found.unit: total, "documents": lengths.total}
    found.facts[found.unit] = f"{total:,}"
    what = "ended by end-of-text" if documents else "one a sample"
    found.facts["documents"] = f"{lengths.total:,}, {what}"


def _decode(ids: np.ndarray, wish: Wish) -> str:
    if wish.tokenizer:
        return wish.tokenizer.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    return " ".join(map(str, ids[:64]))


def _dtype(value: object) -> np.dtype | None:
    """Of ids stored as plain bytes: the widest integers that all are ids."""
    if not isinstance(value, bytes):
        return np.asarray(value).dtype
    for dtype in map(np.dtype, ("<i8", "<i4", "<u2")):
        if len(value) % dtype.itemsize == 0:
            ids = np.frombuffer(value, dtype)
            if not len(ids) or (ids.min() >= 0 and ids.max() < LARGEST):
                return dtype
    raise ValueError("`tokens` are bytes that hold no token ids")
