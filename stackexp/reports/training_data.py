"""Were two runs trained on the same data? Tokens are compared by hashes of their batches, generated data by options.

`open_pairs` also compares devices and evaluation sets.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stackexp.config.affects import select_options
from stackexp.data import hash_log
from stackexp.errors import RunError
from stackexp.frame import Row, get_options
from stackexp.runs import RunFolder
from stackexp.sweeps.verdict import PairPlan, Question, QuestionStage

GENERATED_DATA = ("formal_language", "arithmetic")
"""The kinds of data that the config alone determines."""
MACHINE = (("cpu", "model"), ("versions", "torch"))
"""What should be equal in a pair, apart from the GPU, which must be."""


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


# Pairs of a verdict


def open_pairs(verdict: Question, plan: PairPlan) -> tuple[QuestionStage, list[str]]:
    """Return the stage of the pairs, and notes on pairs with unknown data, or with different CPUs or versions of torch.

    Raises RunError if the two runs of a pair had other data or another device, or were scored on other data.
    """
    verdict.check_plugins()
    stage, uncompared, others = verdict.build_pairs(plan), 0, 0
    for (arm, _, seed), trial in stage.trials.items():
        pair = trial.folder, stage.trials[plan.baseline, 0, seed].folder
        if arm == plan.baseline or not all(folder.is_finished for folder in pair):
            continue
        difference = unknown = ""
        if trial.config.data.kind not in GENERATED_DATA:  # the config determines these, and arms may differ in them
            difference, unknown = compare_data(*(hash_log.read_hashes(folder.path) for folder in pair))
        uncompared += bool(unknown)
        ours, base = (folder.read_sessions() or [{}] for folder in pair)
        others += any(_list_values(ours, key, n) != _list_values(base, key, n) for key, n in MACHINE)
        if trial.config.trainer.accelerator != "cpu":
            devices = [{", ".join(session.get("gpus") or ["a CPU"]) for session in run} for run in (ours, base)]
            if devices[0] != devices[1]:
                difference = ", not ".join(" and then ".join(sorted(names)) for names in devices)
        difference = difference or _compare_sets(*pair)
        if difference:
            raise RunError(
                f"{pair[0].path}: had other data or another device than {pair[1].path} ({difference}), so they are no "
                "pair; remove one of them and repeat the command"
            )
    missing = f"{hash_log.FILE_NAME} is missing or has no common step"
    notes = {
        f"{uncompared} pairs: training data not compared; {missing}": uncompared,
        f"{others} pairs: the two runs had different CPUs or versions of torch": others,
    }
    return stage, [note for note, count in notes.items() if count]


def _list_values(sessions: list[dict[str, Any]], key: str, name: str) -> set[Any]:
    """Return the values of a property of the machine in all sessions of a run."""
    return {session.get(key, {}).get(name) for session in sessions}


def _compare_sets(ours: RunFolder, base: RunFolder) -> str:
    """Return in words how the evaluation sets of two runs differ in scored tokens or bytes; empty if they do not."""
    sets = [folder.read_result().figures.get("sets") or {} for folder in (ours, base)]
    for name in sorted(sets[0].keys() | sets[1].keys()):
        if not all(name in scores for scores in sets):
            return f"only one of them is scored on {name}"
        for unit in ("tokens", "bytes"):
            counts = [scores[name].get(unit) for scores in sets]
            if None not in counts and counts[0] != counts[1]:  # None: of an earlier version
                return f"scored on {counts[0]} {unit} of {name}, not {counts[1]}"
    return ""
