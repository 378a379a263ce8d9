"""Group-sequential tests of paired differences: plan the number of pairs, and decide after any of them.

The boundary is O'Brien and Fleming's (1979). With N planned pairs, a difference is decided after n of them if its
z value, from Student's t with n - 1 degrees of freedom, exceeds c sqrt(N / n). The constant c depends on N and on the
level only, and allows for a look after every pair. Early looks need overwhelming evidence, and the last one little
more than a test without looks.
"""

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from stackexp.lazy import LazyModule

optimize, special = LazyModule("scipy.optimize"), LazyModule("scipy.special")

MIN_PAIRS = 3
"""Fewer pairs decide nothing."""
MIN_PLANNED, MAX_PLANNED = 4, 10_000
LEVEL, POWER = 0.05, 0.8
QUANTILES = 100
"""Deviations over which a power is averaged."""
CONTINUITY = 0.25
"""Crossing probabilities are those of Brownian motion, with the barrier raised by this much divided by sqrt(N).

Siegmund's 0.58 holds for known variances. By simulation, 0.25 keeps the error of 4 to 30 looks within the level.
"""


class Outcome(StrEnum):
    """A verdict on an arm. Lower losses are better."""

    HELPS = "helps"
    HURTS = "hurts"
    NO_EFFECT = "no effect"  # above the effect in question
    UNDECIDED = "undecided"

    def describe(self, effect: float) -> str:
        """Return the verdict in words, with the effect in question (nats) if there is none above it."""
        return f"no effect above {effect:g}" if self == Outcome.NO_EFFECT else str(self)


@dataclass(frozen=True)
class Judgment:
    """The verdict on an arm after `pairs` pairs: mean difference and the interval that allows for looks and arms.

    Mean and interval are those after the first `look` pairs, where the verdict was reached; without one, after all.
    `p_value` is the smallest level at which a look so far would have decided that there is a difference.
    """

    outcome: Outcome
    pairs: int
    look: int
    mean: float
    low: float
    high: float
    p_value: float

    @property
    def is_decided(self) -> bool:
        """Return True unless more pairs are needed."""
        return self.outcome != Outcome.UNDECIDED


def judge(differences: Mapping[str, Sequence[float]], planned: int, effect: float) -> dict[str, Judgment]:
    """Judge the arms by their paired differences (arm minus baseline, in the order of the seeds).

    The arms are judged after 3, 4, ... pairs, each time with the pairs up to there; the first verdict on an arm stays.
    An arm helps or hurts if its p-value is significant by Holm's method over the arms, so at most a share LEVEL of
    comparisons without any effect get such a verdict. It has no effect above `effect` if its interval, at LEVEL
    divided by the number of arms, lies within +-effect. If only Holm's method decides an arm, its interval
    may contain zero.
    """
    evidence = {arm: _compute_evidence(values, planned) for arm, values in differences.items()}
    p_values = {  # by the number of pairs, from 0
        arm: [1.0] * MIN_PAIRS + compute_crossing_probability(np.maximum.accumulate(values), planned).tolist()
        for arm, values in evidence.items()
    }
    decided: dict[str, tuple[Outcome, int]] = {}
    for look in range(MIN_PAIRS, max(map(len, differences.values()), default=0) + 1):
        adjusted = adjust_holm([values[min(look, len(values) - 1)] for values in p_values.values()])
        for (arm, values), p_value in zip(differences.items(), adjusted, strict=True):
            if arm in decided:
                continue
            if p_value <= LEVEL:
                strongest = MIN_PAIRS + int(evidence[arm][: look - MIN_PAIRS + 1].argmax())
                decided[arm] = (Outcome.HELPS if math.fsum(values[:strongest]) < 0 else Outcome.HURTS), strongest
            elif look <= len(values):
                _, low, high = compute_interval(values[:look], planned, LEVEL / len(differences))
                if max(-low, high) < effect:
                    decided[arm] = Outcome.NO_EFFECT, look
    judgments = {}
    for arm, values in differences.items():
        outcome, look = decided.get(arm, (Outcome.UNDECIDED, len(values)))
        interval = compute_interval(values[:look], planned, LEVEL / len(differences))
        judgments[arm] = Judgment(outcome, len(values), look, *interval, float(p_values[arm][-1]))
    return judgments


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted by Holm's method (1979), in the given order."""
    order = np.argsort(p_values)
    steps = np.sort(p_values) * np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return adjusted.tolist()


def compute_crossing_probability(barrier: "float | np.ndarray", planned: int) -> np.ndarray:
    """Return the probability that |z| exceeds barrier * sqrt(planned / n) at any look n, if there is no effect."""
    c = np.asarray(barrier, float)[..., None] + CONTINUITY / math.sqrt(planned)
    k = 2 * np.arange(40) + 1
    signs = 1 - (k % 4 == 3) * 2
    near = 1 - 4 / math.pi * np.sum(signs / k * np.exp(-((k * math.pi) ** 2) / (8 * c * c)), -1)
    far = 4 * np.sum(signs * special.ndtr(-k * c), -1)  # the same series in the form that converges for large barriers
    return np.where(c[..., 0] < 1, near, far)


