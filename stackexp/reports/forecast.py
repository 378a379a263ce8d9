"""Forecasts: the loss of the next size, written to a file before its runs start, and scored against them afterwards.

The loss of a run of size N is u + v z(N) + error, with z(N) = (1 - N^-g) / g: a power law with an irreducible loss for
g > 0, a logarithm for g = 0. The error has a part that all seeds of a size share, and a part of each run. The interval
averages over the exponents g and the ratios of the two variances, weighted by their posterior probability: it covers
the parameters, the bend of the curve, the deviation of a size from it, and the seed of one new run.
"""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stackexp import __version__, files
from stackexp.errors import RunError
from stackexp.lazy import LazyModule
from stackexp.reports.arms import list_paths
from stackexp.reports.report import Report, Table
from stackexp.reports.scaling import SAME_RATIO, Ladder, Point, Series, abbreviate, get_size, load_ladder, select_series
from stackexp.runs import DATE_FORMAT, RunFolder, read_commit
from stackexp.tables import ABSENT

special = LazyModule("scipy.special")

FORMAT, VERSION = "stackexp forecast", 1
EXPONENTS = np.linspace(-0.5, 1, 31)
EXPONENT_MEAN, EXPONENT_DEVIATION = 0.25, 0.25
"""Normal prior of the exponent; published fits with an irreducible loss find 0.05 to 0.6."""
VARIANCE_RATIOS = np.array([0, 0.5, 2, 8, 32])
"""Variance that all seeds of a size share / variance between the seeds."""
PRIOR_DEVIATION = 0.01  # nats; counts as one more run. Recorded runs: 0.011 to 0.019 between seeds.
MIN_SIZES = 3
SAME_SIZE = 0.01  # the size of a run differs from the predicted size by less than this much in its logarithm
INTERVAL = {"predicted": 0.5, "low": 0.025, "high": 0.975}
"""Median and ends of the 95 % interval of one new run -> probabilities of smaller values."""
HEADER = ["forecast", "predicted", "95 % interval"]


class Mixture(NamedTuple):
    """The predictive distribution of one new run: a mixture of G Student's t distributions for each of R ladders."""

    weights: Any
    """[R, G] Weights; those of a ladder sum to 1."""
    centers: Any
    scales: Any
    degrees: int

    def cdf(self, values: Any) -> Any:
        """Return the probability of a smaller value: [R] for values [R]."""
        return (self.weights * special.stdtr(self.degrees, (values[:, None] - self.centers) / self.scales)).sum(1)

    def quantile(self, probability: float) -> Any:
        """Return a quantile of each ladder [R], by bisection."""
        ends = self.centers + self.scales * special.stdtrit(self.degrees, probability)
        low, high = ends.min(1), ends.max(1)  # the mixture's quantile is between those of its components
        for _ in range(50):
            middle = (low + high) / 2
            is_above = self.cdf(middle) >= probability
            low, high = np.where(is_above, low, middle), np.where(is_above, middle, high)
        return high


