"""Arms: the language-model runs of a name that differ only in their seed, and the paper's variants."""

import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stackexp.config.affects import find_changed_keys, get_value
from stackexp.errors import RunError
from stackexp.frame import Row, get_options, list_rows, load_runs
from stackexp.sweeps import list_shipped
from stackexp.sweeps.sweep import COPY

GENERATED_DATA = ("formal_language", "arithmetic")
"""The kinds of data that the config alone determines."""
MAX_NAMED_OPTIONS = 3  # in the name of an arm
CHOICES = {
    **{"Transformer": "transformer", "StackTrans": "stacktrans", "Queue": "queue", "Push-Only": "push_only"},
    **{"Single-Head": "single_head", "Full-Dimension": "full_dim"},
}
"""The variants in the paper's ablation -> names of the trials of the shipped sweep."""
PAPER_STACK = {
    **{"axis": "depth", "discipline": "stack", "projection": "low_rank", "read": "global", "read_mask": "multiply"},
    **{"push_norm": "none", "action_input": "head", "action_bias": None, "site": "after_block", "feedback": False},
    "residual_gate": "hidden",
}
Arms = dict[str, list[Row]]
"""Name of an arm -> its runs, the finished ones first."""


def load_arms(paths: Sequence[Path], with_generated_data: bool = False) -> tuple[Arms, list[str]]:
    """Return the arms of all language-model runs at or below `paths`, sorted, and notes about the runs left out.

    `with_generated_data` includes runs on formal languages and arithmetic. Of several finished runs with the same seed,
    the last one counts, sorted by path. Raises RunError if there are no runs.
    """
    rows = list_rows(load_runs(paths))
    rows = [row for row in rows if with_generated_data or row.get("data.kind") not in GENERATED_DATA]
    notes = [f"skipped: {row['problem']}" for row in rows if row["state"] == "damaged"]
    groups: dict[str, list[list[Row]]] = defaultdict(list)
    for row in rows:
        if row["state"] != "damaged":
            same = next((group for group in groups[row["arm"]] if not find_differences(group[0], row)), None)
            groups[row["arm"]].append([row]) if same is None else same.append(row)
    arms: Arms = {}
    replaced: list[Row] = []
    for label, members in sorted(groups.items()):
        for name, group in zip(_separate_names(label, members), members, strict=True):
            latest = {row["seed"]: row for row in group if is_finished(row)}
            replaced += [row for row in group if is_finished(row) and row is not latest[row["seed"]]]
            arms[name] = [*latest.values(), *(row for row in group if not is_finished(row))]
    if not arms:
        found = "; ".join(notes) or "no run folders of language models"
        raise RunError(f"{', '.join(map(str, paths))}: {found}; give run folders or folders of them")
    return arms, [*notes, *list_paths("left out, a later run has the same seed", replaced)]


def is_finished(row: Row) -> bool:
    """Return True for a run with a result."""
    return row["state"] == "finished"


def select_finished(rows: Iterable[Row]) -> list[Row]:
    """Return the runs with a result."""
    return [row for row in rows if is_finished(row)]


def find_differences(ours: Row, theirs: Row) -> list[str]:
    """Return the keys in which two runs differ: options of the training, except the seed, and its length.

    An option that did not exist when a run began has its default value.
    """
    ours, theirs = get_options(ours), get_options(theirs)
    length = ["trainer.max_steps"] if ours.get("trainer.max_steps") != theirs.get("trainer.max_steps") else []
    return [key for key in find_changed_keys(ours, theirs, ["training"]) if key != "seed"] + length


def _separate_names(label: str, groups: list[list[Row]]) -> list[str]:
    """Return a name for each arm with this label: with the options in which they differ, or the folder of a run."""
    if len(groups) == 1:
        return [label]
    first = [group[0] for group in groups]
    keys = list(dict.fromkeys(key for row in first for key in find_differences(first[0], row)))
    every = {key: value for row in first for key, value in get_options(row).items()}
    folders = [Path(row["path"]).name for row in first]
    details = folders if len(set(folders)) == len(folders) else [row["path"] for row in first]
    if len(keys) <= MAX_NAMED_OPTIONS:
        details = [
            ", ".join(f"{key.rpartition('.')[2]}={get_value(get_options(row), every, key)}" for key in keys)
            for row in first
        ]
    return [f"{label} ({detail})" for detail in details]


