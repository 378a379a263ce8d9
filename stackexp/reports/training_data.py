"""Were two runs trained on the same data? Tokens are compared by hashes of their batches, generated data by options."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stackexp.config.affects import select_options
from stackexp.data import hash_log
from stackexp.errors import RunError
from stackexp.frame import Row, get_options

GENERATED_DATA = ("formal_language", "arithmetic")
"""The kinds of data that the config alone determines."""


def read_training_data(row: Row) -> dict[Any, Any]:
    """Return options of a generated dataset, {key: value}, or the recorded hashes of batches, {step: hash}.

    Empty if nothing is recorded. Raises RunError for damage.
    """
    if row.get("data.kind") in GENERATED_DATA:
        return {"data.task": row.get("data.task"), "seed": row.get("seed")} | select_data_options(row)
    return hash_log.read_hashes(Path(row["path"]))


def compare_data(ours: dict[Any, Any], theirs: dict[Any, Any]) -> tuple[str, str]:
    """Return how two runs' training data differ, and why they were not compared; empty strings if neither applies."""
    if not ours or not theirs:
        return "", f"no training data recorded in {hash_log.FILE_NAME}"
    is_generated = "seed" in ours  # hashes have steps as keys
    if is_generated != ("seed" in theirs):
        return "text is not generated data", ""
    shared = [key for key in ours if key in theirs]
    for key in shared:
        if ours[key] != theirs[key]:
            return f"{key} is {ours[key]}, not {theirs[key]}" if is_generated else f"they differ at step {key}", ""
    return "", "" if shared else "they share no recorded step"


def check_same_data(rows: Iterable[Row]) -> list[str]:
    """Raise RunError if two runs were trained on different data, and return notes about runs that were not compared.

    Runs on tokens are compared by the hashes that they recorded of their batches. Formal languages and arithmetic are
    generated from the config, so those runs are compared by the options of the dataset.
    """
    data = [(row, read_training_data(row)) for row in rows]
    first, reference = max(data, key=lambda item: len(item[1]))  # with the most steps, to find all differences
    notes: list[str] = []
    for row, own in data:
        path, other = row["path"], first["path"]
        difference, unknown = compare_data(own, reference)
        if not own:
            notes.append(f"{path}: its training data are not compared; none recorded yet in {hash_log.FILE_NAME}")
        elif difference:
            has_seeds = first.get("seed") != row.get("seed") and row.get("data.kind") not in GENERATED_DATA
            hint = "average seeds with `report ablation`, or " if has_seeds else ""
            raise RunError(
                f"{path}: trained on other data than {other} ({difference}); {hint}compare them anyway with "
                "--different-data"
            )
        elif unknown:
            notes.append(f"{path}: its training data are not compared with {other}; {unknown}")
    return notes


def explain_other_data(base: Row, row: Row) -> str:
    """Return why the training data of two runs differ or were not compared, or an empty string."""
    difference, unknown = compare_data(read_training_data(row), read_training_data(base))
    return f"trained on other data ({difference})" if difference else unknown


def select_data_options(row: Row) -> dict[str, Any]:
    """Return the options of a run that determine its training data, except the seed."""
    options = select_options(get_options(row), ["training"])
    return {key: value for key, value in options.items() if key.startswith("data.")}
