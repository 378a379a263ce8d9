"""Paired differences between the runs of two arms, with 95 % intervals, and their mismatch in size."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stackexp.config.affects import find_changed_keys, get_value
from stackexp.evaluation.scores import read_chunk_losses
from stackexp.modules.scores import average_groups, average_scores, bootstrap_interval, get_t_quantile
from stackexp.reports.arms import OLMO_GROUPS, Arm, ArmRun
from stackexp.reports.compare import explain_other_data
from stackexp.tables import ABSENT

SIZES = ("model.hidden_size", "model.intermediate_size", "model.num_heads", "model.num_kv_heads", "model.num_layers")
TRAINING, OTHER = "training loss", "average"
COLUMNS = (TRAINING, "V2", "V3", OTHER)
Losses = dict[str, tuple[float, float | None]]
"""Column -> (loss, perplexity)."""


class Difference(NamedTuple):
    """The mean of paired differences over `seeds` seeds, with the ends of its 95 % interval if there is one."""

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


@dataclass(frozen=True)
class Comparison:
    """An arm against the baseline: the pairs of runs with the same seed, data and number of tokens, and the rest."""

    arm: Arm
    pairs: list[tuple[ArmRun, ArmRun]]
    mismatches: list[str]

    @cached_property
    def differences(self) -> dict[str, Difference]:
        """The difference in each column that all pairs have, averaged over the same sets."""
        losses = [(read_losses(run), read_losses(base)) for run, base in self.pairs]
        sets = {c: {frozenset(name_sets(run, c)) for pair in self.pairs for run in pair} for c in COLUMNS}
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
        names = sorted(name_sets(self.pairs[0][0], column))
        margins = []
        for name in names:
            differences: list[np.ndarray] = []
            counts = np.zeros(0)
            for run, base in self.pairs:
                ours, theirs = (read_chunk_losses(r.folder.path, name, r.sets[name]["loss"]) for r in (run, base))
                if ours is None or theirs is None:
                    return None
                counts = counts if differences else ours[1]
                is_same = np.array_equal(ours[1], counts) and np.array_equal(theirs[1], counts)
                if len(counts) < 2 or not is_same:
                    return None
                differences.append(ours[0] - theirs[0])
            low, high = bootstrap_interval(np.mean(differences, 0), counts)
            margins.append((high - low) / 2)
        return math.hypot(*margins) / len(margins) if margins else None

    def format_sizes(self, baseline: Arm) -> list[str]:
        """Return the relative mismatch in parameters and in training FLOPs per token, as far as both are known."""
        runs = [*self.arm.runs[:1], *baseline.runs[:1]]
        if len(runs) < 2:
            return [ABSENT] * 2
        sizes = [(run.result.get("parameters"), run.flops_per_token) for run in runs]
        return [f"{a / b - 1:+z.1%}" if a and b else ABSENT for a, b in zip(*sizes, strict=True)]


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


def read_losses(run: ArmRun) -> Losses:
    """Return the losses of a run: in training, on V2, on V3, and the average of the other sets."""
    training = run.result.get("train_loss")
    loss = training["last_20_steps"] if training else None
    own: Losses = {TRAINING: (loss, None)} if loss is not None and math.isfinite(loss) else {}
    return own | average_sets(run.sets)


def name_sets(run: ArmRun, column: str) -> set[str]:
    """Return the names of the sets that a column averages; none for the training loss."""
    groups = {name: name.partition("/")[0].upper() for name in run.sets}
    return {name for name, group in groups.items() if (group if group in ("V2", "V3") else OTHER) == column}


def average_sets(sets: dict[str, dict[str, float]]) -> Losses:
    """Return the averages over V2, over V3 and over the other sets; groups without sets are omitted."""
    groups = average_groups({name: s for name, s in sets.items() if name.startswith(OLMO_GROUPS)})
    averages = {group.upper(): average for group, average in groups.items()}
    if others := {name: s for name, s in sets.items() if not name.startswith(OLMO_GROUPS)}:
        averages[OTHER] = average_scores(others)
    return {column: (average["loss"], average.get("perplexity")) for column, average in averages.items()}


def compare_arms(arm: Arm, baseline: Arm) -> Comparison:
    """Pair the runs of two arms by seed, and report the runs that cannot be paired."""
    bases = {run.seed: run for run in baseline.runs}
    pairs, mismatches = [], []
    for run in arm.runs:
        problem = _find_mismatch(run, bases.get(run.seed))
        if problem:
            mismatches.append(f"{arm.name}, seed {run.seed}: not paired with {baseline.name}: {problem}")
        else:
            pairs.append((run, bases[run.seed]))
    if pairs and (options := _find_other_options(arm, baseline)):
        mismatches.append(
            f"{arm.name}: apart from memory and size, differs from {baseline.name} in {', '.join(options)}"
        )
    for run, base in pairs:
        ours, theirs = _describe_platform(run), _describe_platform(base)
        if ours and theirs and ours != theirs:
            pair = f"{arm.name}, seed {run.seed}: started on {ours}, {baseline.name} on {theirs}"
            mismatches.append(f"{pair}: rounding differs, and perhaps the initial weights")
    return Comparison(arm, pairs, mismatches)


def _describe_platform(run: ArmRun) -> str:
    """Return the device and the version of torch of a run's first session; an empty string if not recorded."""
    first = next(iter(run.folder.read_sessions()), {})
    is_on_cpu = run.folder.read_options().get("trainer.accelerator") == "cpu"
    device = "" if is_on_cpu else ", ".join(sorted(set(first.get("gpus", []))))
    version = first.get("versions", {}).get("torch")
    return f"{device or 'a CPU'} with torch {version}" if version else ""


def _find_other_options(arm: Arm, baseline: Arm) -> list[str]:
    """Return the options of an arm, as key=value, that differ from the baseline and are no sizes or memory options."""
    changed = find_changed_keys(baseline.config, arm.config, ["training"])
    others = [key for key in changed if key not in ("seed", *SIZES) and not key.startswith("model.memory")]
    return [f"{key}={get_value(arm.config, baseline.config, key)}" for key in others]


def _find_mismatch(run: ArmRun, base: ArmRun | None) -> str:
    """Return why two runs did not train on the same tokens in the same order, or an empty string."""
    if base is None:
        return "the baseline has no finished run with this seed"
    if run.result.get("tokens") != base.result.get("tokens"):
        return f"trained on {run.result.get('tokens')} tokens, the baseline on {base.result.get('tokens')}"
    return explain_other_data(base.folder, run.folder)
