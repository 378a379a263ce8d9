"""The paper's scaling figure: loss against parameters and against tokens, a power law for each family of models.

A power law is loss = irreducible + factor / size^exponent, fitted on logarithmic axes, with bootstrap bands.
"""

import math
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stackexp.config.affects import find_changed_keys
from stackexp.errors import ConfigError, RunError
from stackexp.frame import Row, get_options
from stackexp.modules.scores import NORMAL_QUANTILE, get_t_quantile
from stackexp.reports.arms import SIZES as MODEL_SIZES
from stackexp.reports.arms import (
    choose_column,
    describe_sweep,
    find_variant,
    list_paths,
    list_seeds,
    list_sets,
    load_arms,
    read_losses,
    select_finished,
)
from stackexp.reports.report import LINE_STYLES, MARKERS, PALETTE, Report, Table, new_figure
from stackexp.reports.training_data import compare_data, read_training_data, select_data_options
from stackexp.sweeps.schema import format_value, shorten_keys
from stackexp.tables import ABSENT

BASELINE = "Transformer"
SIZES = {
    *(*MODEL_SIZES, "model.slot_size", "model.num_slots", "model.tie_embeddings"),
    *("optimizer.lr", "optimizer.memory_lr", "data.global_batch_tokens"),
    *("schedule.warmup_steps", "schedule.decay_steps"),
}
"""Options that may differ between the sizes of a family. So may the integers of a memory."""
SAME_RATIO = 0.1  # tokens per parameter of a ladder differ by less than this much in their logarithm
QUANTITIES = {"parameters": "tokens", "tokens": "backbone"}
"""The quantity of each panel -> the quantity that is held fixed there."""
NUM_RESAMPLES = 2000
MIN_POINTS = 4
"""Bands need this many points: fewer residuals say nothing about the spread."""
LEGEND_WIDTH = 36  # characters
REMEDY = "run `python -m stackexp validate --run RUN` (V2, V3: `--sets v2,v3`), or choose another --loss"


class Point(NamedTuple):
    """A finished run of an arm. `backbone` are its parameters outside the memory; `baseline` is a family."""

    family: str
    parameters: int
    backbone: int
    tokens: int
    seed: int
    loss: float
    arm: str = ""
    baseline: str = BASELINE
    path: str = ""

    @property
    def ratio(self) -> float:
        """Tokens per parameter outside the memory."""
        return self.tokens / self.backbone


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
    """The runs of a panel, and the fit of each family. All runs have the `value` of the field `fixed` in common."""

    quantity: str
    fixed: str
    value: float
    points: list[Point]
    laws: dict[str, PowerLaw]

    @property
    def condition(self) -> str:
        """The value that all runs have in common, as text."""
        if self.fixed == "ratio":
            return f"{self.value:.3g} tokens per parameter outside the memory"
        return f"{abbreviate(self.value)} {'tokens' if self.fixed == 'tokens' else 'parameters outside the memory'}"


class Ladder(NamedTuple):
    """The finished runs at or below some paths, and the column and the sets that their losses are of.

    `left_out` and `notes` describe other runs, `source` is the command that fills the ladder.
    """

    points: list[Point]
    rows: list[Row]
    column: str
    sets: frozenset[str]
    left_out: list[str]
    notes: list[str]
    source: str


def build_scaling(
    paths: Sequence[Path],
    measure: str | None = None,
    irreducible: float = 0.0,
    by: Sequence[str] = (),
    forecast: Path | None = None,
    size: int | None = None,
    tokens: int | None = None,
) -> Report:
    """Build the report of all finished runs at or below `paths`.

    `measure` is a column of `report ablation`; by default V2, or the average of the other sets, or the training loss:
    the first that all runs have. `irreducible` is the loss in the limit of infinite size. Families differ in their
    memory and in the options `by`. With `forecast`, returns `build_forecast` instead. Raises RunError if there is
    nothing to fit.
    """
    if forecast:
        from stackexp.reports.forecast import build_forecast  # it imports this module

        return build_forecast(paths, measure, irreducible, by, forecast, size, tokens)
    if not 0 <= irreducible < math.inf:
        raise ConfigError(f"--irreducible {irreducible:g}: not a loss; use 0 or a positive number")
    points, rows, column, _, left_out, notes, source = load_ladder(paths, measure, irreducible, by)
    panels = [panel for quantity in QUANTITIES if (panel := select_series(points, quantity, irreducible))]
    if not panels:
        reason = "nothing to fit: no family has two sizes with equal tokens, or two lengths with equal parameters"
        raise RunError("; ".join([f"{', '.join(map(str, paths))}: {reason}", *left_out, source]))
    explanation = [
        f"Loss: {column}. Fit: loss = {irreducible:g} + factor / size^exponent, least squares in logarithms. "
        "Another irreducible loss gives other exponents (--irreducible).",
        "A family is the paper's variant or a kind of memory; --by KEY,... separates families by options as well.",
        "Intervals are 95 %, by bootstrap of the residuals, for families of four runs or more. Bold or *: the interval "
        "excludes 1.",
        f"Equivalent factor: how many times as many parameters or tokens the {BASELINE} needs for the same loss, at "
        "the largest number that both families have. Extrapolated: beyond the numbers run.",
    ]
    conditions = [f"Loss against {panel.quantity}: runs with {panel.condition}." for panel in panels]
    unused = [line for panel in panels for line in _describe_unused(points, panel)]
    mixed = _describe_mixed(rows, points)
    return Report(
        [Table("Power laws", *_build_table(panels), num_labels=2)],
        [source, *explanation, *conditions, *mixed, *unused, *left_out, *notes],
        [{"measure": column} | p._asdict() for p in points],
        lambda: draw_panels(panels, column),
    )


