"""Arms: the language-model runs of a name that differ only in their seed. Paired differences between two of them.

Differences have 95 % intervals, over runs that were trained on the same data.
"""

import functools
import json
import math
import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stackexp.config.affects import find_changed_keys, get_value
from stackexp.config.compose import load_config
from stackexp.config.layers import list_shipped
from stackexp.errors import ConfigError, RunError
from stackexp.evaluation.scores import read_chunk_losses
from stackexp.frame import OLMO_GROUPS, Row, get_options, get_scores, read_rows, read_start
from stackexp.modules.scores import (
    Noise,
    SamplingError,
    average_errors,
    average_scores,
    estimate_sampling_error,
    split_noise,
)
from stackexp.reports.training_data import GENERATED_DATA, explain_other_data, select_data_options
from stackexp.runs import RunFolder
from stackexp.sweeps.schema import format_value
from stackexp.sweeps.sweep import COPY, STEPS
from stackexp.sweeps.verdict import PLAN
from stackexp.tables import ABSENT

MAX_NAMED_OPTIONS = 3  # in the name of an arm
CHOICES = {
    **{"Transformer": "transformer", "StackTrans": "stacktrans", "Queue": "queue", "Push-Only": "push_only"},
    **{"Single-Head": "single_head", "Full-Dimension": "full_dim"},
}
"""The variants in the paper's ablation -> names of the trials of the shipped sweep."""
PAPER_STACK = {
    **{"axis": "depth", "discipline": "stack", "projection": "low_rank", "read": "global", "read_mask": "multiply"},
    **{"push_norm": "none", "action_input": "head", "action_bias": None, "site": "after_block", "feedback": False},
    **{"residual_gate": "hidden", "empty_slot": False, "action_scale": "none", "action_sharpness": 1.0},
    "action_noise": 0.0,
}
"""Options of the paper's stack, in the language-model setting. Its sizes and the entropy weight are free."""
LOCATIONS = ("data.path", "data.remote")
"""Options that locate a corpus. Two paths may lead to the same corpus."""
SIZES = ("model.hidden_size", "model.intermediate_size", "model.num_heads", "model.num_kv_heads", "model.num_layers")
TRAINING, OTHER = "training loss", "average"
COLUMNS = (TRAINING, "V2", "V3", OTHER)
Losses = dict[str, tuple[float, float | None]]
"""Column -> (loss, perplexity)."""
Arms = dict[str, list[Row]]
"""Name of an arm -> its runs, the finished ones first."""


def load_arms(paths: Sequence[Path], with_generated_data: bool = False) -> tuple[Arms, list[str]]:
    """Return the arms of all language-model runs at or below `paths`, sorted, and notes on damaged or unfinished ones.

    `with_generated_data` includes runs on formal languages and arithmetic. Of several finished runs with the same seed,
    the one that began last counts. Raises RunError without runs.
    """
    rows = read_rows(paths)
    rows = [row for row in rows if with_generated_data or row.get("data.kind") not in GENERATED_DATA]
    damaged = [row["problem"] for row in rows if row["state"] == "damaged"]
    notes = [f"{count_runs(len(damaged))} skipped: {'; '.join(damaged)}"] if damaged else []
    groups: dict[str, list[list[Row]]] = defaultdict(list)
    for row in rows:
        if row["state"] != "damaged":
            same = next((group for group in groups[row["arm"]] if not find_differences(group[0], row)), None)
            groups[row["arm"]].append([row]) if same is None else same.append(row)
    arms: Arms = {}
    replaced: list[Row] = []
    for label, members in sorted(groups.items()):
        for name, group in zip(_separate_names(label, members), members, strict=True):
            group.sort(key=read_start)
            latest = {row["seed"]: row for row in group if is_finished(row)}
            replaced += [row for row in group if is_finished(row) and row is not latest[row["seed"]]]
            arms[name] = [*latest.values(), *(row for row in reversed(group) if not is_finished(row))]
            if len(corpora := {str(row.get(key)) for row in group for key in LOCATIONS if row.get(key)}) > 1:
                notes.append(
                    f"{name}: runs on {', '.join(sorted(corpora))}; their mean mixes corpora unless these hold the same"
                )
    if not arms:
        found = "; ".join(notes) or "no run folders of language models"
        raise RunError(f"{', '.join(map(str, paths))}: {found}; give run folders or folders of them")
    notes += list_paths("left out, a later run has the same seed", replaced)
    unfinished = "unfinished, `python -m stackexp fit --run RUN` resumes one"
    for state, reason in (("running", "running now"), ("unfinished", unfinished)):
        notes += list_paths(reason, [row for row in rows if row["state"] == state])
    return arms, notes


def is_finished(row: Row) -> bool:
    """Return True for a run with a result."""
    return row["state"] == "finished"


