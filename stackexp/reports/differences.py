"""Paired differences between the runs of two arms, with 95 % intervals, and a check that their data were the same."""

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stackexp.config.affects import find_changed_keys, get_value, select_options
from stackexp.config.compose import load_config
from stackexp.data import hash_log
from stackexp.errors import ConfigError, RunError
from stackexp.evaluation.scores import read_chunk_losses
from stackexp.frame import OLMO_GROUPS, Row, get_options, get_scores
from stackexp.modules.scores import average_groups, average_scores, bootstrap_interval, get_t_quantile
from stackexp.reports.arms import GENERATED_DATA, select_finished
from stackexp.runs import RunFolder
from stackexp.tables import ABSENT

SIZES = ("model.hidden_size", "model.intermediate_size", "model.num_heads", "model.num_kv_heads", "model.num_layers")
TRAINING, OTHER = "training loss", "average"
COLUMNS = (TRAINING, "V2", "V3", OTHER)
Losses = dict[str, tuple[float, float | None]]
"""Column -> (loss, perplexity)."""


# Losses of a run


def read_losses(row: Row) -> Losses:
    """Return the losses of a run: in training, on V2, on V3, and the average of the other sets."""
    loss = row.get("train_loss", math.nan)
    return ({TRAINING: (loss, None)} if math.isfinite(loss) else {}) | average_sets(get_scores(row))


def average_sets(sets: dict[str, dict[str, float]]) -> Losses:
    """Return the averages over V2, over V3 and over the other sets; groups without sets are omitted."""
    groups = average_groups({name: s for name, s in sets.items() if name.startswith(OLMO_GROUPS)})
    averages = {group.upper(): scores for group, scores in groups.items()}
    if others := {name: s for name, s in sets.items() if not name.startswith(OLMO_GROUPS)}:
        averages[OTHER] = average_scores(others)
    return {column: (scores["loss"], scores.get("perplexity")) for column, scores in averages.items()}


def name_sets(row: Row, column: str) -> frozenset[str]:
    """Return the names of the sets that a column averages; none for the training loss."""
    groups = {name: name.partition("/")[0].upper() for name in get_scores(row)}
    return frozenset(name for name, g in groups.items() if (g if g in ("V2", "V3") else OTHER) == column)


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


# Differences


