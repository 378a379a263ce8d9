"""Power laws: loss = irreducible + factor / size^exponent, fitted on logarithmic axes, with bootstrap bands."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

NUM_RESAMPLES = 2000
MIN_POINTS = 4
"""Bands need this many points: fewer residuals say nothing about the spread."""


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


def fit_power_law(sizes: Sequence[float], losses: Sequence[float], irreducible: float = 0.0) -> PowerLaw:
    """Fit by least squares in logarithms. The band resamples the residuals, widened for the two fitted parameters."""
    x, y = np.log(sizes), np.log(np.asarray(losses) - irreducible)
    slope, intercept = np.polyfit(x, y, 1)
    samples = np.empty((0, 2))
    if len(x) >= MIN_POINTS:
        fitted = intercept + slope * x
        residuals = (y - fitted) * np.sqrt(len(x) / (len(x) - 2))
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


def _percentiles(values: Any) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5], method="nearest")  # no mean of infinities
    return float(low), float(high)
