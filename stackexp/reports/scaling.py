"""The paper's scaling figure: loss against parameters and against tokens, a power law for each family of models."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stackexp.reports.arms import describe_unfinished, name_memory, read_arms
from stackexp.reports.differences import OTHER, TRAINING, name_sets, read_losses
from stackexp.reports.figures import new_figure
from stackexp.reports.missing_runs import describe_sweeps, find_sweeps
from stackexp.reports.power_law import PowerLaw, equivalent_factor, fit_power_law
from stackexp.reports.report import LINE_STYLES, MARKERS, PALETTE, Report, Table
from stackexp.tables import ABSENT

BASELINE = "Transformer"
SAME_RATIO = 0.1  # tokens per parameter of a ladder differ by less than this much in their logarithm
QUANTITIES = {"parameters": "tokens", "tokens": "backbone"}
"""The quantity of each panel -> the quantity that is held fixed there."""
COMMON = {"parameters": "tokens", "tokens": "parameters outside the memory"}


class Point(NamedTuple):
    """A finished run. `backbone` are its parameters outside the memory."""

    family: str
    parameters: int
    backbone: int
    tokens: int
    seed: int
    loss: float


class Series(NamedTuple):
    """The runs of a panel, and the quantity that all of them have in common."""

    quantity: str
    condition: str
    points: list[Point]
    laws: dict[str, PowerLaw]


def build_scaling(paths: Sequence[Path], measure: str | None = None, irreducible: float = 0.0) -> Report:
    """Build the report of all finished runs at or below `paths`.

    `measure` is a column of `report ablation`; by default V2, or the average of the other sets, or the training loss:
    the first that all runs have. `irreducible` is the loss that no size would remove.
    """
    arms, notes = read_arms(paths)
    runs = [run for arm in arms for run in arm.runs]
    columns = [measure] if measure else ["V2", OTHER, TRAINING]
    column = next((c for c in columns if all(c in read_losses(run) for run in runs)), columns[-1])
    names = [name_sets(run, column) for run in runs]
    points = []
    for run, sets in zip(runs, names, strict=True):
        losses, tokens = read_losses(run), run.result.get("tokens")
        total, memory = (run.result.get(key) for key in ("parameters", "memory_parameters"))
        if names.count(sets) < max(map(names.count, names)):
            notes.append(f"left out, scored on other sets than most runs: {run.folder.path}")
        elif column in losses and losses[column][0] > irreducible and total and tokens and memory is not None:
            points.append(Point(name_memory(run.config), total, total - memory, tokens, run.seed, losses[column][0]))
        else:
            notes.append(f"left out, no {column} above {irreducible:g}: {run.folder.path}")
    panels = [select_series(points, quantity, irreducible) for quantity in QUANTITIES]
    missing = [
        f"missing loss against {quantity}: needs two sizes of a family with equal {COMMON[quantity]}, or equal tokens "
        "per parameter: `python -m stackexp sweep run ladder`"
        for quantity, panel in zip(QUANTITIES, panels, strict=True)
        if panel is None
    ]
    shown = [panel for panel in panels if panel]
    legend = [
        f"Loss: {column}. Fit: loss = {irreducible:g} + factor / size^exponent, least squares in logarithms. "
        "Another irreducible loss gives other exponents (--irreducible).",
        "Intervals are 95 %, by bootstrap of the residuals, for families of four runs or more. Bold or *: the interval "
        "excludes 1.",
        f"Equivalent factor: how many times as many parameters or tokens the {BASELINE} needs for the same loss, at "
        "the largest number that both families have. Extrapolated: beyond the numbers that were run.",
    ]
    notes = [*legend, *missing, *describe_unfinished(arms), *describe_sweeps(find_sweeps(paths)), *notes]
    records = [{"measure": column} | p._asdict() for p in points]
    rows = [row for panel in shown for row in _build_rows(panel)]
    header = ["panel", "family", "runs", "exponent", "95 % interval", "equivalent factor", "95 % interval"]
    table = Table("Power laws", header, rows, num_labels=2)
    return Report([table], notes, records, (lambda: draw_panels(shown, column)) if shown else None)


def select_series(points: list[Point], quantity: str, irreducible: float = 0.0) -> Series | None:
    """Return the runs that show the effect of a quantity: those at the fixed value with the most sizes.

    In a ladder, every size has its own budget. If more sizes have about equal tokens per parameter, these are chosen.
    Returns None if there are fewer than two sizes.
    """
    fixed = QUANTITIES[quantity]
    groups: dict[float, list[Point]] = defaultdict(list)
    for point in points:
        groups[getattr(point, fixed)].append(point)
    value, best = max(groups.items(), key=lambda item: (_count_sizes(item[1], quantity), item[0]), default=(0, []))
    condition = f"{_abbreviate(value)} {'tokens' if fixed == 'tokens' else 'parameters outside the memory'}"
    ratios = [p.tokens / p.backbone for p in points]
    near = [[p for p in points if abs(math.log(p.tokens / p.backbone / ratio)) < SAME_RATIO] for ratio in ratios]
    ladder = max(near, key=lambda group: _count_sizes(group, quantity), default=[])
    if _count_sizes(ladder, quantity) > _count_sizes(best, quantity):
        ratio = sum(p.tokens for p in ladder) / sum(p.backbone for p in ladder)
        best, condition = ladder, f"{ratio:.3g} tokens per parameter outside the memory"
    if _count_sizes(best, quantity) < 2:
        return None
    families = sorted({p.family for p in best}, key=lambda family: (family != BASELINE, family))
    members = {family: [p for p in best if p.family == family] for family in families}
    laws = {
        family: fit_power_law([getattr(p, quantity) for p in runs], [p.loss for p in runs], irreducible)
        for family, runs in members.items()
        if _count_sizes(runs, quantity) >= 2
    }
    return Series(quantity, condition, [p for runs in members.values() for p in runs], laws)


def _count_sizes(points: list[Point], quantity: str) -> int:
    """Return the largest number of sizes that a family has."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for point in points:
        sizes[point.family].add(getattr(point, quantity))
    return max(map(len, sizes.values()), default=0)