class Difference(NamedTuple):
    """The mean of paired differences over `seeds` seeds, with its 95 % interval if there is one."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    @property
    def is_clear(self) -> bool:
        """Return True if an interval over seeds excludes zero."""
        return self.seeds > 1 and self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.mean:+z.3f}"
        interval = f"{self.low:+z.3f} to {self.high:+z.3f}"
        text = f"{self.mean:+z.3f} " + (f"({interval})" if self.seeds > 1 else f"[{interval}]")
        return f"**{text}**" if self.is_clear else text


def compute_difference(values: Sequence[float], chunk_margin: float | None = None) -> Difference:
    """Return the mean of the differences of seeds with its interval.

    With several seeds it is Student's t interval, widened by `chunk_margin` if known: the two sources of error are
    independent, so their squares add. With one seed it is the interval over chunks.
    """
    mean, seeds = statistics.fmean(values), len(values)
    if seeds < 2:
        if chunk_margin is None:
            return Difference(mean, None, None, seeds)
        return Difference(mean, mean - chunk_margin, mean + chunk_margin, seeds)
    margin = math.hypot(get_t_quantile(seeds - 1) * statistics.stdev(values) / math.sqrt(seeds), chunk_margin or 0.0)
    return Difference(mean, mean - margin, mean + margin, seeds)


@dataclass(frozen=True)
class Comparison:
    """An arm against the baseline: the pairs of finished runs with the same seed, data and number of tokens.

    `mismatches` are (reason, arm, seed) of runs that are not paired, or whose difference has other causes, too.
    """

    arm: str
    pairs: list[tuple[Row, Row]]
    sizes: list[str]
    mismatches: list[tuple[str, str, int]]

    @cached_property
    def differences(self) -> dict[str, Difference]:
        """The difference in each column that all pairs have, averaged over the same sets."""
        losses = [(read_losses(run), read_losses(base)) for run, base in self.pairs]
        sets = {c: {name_sets(run, c) for pair in self.pairs for run in pair} for c in COLUMNS}
        columns = [c for c in COLUMNS if len(sets[c]) == 1 and all(c in x and c in y for x, y in losses)]
        return {
            c: compute_difference([ours[c][0] - base[c][0] for ours, base in losses], self._compute_margin(c))
            for c in columns
        }

    def _compute_margin(self, column: str) -> float | None:
        """Return half the 95 % interval over chunks of a column's difference; None if chunk losses are missing.

        They are also missing for a set with one chunk, and for sets that were cut into other chunks for other runs.
        The chunks are the same for every seed, so the differences are averaged over the seeds before resampling.
        """
        margins = []
        for name in sorted(name_sets(self.pairs[0][0], column)):
            runs = [run for pair in self.pairs for run in pair]
            chunks = [read_chunk_losses(Path(run["path"]), name, run[f"val/{name}/loss"]) for run in runs]
            known = [losses for losses in chunks if losses is not None]
            if len(known) < len(chunks):
                return None
            counts = known[0][1]
            if len(counts) < 2 or not all(np.array_equal(losses[1], counts) for losses in known):
                return None
            differences = [ours[0] - base[0] for ours, base in zip(known[::2], known[1::2], strict=True)]
            low, high = bootstrap_interval(np.mean(differences, 0), counts)
            margins.append((high - low) / 2)
        return math.hypot(*margins) / len(margins) if margins else None


def compare_arms(arm: str, rows: Sequence[Row], base: str, base_rows: Sequence[Row]) -> Comparison:
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
        ours, theirs = run.get("platform"), other.get("platform")
        if ours and theirs and ours != theirs:
            reason = f"rounding differs, and perhaps the initial weights: started on {ours}, {base} on {theirs}"
            mismatches.append((reason, arm, run["seed"]))
    options = _find_other_options(get_options(runs[0]), get_options(base_rows[0])) if pairs else []
    if options:
        text = f"apart from memory and size, differs from {base} in {', '.join(options)}"
        mismatches += [(text, arm, run["seed"]) for run, _ in pairs]
    return Comparison(arm, pairs, _compare_sizes(runs, list(bases.values())), mismatches)


def _compare_sizes(runs: list[Row], bases: list[Row]) -> list[str]:
    """Return the relative mismatch in parameters and in training FLOPs per token, as far as both are known."""
    if not runs or not bases:
        return [ABSENT] * 2
    sizes = [(row.get("parameters"), compute_flops(row)) for row in (runs[0], bases[0])]
    return [f"{a / b - 1:+z.1%}" if a and b else ABSENT for a, b in zip(*sizes, strict=True)]


def _find_other_options(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return the options, as key=value, that differ from the baseline, except sizes and memory options."""
    changed = find_changed_keys(theirs, ours, ["training"])
    others = [key for key in changed if key not in ("seed", *SIZES) and not key.startswith("model.memory")]
    return [f"{key}={get_value(ours, theirs, key)}" for key in others]


# Training data


class DataRecord(NamedTuple):
    """The training data of a run: options of a generated dataset, {key: value}, or hashes of batches, {step: hash}."""

    is_generated: bool
    values: dict[Any, Any]


def read_data_record(row: Row) -> DataRecord:
    """Return the record of a run's training data; empty if it has none. Raises RunError for damage."""
    if row.get("data.kind") in GENERATED_DATA:
        options = select_options(get_options(row), ["training"])
        data = {key: value for key, value in options.items() if key.startswith("data.")}
        return DataRecord(True, {"data.task": row.get("data.task"), "seed": row.get("seed")} | data)
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
    for key in (key for key in keys if ours.values.get(key) != theirs.values.get(key)):
        found = f"{key} is {ours.values.get(key)}, not {theirs.values.get(key)}"
        return found if ours.is_generated else f"they differ at step {key}", ""
    return "", "" if keys else "they share no recorded step"


def check_same_data(rows: Iterable[Row]) -> list[str]:
    """Raise RunError if two runs were trained on different data, and return notes about runs that were not compared.

    Runs on tokens are compared by the hashes that they recorded of their batches. Formal languages and arithmetic are
    generated from the config, so those runs are compared by the options of the dataset.
    """
    notes: list[str] = []
    records: dict[str, DataRecord] = {}
    for row in rows:
        path, record = row["path"], read_data_record(row)
        if not record.values:
            notes.append(f"{path}: its training data are not compared; none recorded yet in {hash_log.FILE_NAME}")
            continue
        for other, theirs in records.items():
            difference, unknown = compare_data(record, theirs)
            if difference:
                raise RunError(
                    f"{path}: trained on other data than {other} ({difference}); "
                    "compare them anyway with --different-data"
                )
            if unknown:
                notes.append(f"{path}: its training data are not compared with {other}; {unknown}")
        records[path] = record
    return notes


def explain_other_data(base: Row, row: Row) -> str:
    """Return why the training data of two runs differ or were not compared, or an empty string."""
    difference, unknown = compare_data(read_data_record(row), read_data_record(base))
    return f"trained on other data ({difference})" if difference else unknown