def average(rows: Iterable[Row], key: str) -> float | None:
    """Return the mean of a column over the finished runs that have it."""
    values = [row[key] for row in select_finished(rows) if key in row]
    return statistics.fmean(values) if values else None


def find_arm(arms: Arms, name: str) -> str:
    """Return the name. Raises RunError with the known names if no arm has it."""
    if name not in arms:
        raise RunError(f"no run named {name}; choose among {', '.join(arms)}")
    return name


def rank_arm(arms: Arms, name: str) -> tuple[bool, bool, float, float]:
    """Return a sort key: arms with finished runs first, then a variant's name, many tokens and few parameters."""
    rows = arms[name]
    size = average(rows, "parameters") or 0
    return not select_finished(rows), name not in CHOICES.values(), -(average(rows, "tokens") or 0), size


def find_baseline(arms: Arms, name: str | None, variant: str = "Transformer") -> str | None:
    """Return the named arm, or the first of a variant by `rank_arm`. None if there is no such variant."""
    if name is not None:
        return find_arm(arms, name)
    found = [arm for arm, rows in arms.items() if find_variant(rows[0]) == variant]
    return min(found, key=lambda arm: rank_arm(arms, arm), default=None)


def find_variant(options: Row) -> str | None:
    """Return the paper's variant that a model is, or None."""
    kind = options.get("model.memory.kind")
    if options.get("model.kind") != "transformer" or kind not in (None, "stack"):
        return None
    if kind is None:
        return "Transformer"
    values = {key: options.get(f"model.memory.{key}", default) for key, default in PAPER_STACK.items()}
    changes = {key: value for key, value in values.items() if value != PAPER_STACK[key]}
    if options.get("model.memory.num_heads") == 1:
        return None if changes else "Single-Head"
    known: dict[str, Any] = {"StackTrans": {}, "Full-Dimension": {"projection": "none"}}
    known |= {"Queue": {"discipline": "queue"}, "Push-Only": {"discipline": "push_only"}}
    return next((variant for variant, expected in known.items() if changes == expected), None)


# Notes


def list_paths(reason: str, rows: Sequence[Row]) -> list[str]:
    """Return one note with the paths of these runs; an empty list without runs."""
    return [f"{reason}: {', '.join(row['path'] for row in rows)}"] if rows else []


def list_seeds(reasons: Iterable[tuple[str, str, int]]) -> list[str]:
    """Return a note for each reason, which counts and names its runs, given as (reason, arm, seed)."""
    groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for reason, arm, seed in reasons:
        groups[reason][arm].append(seed)
    notes = []
    for reason, arms in groups.items():
        names = (f"{arm} (seed{'s' * (len(s) > 1)} {', '.join(map(str, sorted(s)))})" for arm, s in arms.items())
        count = sum(map(len, arms.values()))
        notes.append(f"{reason}, {count} run{'s' * (count > 1)}: {', '.join(names)}")
    return notes


def describe_unfinished(rows: Iterable[Row]) -> list[str]:
    """Return a note with the running runs, and one with the others that are not finished and how to resume them."""
    rows = list(rows)
    resume = "unfinished, `python -m stackexp fit --run RUN` resumes one"
    return [
        *list_paths("running now", [row for row in rows if row["state"] == "running"]),
        *list_paths(resume, [row for row in rows if row["state"] == "unfinished"]),
    ]


def describe_sweep(paths: Sequence[Path], default: str) -> str:
    """Return the command that fills a report: of the sweep that the runs belong to, or of the shipped sweep `default`.

    Runs belong to the sweep in their folder or in the folder above, or to the shipped sweep with the name of
    their folder.
    """
    for folder in (folder for path in paths for folder in (path, path.parent)):
        if folder.name in list_shipped():
            return f"Filled by `python -m stackexp sweep run {folder.name}`"
        if (folder / COPY).is_file():
            return f"Filled by `python -m stackexp sweep run {shlex.quote(str(folder))}`"
    return f"Filled by `python -m stackexp sweep run {default}`"