def select_finished(rows: Iterable[Row]) -> list[Row]:
    """Return the runs with a result."""
    return [row for row in rows if is_finished(row)]


def find_differences(ours: Row, theirs: Row) -> list[str]:
    """Return the options in which the trainings of two runs differ, except the seed.

    An option that did not exist when a run began has its default value.
    """
    changed = find_changed_keys(get_options(ours), get_options(theirs), ["training", "continuation"])
    return [key for key in changed if key != "seed"]


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
        values = [{key: format_value(get_value(get_options(row), every, key)) for key in keys} for row in first]
        details = [", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in v.items()) for v in values]
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
    changes = find_stack_changes(options)
    if options.get("model.memory.num_heads") == 1:
        return None if changes else "Single-Head"
    if changes == {"discipline": "push_only"} and options.get("model.memory.num_slots") == 1:
        return None  # the adapter: a stack without its memory
    known: dict[str, Any] = {"StackTrans": {}, "Full-Dimension": {"projection": "none"}}
    known |= {"Queue": {"discipline": "queue"}, "Push-Only": {"discipline": "push_only"}}
    return next((variant for variant, expected in known.items() if changes == expected), None)


def find_stack_changes(options: Row) -> dict[str, Any]:
    """Return the options in which a stack differs from the paper's, with their values."""
    values = {key: options.get(f"model.memory.{key}", default) for key, default in PAPER_STACK.items()}
    return {key: value for key, value in values.items() if value != PAPER_STACK[key]}


# Losses of a run


def read_losses(row: Row) -> Losses:
    """Return the losses of a run: in training, on V2, on V3, and the average of the other sets."""
    loss = row.get("train_loss", math.nan)
    return ({TRAINING: (loss, None)} if math.isfinite(loss) else {}) | average_sets(get_scores(row))


def choose_column(measure: str | None, losses: Sequence[Mapping[str, Any]]) -> str:
    """Return `measure`, or the first of V2, the average and the training loss that all `losses` have."""
    columns = [measure] if measure else ["V2", OTHER, TRAINING]
    return next((column for column in columns if all(column in loss for loss in losses)), columns[-1])


def average_sets(sets: dict[str, dict[str, float]]) -> Losses:
    """Return the averages over V2, over V3 and over the other sets.

    Groups without sets are omitted, and so are those with a set without a loss: the run has diverged.
    """
    columns: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for name, scores in sets.items():
        columns[_find_column(name)][name] = scores
    complete = {c: members for c, members in columns.items() if all("loss" in scores for scores in members.values())}
    averages = {column: average_scores(members) for column, members in complete.items()}
    return {column: (scores["loss"], scores.get("perplexity")) for column, scores in averages.items()}


def list_sets(row: Row, column: str) -> frozenset[tuple[str, float | None]]:
    """Return the name and the scored tokens of each set that a column averages; none for the training loss.

    The tokens differ if only a part of a set was scored, or another file with its name; None in earlier versions.
    """
    return frozenset((name, s.get("tokens")) for name, s in get_scores(row).items() if _find_column(name) == column)


def _find_column(name: str) -> str:
    """Return the column that averages a set."""
    return name.partition("/")[0].upper() if name.startswith(OLMO_GROUPS) else OTHER


def compute_flops(row: Row) -> float | None:
    """Return the training FLOPs per token of a run; None if its config is invalid here, such as without its plugins."""
    config = RunFolder(Path(row["path"])).config
    return _compute_flops(config, config.stat().st_mtime_ns)


@functools.cache
def _compute_flops(config: Path, time: int) -> float | None:
    from stackexp.planning.cost import make_plan

    try:
        return make_plan(load_config(config)).flops_per_token
    except (ConfigError, RunError):
        return None


def group_bigrams(runs: Iterable[tuple[str, Row]]) -> list[tuple[str, list[Row]]]:
    """Group the runs (name, row) that have scores of bigram counts by their data and number of tokens.

    Returns the label and the rows of each group, one row per seed.
    """
    groups: dict[str, tuple[str, dict[int, Row]]] = {}
    for name, row in runs:
        if any(key.startswith("bigrams/") for key in row):
            data = json.dumps([row.get("tokens"), select_data_options(row)], sort_keys=True, default=str)
            groups.setdefault(data, (name, {}))[1][row["seed"]] = row
    return [
        ("bigram counts" + f" (data of {name})" * (len(groups) > 1), list(rows.values()))
        for name, rows in groups.values()
    ]


# Differences


class Difference(NamedTuple):
    """The mean of paired differences over `seeds` seeds, with its 95 % interval if there is one.

    `degrees` is the smallest number of degrees of freedom in the interval: of the seeds or of the chunks.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int
    degrees: float = 0

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:+z.3f}"
        interval = f"{self.low:+z.3f} to {self.high:+z.3f}"
        text = f"{self.mean:+z.3f} " + (f"({interval})" if self.seeds > 1 else f"[{interval}]")
        is_clear = self.seeds > 1 and (self.low > 0 or self.high < 0)
        return f"**{text}**" if is_clear else text


def compute_difference(values: Sequence[float], chunks: SamplingError | None = None) -> Difference:
    """Return the mean of the differences of seeds with its interval.

    With several seeds it is Student's t interval, widened by that of the chunks if known: the two sources of error are
    independent, so their squares add. With one seed it is the interval over chunks.
    """
    mean, seeds = statistics.fmean(values), len(values)
    errors = [SamplingError(statistics.stdev(values) / math.sqrt(seeds), seeds - 1)] if seeds > 1 else []
    errors += [chunks] if chunks else []
    if not errors:
        return Difference(mean, None, None, seeds)
    margin = math.hypot(*(error.margin for error in errors))
    return Difference(mean, mean - margin, mean + margin, seeds, min(error.degrees for error in errors))


@dataclass(frozen=True)
class ArmComparison:
    """An arm against the baseline: the pairs of finished runs with the same seed, data and number of tokens.

    `mismatches` are (reason, arm, seed) of runs that are not paired, or whose difference has other causes, too.
    """

    arm: str
    pairs: list[tuple[Row, Row]]
    sizes: list[str] = field(default_factory=list)
    mismatches: list[tuple[str, str, int]] = field(default_factory=list)

    @cached_property
    def values(self) -> dict[str, list[float]]:
        """The difference of every pair in each column that all pairs have, averaged over the same sets."""
        losses = [(read_losses(run), read_losses(base)) for run, base in self.pairs]
        sets = {c: {list_sets(run, c) for pair in self.pairs for run in pair} for c in COLUMNS}
        columns = [c for c in COLUMNS if len(sets[c]) == 1 and all(c in x and c in y for x, y in losses)]
        return {c: [ours[c][0] - base[c][0] for ours, base in losses] for c in columns}

    @cached_property
    def differences(self) -> dict[str, Difference]:
        """The mean difference in each of these columns."""
        return {c: compute_difference(values, self._estimate_chunk_error(c)) for c, values in self.values.items()}

    @cached_property
    def noise(self) -> dict[str, Noise]:
        """The seed noise and the chunk noise of each column with two pairs or more and enough chunks."""
        columns = list(self.differences) if len(self.pairs) > 1 else []
        noise = {column: split_noise(sets) for column in columns if (sets := self._read_chunks(column))}
        return {column: parts for column, parts in noise.items() if parts is not None}

    def _read_chunks(self, column: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the paired differences of the chunk losses [S, N] and the numbers of predictions [N] of each set.

        Empty if chunk losses are missing, or if a set was cut into other chunks for other runs.
        """
        sets, runs = [], [run for pair in self.pairs for run in pair]
        for name in sorted(name for name, _ in list_sets(runs[0], column)):
            chunks = [read_chunk_losses(Path(run["path"]), name, run[f"val/{name}/loss"]) for run in runs]
            known = [losses for losses in chunks if losses is not None]
            if len(known) < len(chunks) or not all(np.array_equal(losses[1], known[0][1]) for losses in known):
                return []
            sets.append(
                (np.array([ours[0] - base[0] for ours, base in zip(known[::2], known[1::2], strict=True)]), known[0][1])
            )
        return sets

    def _estimate_chunk_error(self, column: str) -> SamplingError | None:
        """Return the error of a column's difference from sampling chunks; None if unknown, or too few chunks.

        The chunks are the same for every seed, so their differences are averaged over the seeds.
        """
        errors = [estimate_sampling_error(d.mean(0), counts) for d, counts in self._read_chunks(column)]
        known = [error for error in errors if error is not None]
        return average_errors(known) if known and len(known) == len(errors) else None


def compare_arms(arm: str, rows: Sequence[Row], base: str, base_rows: Sequence[Row]) -> ArmComparison:
    """Pair the finished runs of two arms by seed."""
    runs, bases = select_finished(rows), {row["seed"]: row for row in select_finished(base_rows)}
    pairs, mismatches = [], []
    for run in runs:
        other = bases.get(run["seed"])
        if other is None:
            reason = "the baseline has no finished run with this seed"
        elif run.get("tokens") != other.get("tokens"):
            reason = f"trained on {run.get('tokens')} tokens, the baseline on {other.get('tokens')}"
        else:
            reason = explain_other_data(other, run)
        if other is None or reason:
            mismatches.append((f"not paired with {base}: {reason}", arm, run["seed"]))
            continue
        pairs.append((run, other))
        others = [c for c in COLUMNS if list_sets(run, c) != list_sets(other, c)]
        if others:
            reason = (
                f"scored on other sets, or other parts of them, than {base}: not compared in {' and '.join(others)}"
            )
            mismatches.append((reason, arm, run["seed"]))
        ours, theirs = run.get("platform"), other.get("platform")
        if ours and theirs and ours != theirs:
            reason = "started on another device or torch version than the baseline, rounding and weights may differ"
            mismatches.append((f"{reason}: on {ours}, {base} on {theirs}", arm, run["seed"]))
    options = _find_other_options(get_options(runs[0]), get_options(base_rows[0])) if pairs else []
    if options:
        text = f"with other options than {base} apart from memory and size: {', '.join(options)}"
        mismatches += [(text, arm, run["seed"]) for run, _ in pairs]
    return ArmComparison(arm, pairs, _compare_sizes(runs, list(bases.values())), mismatches)


def _compare_sizes(runs: list[Row], bases: list[Row]) -> list[str]:
    """Return the relative mismatch in parameters and in training FLOPs per token, as far as both are known."""
    if not runs or not bases:
        return [ABSENT] * 2
    sizes = [(row.get("parameters"), compute_flops(row)) for row in (runs[0], bases[0])]
    return [f"{a / b - 1:+z.1%}" if a and b else ABSENT for a, b in zip(*sizes, strict=True)]


def _find_other_options(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return the options, as key=value, that differ from the baseline, except sizes and memory options."""
    changed = find_changed_keys(theirs, ours, ["training", "continuation"])
    known = ("seed", STEPS, *SIZES)  # runs with other numbers of tokens are no pair
    others = [key for key in changed if key not in known and not key.startswith("model.memory")]
    return [f"{key}={format_value(get_value(ours, theirs, key))}" for key in others]


# Notes


def count_runs(count: int) -> str:
    """Return a number of runs, such as 1 run or 2 runs."""
    return f"{count} run{'s' * (count != 1)}"


def list_paths(reason: str, rows: Sequence[Row]) -> list[str]:
    """Return one note with the number and the paths of these runs; an empty list without runs."""
    return [f"{count_runs(len(rows))} {reason}: {', '.join(row['path'] for row in rows)}"] if rows else []


def list_seeds(reasons: Iterable[tuple[str, str, int]]) -> list[str]:
    """Return a note for each reason, which counts and names its runs, given as (reason, arm, seed).

    Reasons that differ only after their first colon share a note.
    """
    groups: dict[str, dict[str, dict[str, list[int]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for text, arm, seed in reasons:
        reason, _, detail = text.partition(": ")
        groups[reason][detail][arm].append(seed)
    notes = []
    for reason, details in groups.items():
        parts = []
        for detail, arms in details.items():
            names = (f"{arm} (seed{'s' * (len(s) > 1)} {', '.join(map(str, sorted(s)))})" for arm, s in arms.items())
            parts.append((f"{detail}: " if detail else "") + ", ".join(names))
        count = sum(len(seeds) for arms in details.values() for seeds in arms.values())
        notes.append(f"{count_runs(count)} {reason}: {'; '.join(parts)}")
    return notes


def describe_noise(comparisons: Sequence[ArmComparison]) -> list[str]:
    """Return a note for each column with the median noise of one pair over the arms."""
    notes = []
    for column in COLUMNS:
        noise = [comparison.noise[column] for comparison in comparisons if column in comparison.noise]
        if noise:
            seed, chunk, needed = (
                statistics.median(getattr(arm, key) for arm in noise) for key in ("seed", "chunk", "chunks_needed")
            )
            share = f", a third of it at {needed:,.0f} chunks" if math.isfinite(needed) else ""
            notes.append(
                f"Noise of one pair in {column}, standard deviation, median of {len(noise)} arms: seeds {seed:.4f}, "
                f"chunks {chunk:.4f} ({noise[0].num_chunks:,} chunks){share}."
            )
    return notes


def describe_sweep(paths: Sequence[Path], default: str) -> str:
    """Return the command that fills a report: of the sweep that the runs belong to, or of the shipped sweep `default`.

    Runs belong to the sweep in their folder or in the folder above, or to the shipped sweep with the name of
    their folder.
    """
    for folder in (folder for path in paths for folder in (path, path.parent, path.parent.parent)):
        if (folder / PLAN).is_file():
            return (
                f"Runs of the verdict {folder}, whose arms may have stopped when they were decided; its command, with "
                "--report, allows for this; the intervals here do not"
            )
    for folder in (folder for path in paths for folder in (path, path.parent)):
        if folder.name in list_shipped("sweep"):
            return f"Filled by `python -m stackexp sweep run {folder.name}`"
        if (folder / COPY).is_file():
            return f"Filled by `python -m stackexp sweep run {shlex.quote(str(folder))}`"
    return f"Filled by `python -m stackexp sweep run {default}`"
