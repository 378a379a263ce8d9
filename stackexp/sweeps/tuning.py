"""The search of a verdict: the points of every arm, and what their runs show."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from stackexp.config.fields import Errors, option
from stackexp.errors import RunError
from stackexp.metric_tags import TOKENS_PER_SECOND
from stackexp.runs import RunFolder
from stackexp.sweeps.schema import Space, Values, find_space_errors

MIN_DISTINCT = 200
"""Values of a range that rounding keeps apart."""
Tuned = dict[str, list[tuple[Values, list[float]]]]
"""Arm -> its points, each with the scores of the tuning seeds."""


@dataclass
class TunedSpace(Space):
    """The values of a tuned key, for all arms or for the named ones."""

    arms: list[str] = field(default_factory=list)


@dataclass
class Tuning:
    """The search of every arm: the same points, or as many draws, on the same seeds.

    Without `trials`, the points are all combinations of the values. With `trials`, they are quasi-random draws; all
    arms that tune a key get the same values of it. `overrides` are for its runs only, such as a shorter test.
    """

    space: dict[str, TunedSpace] = field(default_factory=dict)
    trials: Optional[int] = option(None, min=1)
    seeds: list[int] = field(default_factory=lambda: [50, 51])
    overrides: list[str] = field(default_factory=list)

    def find_errors(self) -> Errors:
        """Check the spaces and the seeds."""
        yield from find_space_errors(self.space)
        for key, space in self.space.items():
            if self.trials is None and space.values is None:
                yield "trials", f"required, because {key} is a range"
            if self.trials is None and space.arms:
                yield "trials", f"required, because only some arms tune {key}; every arm gets as many trials"
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            yield "seeds", "expected different seeds"

    def select_space(self, arm: str) -> dict[str, TunedSpace]:
        """Return the keys that an arm tunes."""
        return {key: space for key, space in self.space.items() if not space.arms or arm in space.arms}

    def draw_points(self, arm: str) -> list[Values]:
        """Return the values of every trial of an arm."""
        chosen = self.select_space(arm)
        if self.trials is None:
            products = itertools.product(*(space.values or [] for space in chosen.values()))
            return [dict(zip(chosen, values, strict=True)) for values in products]
        from scipy.stats import qmc

        units = qmc.Halton(len(self.space), rng=0).random(self.trials)  # a longer search begins with the same draws
        rows = [dict(zip(self.space, row, strict=True)) for row in units]
        return [{key: _scale(row[key], space) for key, space in chosen.items()} for row in rows]


def _scale(unit: float, space: Space) -> Any:
    """Map a number in [0, 1) to a value of the space, rounded to three digits, or to more in a narrow range."""
    if space.values is not None:
        return space.values[int(unit * len(space.values))]
    low, high = space.low or 0.0, space.high or 0.0
    end = high + 1 if space.int else high
    value = math.exp(math.log(low) + unit * math.log(end / low)) if space.log else low + unit * (end - low)
    if space.int:
        return min(math.floor(value), int(high))
    rounded = (float(f"{value:.{digits}g}") for digits in range(3, 18))
    value = next(number for number in rounded if abs(number - value) <= (high - low) / MIN_DISTINCT)
    return min(max(value, low), high)


def choose_point(points: list[tuple[Values, list[float]]], effect: float) -> Values | None:
    """Return the best values of an arm: of the points within `effect` of the lowest mean loss, the smallest values.

    Smaller differences are not of interest, and a smaller learning rate is more stable on other seeds. None if no mean
    is finite.
    """
    means = [math.fsum(scores) / len(scores) for _, scores in points]
    limit = min(means, default=math.inf) + effect
    near = [values for (values, _), mean in zip(points, means, strict=True) if math.isfinite(mean) and mean <= limit]
    return min(near, key=lambda values: list(map(_rank_value, values.values())), default=None)


def _rank_value(value: Any) -> tuple[bool, float]:
    """Return a sort key for a tuned value: null first, then numbers; other values are equal."""
    return value is not None, float(value) if isinstance(value, int | float) else 0.0


def estimate_noise(tuned: Tuned, baseline: str) -> tuple[float, float]:
    """Return the standard deviation of a pair's difference between tuning seeds, and its degrees of freedom.

    An arm's best half of points is paired with the baseline's, rank by rank. The variances of all arms are averaged.
    Arms share the baseline's runs, and points share seeds, so these variances are correlated. The correlation is taken
    as 1/4: that of the squares of two numbers whose correlation is 1/2. Arms with the same config share all runs; they
    count once, and not at all if the config is the baseline's, unless there are no other arms.
    """
    best = {arm: _select_best_half(points) for arm, points in tuned.items()}
    distinct = {scores.tobytes(): scores for arm, scores in best.items() if arm != baseline}
    others = [scores for key, scores in distinct.items() if key != best[baseline].tobytes()]
    variances = []
    for scores in others or distinct.values():
        count = min(len(scores), len(best[baseline]))
        differences = scores[:count] - best[baseline][:count]
        variances.append(np.var(differences, axis=1, ddof=1))
    num_points = statistics.fmean(map(len, variances))
    effective = (n / (1 + (n - 1) / 4) for n in (len(variances), num_points))
    degrees = (best[baseline].shape[1] - 1) * math.prod(effective)
    return math.sqrt(float(np.mean([np.mean(values) for values in variances]))), degrees


def _select_best_half(points: list[tuple[Values, list[float]]]) -> np.ndarray:
    """Return the scores [points, seeds] of the better half of the finite points, the best first."""
    finite = sorted((scores for _, scores in points if all(map(math.isfinite, scores))), key=lambda s: math.fsum(s))
    return np.array(finite[: -(-len(finite) // 2)])


def measure_speeds(runs: Mapping[str, Sequence[RunFolder]]) -> dict[str, float]:
    """Return the tokens per second of each arm: the median over its runs of the median of a run.

    Raises RunError if a run has no speed or machine on record, or if the runs were on different machines.
    """
    speeds: dict[str, float] = {}
    machines: dict[str, RunFolder] = {}
    for arm, folders in runs.items():
        medians = []
        for folder in folders:
            measured = [speed for line in folder.read_metrics() if (speed := line.get(TOKENS_PER_SECOND)) is not None]
            sessions = folder.read_sessions()
            if not measured or not sessions:
                raise RunError(f"{folder.path}: no speed or machine on record; repeat the run, or use equal: tokens")
            medians.append(statistics.median(measured))
            for session in sessions:
                cpu = session.get("cpu") or {}
                devices = session.get("gpus") or [cpu.get("model"), f"{cpu.get('threads')} threads"]
                machines.setdefault(f"{session.get('host')} with {', '.join(map(str, devices))}", folder)
        speeds[arm] = statistics.median(medians)
    if len(machines) > 1:
        (first, one), (second, other), *_ = machines.items()
        raise RunError(
            f"{one.path} ran on {first}, {other.path} on {second}; equal: time requires tuning runs on one machine"
        )
    return speeds