# Families and points


def load_ladder(
    paths: Sequence[Path], measure: str | None = None, irreducible: float = 0.0, by: Sequence[str] = ()
) -> Ladder:
    """Read all finished runs at or below `paths`. Arguments as for `build_scaling`. Raises RunError without runs."""
    arms, notes = load_arms(paths)
    rows = [row | {"arm": arm} for arm in arms for row in select_finished(arms[arm])]
    if unknown := [key for key in by if not any(key in row for row in rows)]:
        raise ConfigError(f"--by {unknown[0]}: no run has this option; use a key such as optimizer.lr")
    source = describe_sweep(paths, "ladder")
    if not rows:
        raise RunError("; ".join([f"{', '.join(map(str, paths))}: no finished runs", source, *notes]))
    column = choose_column(measure, [read_losses(row) for row in rows])
    points, sets, left_out = _read_points(rows, column, irreducible, shorten_keys(by))
    return Ladder(points, rows, column, sets, left_out, notes, source)


def name_family(row: Row, by: Mapping[str, str]) -> str:
    """Return the family of a run: the paper's variant or the kind of memory, with its values of options.

    `by` are these options: {key: its short name}.
    """
    memory = find_variant(row) or row.get("model.memory.kind") or row.get("model.kind", BASELINE)
    values = ", ".join(f"{name}={format_value(row.get(key))}" for key, name in by.items())
    return f"{memory} ({values})" if values else memory


def _describe_mixed(rows: Sequence[Row], points: Sequence[Point]) -> list[str]:
    """Return notes about families whose runs differ in other options than sizes, or in any option at one size."""
    used = {(p.arm, p.seed): p for p in points}
    families: dict[str, list[tuple[Point, dict[str, Any]]]] = defaultdict(list)
    for row in rows:
        if point := used.get((row["arm"], row["seed"])):
            families[point.family].append((point, get_options(row)))
    notes = []
    for family, members in families.items():
        first = {(p.backbone, p.tokens): options for p, options in reversed(members)}
        mixed: dict[str, None] = {}
        for p, options in members:
            for key in find_changed_keys(members[0][1], options, ["training"]):
                is_memory_size = key.startswith("model.memory.") and type(options.get(key)) is int
                if key not in SIZES and not is_memory_size:
                    mixed[key] = None
            mixed |= dict.fromkeys(find_changed_keys(first[p.backbone, p.tokens], options, ["training"]))
        if keys := [key for key in mixed if key != "seed"]:
            notes.append(f"{family} has runs with different options, --by separates them: {', '.join(keys)}")
    return notes