@functools.cache
def find_barrier(planned: int, level: float) -> float:
    """Return the constant c of the boundary for this many planned pairs."""
    return float(optimize.brentq(lambda c: float(compute_crossing_probability(c, planned)) - level, 0.0, 20.0))


def compute_interval(values: Sequence[float], planned: int, level: float = LEVEL) -> tuple[float, float, float]:
    """Return the mean and its repeated confidence interval (Jennison and Turnbull 1989).

    All intervals of a comparison cover the mean together with probability 1 - level. They are infinite below MIN_PAIRS.
    """
    n = len(values)
    assert n <= planned, f"{n} pairs, {planned} planned"
    mean = math.fsum(values) / n if n else math.nan
    if n < MIN_PAIRS:
        return mean, -math.inf, math.inf
    margin = _get_critical_t(n, planned, level) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean, mean - margin, mean + margin


def _get_critical_t(n: int, planned: int, level: float) -> float:
    return -float(special.stdtrit(n - 1, special.ndtr(-find_barrier(planned, level) * math.sqrt(planned / n))))


def _compute_evidence(values: "Sequence[float] | np.ndarray", planned: int) -> "np.ndarray":
    """Return the constant c that each look at the first 3, 4, ... n of `values` [..., n] exceeds: [..., looks]."""
    x = np.asarray(values, float)
    n = np.arange(MIN_PAIRS, x.shape[-1] + 1)
    mean, squares = x.cumsum(-1)[..., MIN_PAIRS - 1 :] / n, (x * x).cumsum(-1)[..., MIN_PAIRS - 1 :]
    deviation = np.sqrt(np.maximum((squares - n * mean**2) / (n - 1), np.finfo(float).tiny))
    z = -special.ndtri(special.stdtr(n - 1, -np.abs(mean) * np.sqrt(n) / deviation))
    return z * np.sqrt(n / planned)


# Plan


def compute_power(
    pairs: int, effect: float, deviation: float, level: float = LEVEL, degrees: float = math.inf
) -> float:
    """Return the probability that `pairs` planned pairs find an effect and its sign, by the noncentral t distribution.

    `deviation` is the standard deviation of a pair's difference. If it is an estimate with this number of `degrees` of
    freedom, the probability is the mean over the deviations that it leaves possible. Only the last look counts; earlier
    ones add little.
    """
    ratio = np.ones(1)  # of the estimate to the true deviation
    if math.isfinite(degrees):
        ratio = np.sqrt(special.chdtri(degrees, (np.arange(QUANTILES) + 0.5) / QUANTILES) / degrees)
    shifts = ratio * effect * math.sqrt(pairs) / deviation
    missed = special.nctdtr(pairs - 1, shifts, _get_critical_t(pairs, pairs, level))
    return float(np.mean(1 - np.nan_to_num(missed, nan=0.0)))  # NaN: so large that all find it


def count_pairs(effect: float, deviation: float, level: float = LEVEL, degrees: float = math.inf) -> int:
    """Return the fewest pairs, at least MIN_PLANNED, that find `effect` with probability POWER.

    MAX_PLANNED if even those are too few. `degrees` is that of `compute_power`.
    """
    if not deviation:
        return MIN_PLANNED

    def compute(pairs: int) -> float:
        return compute_power(pairs, effect, deviation, level, degrees)

    return MIN_PLANNED + bisect.bisect_left(range(MIN_PLANNED, MAX_PLANNED), POWER, key=compute)


def format_pairs(pairs: int) -> str:
    """Return a number of `count_pairs` as text."""
    return f"over {pairs}" if pairs == MAX_PLANNED else str(pairs)


def choose_batch(arms: int, workers: int) -> int:
    """Return the fewest pairs between two looks that keep `workers` processes busy at least 80 % of the time."""
    rounds = ((n, math.ceil(n * arms / workers)) for n in range(1, workers + 1))
    return next(n for n, count in rounds if n * arms >= 0.8 * workers * count)


def find_detectable_effect(pairs: int, deviation: float, level: float = LEVEL, degrees: float = math.inf) -> float:
    """Return the smallest effect that `pairs` pairs find with probability POWER; `degrees` as in `compute_power`."""

    def compute(effect: float) -> float:
        return compute_power(pairs, effect, 1.0, level, degrees) - POWER

    high = 1.0
    while compute(high) < 0:
        high *= 2
    return float(optimize.brentq(compute, 1e-3, high)) * deviation


def estimate_deviation(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the standard deviation of differences, and its 95 % interval by the chi-square distribution."""
    deviation = float(np.std(values, ddof=1))
    return deviation, *compute_deviation_interval(deviation, len(values) - 1)


def compute_deviation_interval(deviation: float, degrees: float) -> tuple[float, float]:
    """Return the 95 % interval of a standard deviation with this number of degrees of freedom."""
    low, high = (math.sqrt(degrees / float(special.chdtri(degrees, p))) for p in (LEVEL / 2, 1 - LEVEL / 2))
    return deviation * low, deviation * high
