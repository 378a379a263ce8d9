"""Power laws: loss = irreducible + factor / size^exponent, fitted on logarithmic axes, with bootstrap bands.

`select_series` chooses the runs that a law is fitted to.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stackexp.modules.scores import NORMAL_QUANTILE, get_t_quantile

BASELINE = "Transformer"
SAME_RATIO = 0.1  # tokens per parameter of a ladder differ by less than this much in their logarithm
QUANTITIES = {"parameters": "tokens", "tokens": "backbone"}
"""The quantity of each panel -> the quantity that is held fixed there."""
NUM_RESAMPLES = 2000
MIN_POINTS = 4
"""Bands need this many points: fewer residuals say nothing about the spread."""


class Point(NamedTuple):
    """A finished run. `backbone` are its parameters outside the memory; `run` names it.

    `baseline` is the Transformer family with the same options outside the memory.
    """

    family: str
    parameters: int
    backbone: int
    tokens: int
    seed: int
    loss: float
    run: str = ""
    baseline: str = BASELINE


class PowerLaw(NamedTuple):
    """The fit in logarithms, log(loss - irreducible) = intercept - exponent * log(size), and its bootstrap samples.

    `samples` [R, 2] holds intercept and exponent of each resample; R is 0 without a band.
    """

    intercept: float
    exponent: float
    irreducible: float
    samples: Any

    def predict(self, sizes: Any) -> Any:
        """Return the losses at these sizes."""
        return self.irreducible + np.exp(self.intercept - self.exponent * np.log(sizes))

    def predict_band(self, sizes: Any) -> tuple[Any, Any]:
        """Return the ends of the pointwise 95 % band at these sizes."""
        logs = self.samples[:, :1] - self.samples[:, 1:] * np.log(sizes)[None]
        low, high = np.percentile(logs, [2.5, 97.5], axis=0)
        return self.irreducible + np.exp(low), self.irreducible + np.exp(high)

    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the exponent."""
        return _percentiles(self.samples[:, 1]) if len(self.samples) else None


class Series(NamedTuple):
    """The runs of a panel, the quantity that all of them have in common, and the fit of each family."""

    quantity: str
    condition: str
    points: list[Point]
    laws: dict[str, PowerLaw]


def fit_power_law(sizes: Sequence[float], losses: Sequence[float], irreducible: float = 0.0) -> PowerLaw:
    """Fit by least squares in logarithms. The band resamples the residuals, widened as for Student's t."""
    x, y = np.log(sizes), np.log(np.asarray(losses) - irreducible)
    slope, intercept = np.polyfit(x, y, 1)
    samples = np.empty((0, 2))
    if len(x) >= MIN_POINTS:
        fitted = intercept + slope * x
        widening = np.sqrt(len(x) / (len(x) - 2)) * get_t_quantile(len(x) - 2) / NORMAL_QUANTILE
        residuals = (y - fitted) * widening
        drawn = np.random.default_rng(0).choice(residuals - residuals.mean(), (NUM_RESAMPLES, len(x)))
        slopes, intercepts = np.polyfit(x, (fitted + drawn).T, 1)
        samples = np.stack([intercepts, -slopes], axis=1)
    return PowerLaw(float(intercept), float(-slope), irreducible, samples)


def equivalent_factor(law: PowerLaw, baseline: PowerLaw, size: float) -> tuple[float, tuple[float, float] | None]:
    """Return how many times larger the baseline must be to reach the loss of `law` at `size`, and a 95 % interval.

    The exponent of the baseline must be positive; resamples in which it is not count as infinite factors.
    """

    def solve(intercept: Any, exponent: Any, base_intercept: Any, base_exponent: Any) -> Any:
        log_loss = intercept - exponent * np.log(size)
        with np.errstate(over="ignore"):
            return np.where(base_exponent > 0, np.exp((base_intercept - log_loss) / base_exponent) / size, np.inf)

    factor = float(solve(law.intercept, law.exponent, baseline.intercept, baseline.exponent))
    if not (len(law.samples) and len(baseline.samples)):
        return factor, None
    order = np.random.default_rng(1).permutation(len(baseline.samples))  # the two fits are independent
    return factor, _percentiles(solve(*law.samples.T, *baseline.samples[order].T))


def select_series(points: list[Point], quantity: str, irreducible: float = 0.0) -> Series | None:
    """Return the runs for one panel: those with equal values of the other quantity that make the best comparison.

    It has the most families with two sizes, then the most sizes. In a ladder, every size has its own budget: if runs
    with about equal tokens per parameter make a better comparison, loss against parameters uses these. Returns None if
    no family has two sizes.
    """
    fixed = QUANTITIES[quantity]
    groups: dict[float, list[Point]] = defaultdict(list)
    for point in points:
        groups[getattr(point, fixed)].append(point)
    value, best = max(groups.items(), key=lambda item: (rank_group(item[1], quantity), item[0]), default=(0, []))
    condition = f"{abbreviate(value)} {'tokens' if fixed == 'tokens' else 'parameters outside the memory'}"
    ratios = [p.tokens / p.backbone for p in points]
    near = [[p for p in points if abs(math.log(p.tokens / p.backbone / ratio)) < SAME_RATIO] for ratio in ratios]
    ladder = max(near, key=lambda group: rank_group(group, quantity), default=[])
    if quantity == "parameters" and rank_group(ladder, quantity) > rank_group(best, quantity):
        ratio = sum(p.tokens for p in ladder) / sum(p.backbone for p in ladder)
        best, condition = ladder, f"{ratio:.3g} tokens per parameter outside the memory"
    if rank_group(best, quantity) == (0, 0):
        return None
    families = sorted({p.family for p in best}, key=lambda family: (not family.startswith(BASELINE), family))
    members = {family: [p for p in best if p.family == family] for family in families}
    members = {family: runs for family, runs in members.items() if rank_group(runs, quantity) > (0, 0)}
    laws = {
        family: fit_power_law([getattr(p, quantity) for p in runs], [p.loss for p in runs], irreducible)
        for family, runs in members.items()
    }
    return Series(quantity, condition, [p for runs in members.values() for p in runs], laws)


def rank_group(points: list[Point], quantity: str) -> tuple[int, int]:
    """Return the number of families with two sizes or more, and the largest number of sizes of one of them, or 0."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for point in points:
        sizes[point.family].add(getattr(point, quantity))
    counts = [len(own) for own in sizes.values() if len(own) > 1]
    return len(counts), max(counts, default=0)


def abbreviate(value: float) -> str:
    """Return a number of tokens or parameters as 283M or 20B."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")(float(f"{value:.3g}")).replace("G", "B")


def _percentiles(values: Any) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5], method="nearest")  # no mean of infinities
    return float(low), float(high)