def predict_run(sizes: Any, counts: Any, means: Any, squares: Any, size: float) -> Mixture:
    """Predict the value of one new run from ladders of runs.

    Args:
        sizes: [K] Sizes of the ladders, increasing.
        counts: [K] Runs of each size.
        means: [R, K] Mean value of the runs of each size.
        squares: [R] Sum of the squared deviations of all runs from the means of their sizes.
        size: Size of the new run.
    """
    logs, exponents = np.log([*sizes, size]) - np.log(sizes[0]), EXPONENTS[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(np.abs(exponents) < 1e-9, logs, -np.expm1(-exponents * logs) / exponents)  # [E, K + 1]
    z = ((z - z[:, :-1].mean(1, keepdims=True)) / z[:, :-1].std(1, keepdims=True))[:, None]  # priors of equal width
    known, new = z[..., :-1], z[..., -1]
    precisions = 1 / (1 / counts + VARIANCE_RATIOS[:, None])  # [V, K], of the mean of a size
    total = precisions.sum(-1)
    center = (precisions * known).sum(-1) / total  # [E, V]
    offsets = known - center[..., None]
    spread = (precisions * offsets**2).sum(-1)
    y = means[:, None, None]
    level = (precisions * y).sum(-1) / total  # [R, 1, V]
    slope = (precisions * offsets * y).sum(-1) / spread  # [R, E, V]
    residuals = y - level[..., None] - slope[..., None] * offsets
    residual_sum = (precisions * residuals**2).sum(-1) + squares[:, None, None] + PRIOR_DEVIATION**2
    degrees = int(counts.sum()) - 1  # two are lost to the line, one comes from the prior
    leverage = 1 / total + (new - center) ** 2 / spread
    prior = -(((exponents - EXPONENT_MEAN) / EXPONENT_DEVIATION) ** 2) / 2
    determinants = np.log1p(counts * VARIANCE_RATIOS[:, None]).sum(-1) + np.log(total * spread)
    log_weights = (prior - determinants / 2 - degrees / 2 * np.log(residual_sum)).reshape(len(means), -1)
    weights = np.exp(log_weights - log_weights.max(1, keepdims=True))
    scales = np.sqrt(residual_sum / degrees * (1 + VARIANCE_RATIOS + leverage)).reshape(len(means), -1)
    centers = (level + slope * (new - center)).reshape(len(means), -1)
    return Mixture(weights / weights.sum(1, keepdims=True), centers, scales, degrees)


def predict_interval(runs: dict[int, list[float]], size: int) -> dict[str, float]:
    """Predict the value of one new run from the values of runs by size."""
    sizes = sorted(runs)
    means = np.array([np.mean(runs[s]) for s in sizes])
    squares = sum(float(np.var(runs[s]) * len(runs[s])) for s in sizes)
    counts = np.array([len(runs[s]) for s in sizes])
    mixture = predict_run(sizes, counts, means[None], np.array([squares]), size)
    return {name: float(mixture.quantile(probability)[0]) for name, probability in INTERVAL.items()}


def leave_out_largest(runs: dict[int, list[float]]) -> list[dict[str, Any]]:
    """Predict each size from the smaller ones, the largest first, as long as three remain."""
    sizes = sorted(runs)
    return [
        {"size": sizes[i], "measured": runs[sizes[i]]} | predict_interval({s: runs[s] for s in sizes[:i]}, sizes[i])
        for i in range(len(sizes) - 1, MIN_SIZES - 1, -1)
    ]


def build_forecast(
    paths: Sequence[Path],
    measure: str | None,
    irreducible: float,
    by: Sequence[str],
    forecast: Path,
    size: int | None,
    tokens: int | None,
) -> Report:
    """Write the file `forecast` for `size` parameters outside the memory, or `tokens`; if it exists, score it.

    `paths`, `measure` and `by` are those of `build_scaling`. The fit estimates the irreducible loss. Raises RunError if
    options differ from those in the file, and if there is nothing to fit.
    """
    if irreducible:
        raise RunError(f"--irreducible {irreducible:g}: a forecast estimates it; omit the option")
    quantity, wanted = ("tokens", tokens) if tokens else ("parameters", size)
    if not forecast.exists():
        if wanted is None:
            raise RunError(f"{forecast}: no such file; to write a forecast, give --size or --tokens")
        contents = _fit(load_ladder(paths, measure, by=by), quantity, wanted, by)
        with files.explain_failed_writes(forecast, "choose another FILE"):
            files.write_hashed_json(forecast, contents)
    contents = read_forecast(forecast)
    options = {"loss": measure, "by": list(by) or None, "size": wanted, "quantity": wanted and quantity}
    if changed := [key for key, value in options.items() if value not in (None, contents[key])]:
        found = f"{changed[0]} {contents[changed[0]]}, not {options[changed[0]]}"
        raise RunError(f"{forecast}: a forecast of {found}; omit the option, or choose another FILE")
    ladder = load_ladder(paths, contents["loss"], by=contents["by"])
    if sorted(ladder.sets) != contents["sets"]:
        raise RunError(f"{forecast}: a forecast for other validation sets than those of RUNS; choose another FILE")
    return _score(forecast, contents, ladder)


def read_forecast(path: Path) -> dict[str, Any]:
    """Read a file of `--forecast`. Raises RunError if it is another file, of another version, or was changed."""
    contents = files.read_hashed_json(path, "restore it, or give a file that `report scaling --forecast` wrote")
    if contents.get("format") != FORMAT:
        raise RunError(f"{path}: not a forecast; give a file that `report scaling --forecast` wrote")
    if (found := contents["version"]) != VERSION:
        raise RunError(f"{path}: a forecast of version {found!r:.20}, not {VERSION}; use the stackexp that wrote it")
    return contents


# Writing


def _fit(ladder: Ladder, quantity: str, size: int, by: Sequence[str]) -> dict[str, Any]:
    """Return the contents of a forecast file, without its hash."""
    option = f"{'--size' if quantity == 'parameters' else '--tokens'} {size}"
    series = select_series(ladder.points, quantity)
    if series is None:
        raise RunError(f"{option}: nothing to fit in {quantity}; {ladder.source}")
    if trained := [point for point in ladder.points if _is_at(point, quantity, size)]:
        raise RunError(f"{option}: {trained[0].path} has this size; a forecast is written before such runs are trained")
    largest = max(get_size(point, quantity) for point in series.points)
    if size <= largest:
        raise RunError(f"{option}: not above the largest size, {largest}; forecasts are of the next size")
    _check_repeated_runs(series.points, quantity)
    forecasts = []
    for names, runs in _list_values(series.points, quantity).items():
        own: dict[int, list[float]] = defaultdict(list)
        for point, value in runs:
            own[get_size(point, quantity)].append(value)
        if len(own) >= MIN_SIZES:
            left_out = leave_out_largest(own)
            forecasts.append({"names": list(names)} | predict_interval(own, size) | {"left_out": left_out})
    if not forecasts:
        raise RunError(f"{option}: no family has {MIN_SIZES} sizes with {series.condition}; train more sizes first")
    fields = ("path", "arm", "family", "parameters", "backbone", "tokens", "seed", "loss")
    records = [
        {key: getattr(p, key) for key in fields} | {"sha256": files.compute_sha256(RunFolder(Path(p.path)).result)}
        for p in series.points
    ]
    return {
        **{"format": FORMAT, "version": VERSION, "written": time.strftime(DATE_FORMAT), "commit": read_commit()},
        **{"stackexp": __version__, "loss": ladder.column, "sets": sorted(ladder.sets), "by": list(by)},
        **{"quantity": quantity, "size": size, "fixed": series.fixed, "value": series.value},
        **{"runs": records, "forecasts": forecasts},
    }


def _check_repeated_runs(points: Sequence[Point], quantity: str) -> None:
    """Raise RunError if a family has two runs of one size and seed, such as with two learning rates."""
    found: dict[tuple[str, int, int, int], Point] = {}
    for point in points:
        other = found.setdefault((point.family, get_size(point, quantity), point.tokens, point.seed), point)
        if other is not point:
            raise RunError(
                f"{point.path} and {other.path}: two runs of {point.family} with one size and seed; separate them with "
                "--by, such as --by optimizer.lr, or leave one out"
            )


def _is_at(point: Point, quantity: str, size: int) -> bool:
    return abs(math.log(get_size(point, quantity) / size)) < SAME_SIZE


def _list_values(points: Sequence[Point], quantity: str) -> dict[tuple[str, ...], list[tuple[Point, float]]]:
    """Return the losses of each (family,), and of each (family, baseline) the differences of runs with equal seeds."""
    values: dict[tuple[str, ...], list[tuple[Point, float]]] = defaultdict(list)
    for point in points:
        values[point.family,].append((point, point.loss))
    runs = {(p.family, get_size(p, quantity), p.tokens, p.seed): p for p in points}
    for point in points:
        base = runs.get((point.baseline, get_size(point, quantity), point.tokens, point.seed))
        if base and point.family != point.baseline:
            values[point.family, point.baseline].append((point, point.loss - base.loss))
    return values


# Scoring


def _score(path: Path, contents: dict[str, Any], ladder: Ladder) -> Report:
    """Return the report of a forecast: its intervals, and the runs of its size that have finished."""
    quantity, size, fixed, value = (contents[key] for key in ("quantity", "size", "fixed", "value"))
    candidates = [p for p in ladder.points if _is_at(p, quantity, size)]
    tolerance = SAME_RATIO if fixed == "ratio" else 1e-9
    new = [p for p in candidates if abs(math.log(getattr(p, fixed) / value)) < tolerance]
    condition = Series(quantity, fixed, value, [], {}).condition
    scored, undated = _check_dates(contents["written"], new)
    measured = _list_values(scored, quantity)
    rows, earlier, records, results = [], [], [], []
    for forecast in contents["forecasts"]:
        name, runs = " - ".join(forecast["names"]), measured.get(tuple(forecast["names"]), [])
        sign = "+z" if len(forecast["names"]) > 1 else ""
        cells, interval = [name, *_format_interval(forecast, sign)], {key: forecast[key] for key in INTERVAL}
        for run, loss in runs:
            is_inside = forecast["low"] <= loss <= forecast["high"]
            results.append(is_inside)
            rows.append([*cells, str(run.seed), f"{loss:{sign}.3f}", "inside" if is_inside else "**outside**"])
            records.append({"forecast": name, "seed": run.seed, "measured": loss, "is_inside": is_inside} | interval)
        if not runs:
            rows.append([*cells, *[ABSENT] * 3])
            records.append({"forecast": name} | interval)
        for left in forecast["left_out"]:
            count = sum(left["low"] <= loss <= left["high"] for loss in left["measured"])
            mean = f"{np.mean(left['measured']):{sign}.3f}"
            inside = f"{count} of {len(left['measured'])}"
            earlier.append([name, abbreviate(left["size"]), *_format_interval(left, sign), mean, inside])
    text = f"{sum(results)} of {len(results)} inside" if results else "no finished run of this size yet"
    unused = [{"path": p.path} for p in candidates if p not in new]
    tables = [
        Table(f"Forecast for {abbreviate(size)} {quantity}: {text}", [*HEADER, "seed", "measured", "result"], rows)
    ]
    if earlier:
        header = [HEADER[0], "left out", *HEADER[1:], "mean measured", "runs inside"]
        tables.append(Table("Largest sizes left out, when the forecast was written", header, earlier))
    notes = [
        f"{path}: written {contents['written']} by commit {contents['commit']}. Loss: {contents['loss']}. Runs with "
        f"{condition}. Parameters are those outside the memory. Differences are paired by seed.",
        "Intervals are 95 %, of one new run. They cover the parameters of the law, its irreducible loss and bend, the "
        "seed, and deviations of a whole size; not another learning-rate rule or other data.",
        *_check_step(contents),
        *list_paths(f"of this size without {condition}, not scored", unused),
        *undated,
        *_check_runs(contents["runs"], ladder),
    ]
    return Report(tables, [*notes, *ladder.left_out, *ladder.notes], records)


def _format_interval(interval: dict[str, Any], sign: str) -> list[str]:
    predicted, low, high = (f"{interval[key]:{sign}.3f}" for key in INTERVAL)
    return [predicted, f"{low} to {high}"]


def _check_step(contents: dict[str, Any]) -> list[str]:
    """Return a note if the forecast is further from the largest size than any two neighboring sizes are."""
    field = "backbone" if contents["quantity"] == "parameters" else "tokens"
    sizes = sorted({run[field] for run in contents["runs"]})
    largest_step, step = max(b / a for a, b in pairwise(sizes)), contents["size"] / sizes[-1]
    if step <= largest_step * (1 + SAME_RATIO):
        return []
    text = f"{step:.1f} times the largest size, where the runs are at most {largest_step:.1f} times apart"
    return [f"The forecast is for {text}: a bend of the law may leave the interval."]


def _check_dates(written: str, points: Sequence[Point]) -> tuple[list[Point], list[str]]:
    """Return the runs that started after the forecast was written, and notes about the others: no test of it."""
    scored, early, unknown = [], [], []
    for point in points:
        started = RunFolder(Path(point.path)).read_start()
        if started is None:
            unknown.append({"path": point.path})
        elif started < datetime.strptime(written, DATE_FORMAT):
            early.append({"path": point.path})
        else:
            scored.append(point)
    notes = list_paths("started before the forecast was written, so not scored", early)
    return scored, [*notes, *list_paths("without a recorded start, so not scored", unknown)]


def _check_runs(runs: Sequence[dict[str, Any]], ladder: Ladder) -> list[str]:
    """Return notes about runs of the forecast whose result.json has changed or is missing. Moved runs are found."""
    hashes = {files.compute_sha256(RunFolder(Path(row["path"])).result) for row in ladder.rows}
    changed, missing = [], []
    for run in (run for run in runs if run["sha256"] not in hashes):
        result = RunFolder(Path(run["path"])).result
        if not result.exists():
            missing.append(run)
        elif files.compute_sha256(result) != run["sha256"]:
            changed.append(run)
    reason = "of the forecast changed since it was written, which counts their earlier losses"
    return [*list_paths(reason, changed), *list_paths("of the forecast missing", missing)]