def _build_rows(panel: Series) -> list[list[str]]:
    rows, base = [], panel.laws.get(BASELINE)
    sizes = {f: [getattr(p, panel.quantity) for p in panel.points if p.family == f] for f in panel.laws}
    for family, law in panel.laws.items():
        row = [panel.quantity, family, str(len(sizes[family])), f"{law.exponent:.4f}", _format_interval(law.interval())]
        if base and law is not base and base.exponent > 0:
            size = min(max(sizes[family]), max(sizes[BASELINE]))
            factor, interval = equivalent_factor(law, base, size)
            is_inside = min(sizes[BASELINE]) <= factor * size <= max(sizes[BASELINE])
            text = f"{factor:.3f}" + ("" if is_inside else " extrapolated")
            excludes_one = interval is not None and (interval[0] > 1 or interval[1] < 1)
            row += [f"**{text}**" if excludes_one else text, _format_interval(interval)]
        rows.append(row + [ABSENT] * (7 - len(row)))
    return rows


def _format_interval(interval: tuple[float, float] | None) -> str:
    return "{:.3f} to {:.3f}".format(*interval) if interval else ABSENT


def _abbreviate(value: float) -> str:
    """Return a number of tokens or parameters as 283M or 20B."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")(float(f"{value:.3g}")).replace("G", "B")


def draw_panels(panels: list[Series], column: str) -> Any:
    """Draw each panel: the runs, the fit of each family and its band."""
    from matplotlib.ticker import NullLocator

    figure, _ = new_figure(4.6 * len(panels), 4.2, columns=len(panels))
    for axes, panel in zip(figure.axes, panels, strict=True):
        for i, family in enumerate(dict.fromkeys(point.family for point in panel.points)):
            _draw_family(axes, panel, family, i)
        axes.set(
            xscale="log", yscale="log", xlabel=panel.quantity.capitalize(), ylabel=f"Loss ({column}, nats per token)"
        )
        axes.set_title(panel.condition, fontsize=9)
        ticks = sorted({getattr(p, panel.quantity) for p in panel.points if p.family == panel.points[0].family})
        axes.set_xticks(ticks, [_abbreviate(tick) for tick in ticks], fontsize=8)
        axes.xaxis.set_minor_locator(NullLocator())
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter("{x:.4g}")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18))  # inside, it would hide points
    return figure


def _draw_family(axes: Any, panel: Series, family: str, i: int) -> None:
    points, color = [p for p in panel.points if p.family == family], PALETTE[i % len(PALETTE)]
    sizes = [getattr(p, panel.quantity) for p in points]
    axes.plot(sizes, [p.loss for p in points], MARKERS[i % len(MARKERS)], color=color, markersize=5, label=family)
    if law := panel.laws.get(family):
        grid = np.geomspace(min(sizes), max(sizes), 100)
        axes.plot(grid, law.predict(grid), LINE_STYLES[i % len(LINE_STYLES)], color=color, linewidth=1.3)
        if len(law.samples):
            axes.fill_between(grid, *law.predict_band(grid), color=color, alpha=0.18, linewidth=0)