def _read_points(
    rows: Sequence[Row], column: str, irreducible: float, by: Mapping[str, str]
) -> tuple[list[Point], frozenset[str], list[str]]:
    """Return the points of the finished runs, the sets of their losses, and notes about runs that are left out."""
    sets = [list_sets(row, column) for row in rows]
    losses = [read_losses(row).get(column, (math.nan, None))[0] for row in rows]
    if all(map(math.isnan, losses)):
        raise RunError(f"no finished run has a loss in column {column!r}; {REMEDY}")
    if not any(loss > irreducible for loss in losses):
        highest = max(loss for loss in losses if not math.isnan(loss))
        raise ConfigError(
            f"--irreducible {irreducible:g}: above every loss ({column}, at most {highest:.3f}); use less"
        )
    scored = [own for own, loss in zip(sets, losses, strict=True) if not math.isnan(loss)]
    most = max(scored, key=scored.count)  # the first one if several have the same number
    runs_on_other_data, unrecorded = _find_other_data(rows)
    points: list[Point] = []
    skipped: list[tuple[str, str, int]] = []
    outside = {key: name for key, name in by.items() if not key.startswith(("model.memory.", "warm_start.memory"))}
    for row, own, loss in zip(rows, sets, losses, strict=True):
        reason = ""
        if math.isnan(loss):
            reason = f"no {column}, {REMEDY}"
        elif own != most:
            reason = "scored on other sets than most runs"
        elif loss <= irreducible:
            reason = f"no {column} above {irreducible:g}"
        elif row["path"] in runs_on_other_data:
            reason = runs_on_other_data[row["path"]]
        elif not (row.get("tokens") and row.get("parameters") and "memory_parameters" in row):
            reason = "no parameters or tokens in result.json"
        if reason:
            skipped.append((f"left out, {reason}", row["arm"], row["seed"]))
        else:
            baseline = name_family(row | {"model.memory.kind": None, "model.kind": "transformer"}, outside)
            sizes = (row["parameters"], row["parameters"] - row["memory_parameters"], row["tokens"])
            points.append(Point(name_family(row, by), *sizes, row["seed"], loss, row["arm"], baseline, row["path"]))
    notes = [*list_seeds(skipped), *list_paths("without recorded training data, not compared", unrecorded)]
    return points, frozenset(name for name, _ in most), notes


def _find_other_data(rows: Sequence[Row]) -> tuple[dict[str, str], list[Row]]:
    """Return why runs are left out because of their training data, by path, and the runs without a record.

    Runs with the same seed and data options are compared up to the end of the shorter one. Those that differ from most
    of them are left out; of two halves, the one without a Transformer.
    """
    reasons: dict[str, str] = {}
    unrecorded = []
    groups: dict[str, list[tuple[Row, dict[Any, Any]]]] = defaultdict(list)
    for row in rows:
        try:
            data = read_training_data(row)
        except RunError as error:
            reasons[row["path"]] = str(error)
            continue
        if data:
            groups[repr((row["seed"], sorted(select_data_options(row).items())))].append((row, data))
        else:
            unrecorded.append(row)
    for group in groups.values():
        counts = [sum(not any(compare_data(own, other)) for _, other in group) for _, own in group]
        ranks = [(count, find_variant(row) == BASELINE) for count, (row, _) in zip(counts, group, strict=True)]
        reference = group[ranks.index(max(ranks))][1]
        for row, own in group:
            difference, unknown = compare_data(own, reference)
            if difference:
                reasons[row["path"]] = "trained on other data than most runs with the same seed and data options"
            elif unknown:
                unrecorded.append(row)
    return reasons, unrecorded


def _describe_unused(points: list[Point], panel: Series) -> list[str]:
    """Return notes about the runs that a panel does not show."""
    skipped = []
    for point in [point for point in points if point not in panel.points]:
        has_sizes = len({get_size(p, panel.quantity) for p in points if p.family == point.family}) > 1
        reason = f"not one of two sizes with {panel.condition}" if has_sizes else "its family has one size"
        skipped.append((f"not in loss against {panel.quantity}, {reason}", point.arm, point.seed))
    return list_seeds(skipped)


def select_series(points: list[Point], quantity: str, irreducible: float = 0.0) -> Series | None:
    """Return the runs for one panel: those that share a value of the other quantity and make the best comparison.

    It has the most families with two sizes, then the most sizes. In a ladder, every size has its own budget: if runs
    with about equal tokens per parameter make a better comparison, loss against parameters uses these. Returns None if
    no family has two sizes.
    """
    fixed = QUANTITIES[quantity]
    groups: dict[float, list[Point]] = defaultdict(list)
    for point in points:
        groups[getattr(point, fixed)].append(point)
    value, best = max(groups.items(), key=lambda item: _rank_group(item[1], quantity), default=(0, []))
    near = [[p for p in points if abs(math.log(p.ratio / other.ratio)) < SAME_RATIO] for other in points]
    ladder = max(near, key=lambda group: _rank_group(group, quantity), default=[])
    if quantity == "parameters" and _rank_group(ladder, quantity) > _rank_group(best, quantity):
        best, fixed, value = ladder, "ratio", sum(p.tokens for p in ladder) / sum(p.backbone for p in ladder)
    families = sorted({p.family for p in best}, key=lambda family: (not family.startswith(BASELINE), family))
    members = {family: [p for p in best if p.family == family] for family in families}
    members = {family: runs for family, runs in members.items() if _rank_group(runs, quantity) > (0, 0)}
    laws = {
        family: fit_power_law([getattr(p, quantity) for p in runs], [p.loss for p in runs], irreducible)
        for family, runs in members.items()
    }
    return Series(quantity, fixed, value, [p for runs in members.values() for p in runs], laws) if laws else None


