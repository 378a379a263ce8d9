"""Were two runs trained on the same data? Tokens are compared by hashes of their batches, generated data by options."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from stackexp.config.affects import select_options
from stackexp.data import hash_log
from stackexp.errors import RunError
from stackexp.frame import Row, get_options

GENERATED_DATA = ("formal_language", "arithmetic")
"""The kinds of data that the config alone determines."""


class DataRecord(NamedTuple):
    """The training data of a run: options of a generated dataset, {key: value}, or hashes of batches, {step: hash}."""

    is_generated: bool
    values: dict[Any, Any]


def read_data_record(row: Row) -> DataRecord:
    """Return the record of a run's training data; empty if it has none. Raises RunError for damage."""
    if row.get("data.kind") in GENERATED_DATA:
        return DataRecord(True, {"data.task": row.get("data.task"), "seed": row.get("seed")} | select_data_options(row))
    path = Path(row["path"])
    try:
        return DataRecord(False, hash_log.read_hashes(path))
    except (KeyError, TypeError) as error:
        raise RunError(f"{path / hash_log.FILE_NAME}: a line has no {error}; delete the line") from None


def compare_data(ours: DataRecord, theirs: DataRecord) -> tuple[str, str]:
    """Return how two runs' training data differ, and why they were not compared; empty strings if neither applies."""
    if not ours.values or not theirs.values:
        return "", f"no training data recorded in {hash_log.FILE_NAME}"
    if ours.is_generated != theirs.is_generated:
        return "text is not generated data", ""
    if ours.is_generated:
        keys = [*dict.fromkeys([*ours.values, *theirs.values])]
    else:
        keys = sorted(ours.values.keys() & theirs.values.keys())
    for key in keys:
        if (mine := ours.values.get(key)) != (other := theirs.values.get(key)):
            return (f"{key} is {mine}, not {other}" if ours.is_generated else f"they differ at step {key}"), ""
    return "", "" if keys else "they share no recorded step"


def check_same_data(rows: Iterable[Row]) -> list[str]:
    """Raise RunError if two runs were trained on different data, and return notes about runs that were not compared.

    Runs on tokens are compared by the hashes that they recorded of their batches. Formal languages and arithmetic are
    generated from the config, so those runs are compared by the options of the dataset.
    """
    notes: list[str] = []
    records: dict[str, DataRecord] = {}
    seeds: dict[str, Any] = {}
    for row in rows:
        path, record = row["path"], read_data_record(row)
        if not record.values:
            notes.append(f"{path}: its training data are not compared; none recorded yet in {hash_log.FILE_NAME}")
            continue
        for other, theirs in records.items():
            difference, unknown = compare_data(record, theirs)
            if difference:
                has_seeds = seeds[other] != row.get("seed") and row.get("data.kind") not in GENERATED_DATA
                hint = "average seeds with `report ablation`, or " if has_seeds else ""
                raise RunError(
                    f"{path}: trained on other data than {other} ({difference}); {hint}compare them anyway with "
                    "--different-data"
                )
            if unknown:
                notes.append(f"{path}: its training data are not compared with {other}; {unknown}")
        records[path], seeds[path] = record, row.get("seed")
    return notes


def explain_other_data(base: Row, row: Row) -> str:
    """Return why the training data of two runs differ or were not compared, or an empty string."""
    difference, unknown = compare_data(read_data_record(row), read_data_record(base))
    return f"trained on other data ({difference})" if difference else unknown


def select_data_options(row: Row) -> dict[str, Any]:
    """Return the options of a run that determine its training data, except the seed."""
    options = select_options(get_options(row), ["training"])
    return {key: value for key, value in options.items() if key.startswith("data.")}