def get_size(point: Point, quantity: str) -> int:
    """Return the size that distinguishes runs of a family: models with other memories only are not other sizes."""
    return point.backbone if quantity == "parameters" else point.tokens


def _rank_group(points: list[Point], quantity: str) -> tuple[int, int]:
    """Return the number of families with two sizes or more, and the largest number of sizes of one of them, or 0."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for point in points:
        sizes[point.family].add(get_size(point, quantity))
    counts = [len(own) for own in sizes.values() if len(own) > 1]
    return len(counts), max(counts, default=0)


# Power laws


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


def _percentiles(values: Any) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5], method="nearest")  # no mean of infinities
    return float(low), float(high)


# Output


def _build_table(panels: Sequence[Series]) -> tuple[list[str], list[list[str]]]:
    header = ["panel", "family", "sizes", "runs", "exponent", "95 % interval", "equivalent factor", "95 % interval"]
    rows = []
    for panel in panels:
        sizes = {f: [getattr(p, panel.quantity) for p in panel.points if p.family == f] for f in panel.laws}
        baselines = {p.family: p.baseline for p in panel.points}
        for family, law in panel.laws.items():
            count = len({get_size(p, panel.quantity) for p in panel.points if p.family == family})
            row = [panel.quantity, family, str(count), str(len(sizes[family]))]
            row += [f"{law.exponent:.4f}", _format_interval(law.interval())]
            baseline = baselines[family]
            base = panel.laws.get(baseline)
            if base and law is not base and base.exponent > 0:
                size = min(max(sizes[family]), max(sizes[baseline]))
                factor, interval = equivalent_factor(law, base, size)
                is_inside = min(sizes[baseline]) <= factor * size <= max(sizes[baseline])
                text = f"{factor:.3f}" + ("" if is_inside else " extrapolated")
                excludes_one = interval is not None and (interval[0] > 1 or interval[1] < 1)
                row += [f"**{text}**" if excludes_one else text, _format_interval(interval)]
            rows.append(row + [ABSENT] * (len(header) - len(row)))
    return header, rows


def _format_interval(interval: tuple[float, float] | None) -> str:
    return "{:.3f} to {:.3f}".format(*interval) if interval else ABSENT


def abbreviate(value: float) -> str:
    """Return a number of tokens or parameters as 283M or 20B."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")(float(f"{value:.3g}")).replace("G", "B")


def draw_panels(panels: Sequence[Series], column: str) -> Any:
    """Draw each panel: the runs, the fit of each family and its band. The legend is on the right."""
    from matplotlib.ticker import NullLocator

    families = list(dict.fromkeys(family for panel in panels for family in panel.laws))
    labels = {family: textwrap.fill(family, LEGEND_WIDTH) for family in families}
    lines = sum(label.count("\n") + 1 for label in labels.values())
    figure, _ = new_figure(4.6 * len(panels) + 2.6, max(4.2, 0.2 * lines + 0.4), columns=len(panels))
    handles = {}
    for axes, panel in zip(figure.axes, panels, strict=True):
        for family in panel.laws:
            handles[labels[family]] = _draw_family(axes, panel, family, families.index(family))
        axes.set(
            xscale="log", yscale="log", xlabel=panel.quantity.capitalize(), ylabel=f"Loss ({column}, nats per token)"
        )
        axes.set_title(panel.condition, fontsize=9)
        ticks = sorted({getattr(p, panel.quantity) for p in panel.points if p.family == panel.points[0].family})
        axes.set_xticks(ticks, [abbreviate(tick) for tick in ticks], fontsize=8)
        axes.xaxis.set_minor_locator(NullLocator())
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter("{x:.4g}")
        axes.grid(alpha=0.3, which="both")
    figure.legend(handles.values(), handles, fontsize=8, loc="outside right upper")
    return figure


def _draw_family(axes: Any, panel: Series, family: str, i: int) -> Any:
    """Draw a family and return its line for the legend. Color and marker together are unique for 64 families."""
    points, color = [p for p in panel.points if p.family == family], PALETTE[i % len(PALETTE)]
    shift = i + i // len(PALETTE)
    marker, style = MARKERS[shift % len(MARKERS)], LINE_STYLES[shift % len(LINE_STYLES)]
    sizes, law = [getattr(p, panel.quantity) for p in points], panel.laws[family]
    axes.plot(sizes, [p.loss for p in points], marker, color=color, markersize=5)
    grid = np.geomspace(min(sizes), max(sizes), 100)
    axes.plot(grid, law.predict(grid), style, color=color, linewidth=1.3)
    if len(law.samples):
        axes.fill_between(grid, *law.predict_band(grid), color=color, alpha=0.18, linewidth=0)
    return axes.plot([], [], marker + style, color=color, markersize=5, linewidth=1.3)[0]
