"""The paper's scaling figure: loss against parameters and against tokens, a power law for each family of models."""

import math
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stackexp.errors import RunError
from stackexp.reports.arms import Arm, ArmRun, describe_unfinished, name_memory, read_arms
from stackexp.reports.compare import check_same_data
from stackexp.reports.differences import OTHER, TRAINING, name_sets, read_losses
from stackexp.reports.families import name_families, read_changes
from stackexp.reports.figures import new_figure
from stackexp.reports.missing_runs import describe_sweeps, find_sweeps
from stackexp.reports.power_law import BASELINE, QUANTITIES, Point, Series, abbreviate, equivalent_factor, select_series
from stackexp.reports.report import LINE_STYLES, MARKERS, PALETTE, Report, Table
from stackexp.tables import ABSENT

LEGEND_WIDTH = 36  # characters
COMMAND = "python -m stackexp sweep run ladder"
MISSING = {
    "parameters": f"needs two sizes of a family with equal tokens, or equal tokens per parameter: `{COMMAND}`",
    "tokens": "needs a family with equal parameters and two budgets: `python -m stackexp sweep run ladder_tokens`",
}
REMEDIES = {
    **{group: f"run `python -m stackexp validate --run RUN --sets {group.lower()}`" for group in ("V2", "V3")},
    OTHER: "run `python -m stackexp validate --run RUN`",
    TRAINING: "choose another --loss",
}
"""Column -> how to get its losses."""


def build_scaling(paths: Sequence[Path], measure: str | None = None, irreducible: float = 0.0) -> Report:
    """Build the report of all finished runs at or below `paths`.

    `measure` is a column of `report ablation`; by default V2, or the average of the other sets, or the training loss:
    the first that all runs have. `irreducible` is the loss that no size would remove. Raises RunError if there is
    nothing to fit.
    """
    if not 0 <= irreducible < math.inf:
        raise RunError(f"--irreducible {irreducible:g}: not a loss; use 0 or a positive number")
    arms, notes = read_arms(paths)
    runs, columns = [run for arm in arms for run in arm.runs], [measure] if measure else ["V2", OTHER, TRAINING]
    column = next((c for c in columns if all(c in read_losses(run) for run in runs)), columns[-1])
    waiting = [*describe_sweeps(find_sweeps(paths)), *describe_unfinished(arms)]
    where = ", ".join(map(str, paths))
    if not runs:
        raise RunError(f"{where}: no finished runs; {waiting[0]}")
    points, skipped = _read_points(arms, column, irreducible)
    panels = [select_series(points, quantity, irreducible) for quantity in QUANTITIES]
    shown = [panel for panel in panels if panel]
    if not shown:
        command = waiting[0] if waiting else f"run `{COMMAND}`"
        reason = "nothing to fit: no family has two sizes with equal tokens, or two lengths with equal parameters"
        raise RunError("; ".join([f"{where}: {reason}", *skipped, command]))
    missing = [
        f"missing loss against {quantity}: {MISSING[quantity]}"
        for quantity, panel in zip(QUANTITIES, panels, strict=True)
        if panel is None
    ]
    unused = [line for panel in shown for line in _describe_unused(points, panel)]
    conditions = [f"Loss against {panel.quantity}: runs with {panel.condition}." for panel in shown]
    notes = [*_explain(column, irreducible), *conditions, *missing, *unused, *skipped, *waiting, *notes]
    records = [{"measure": column} | p._asdict() for p in points]
    rows = [row for panel in shown for row in _build_rows(panel)]
    header = ["panel", "family", "sizes", "runs", "exponent", "95 % interval", "equivalent factor", "95 % interval"]
    return Report([Table("Power laws", header, rows, num_labels=2)], notes, records, lambda: draw_panels(shown, column))


def _explain(column: str, irreducible: float) -> list[str]:
    """Return the notes that explain the table."""
    return [
        f"Loss: {column}. Fit: loss = {irreducible:g} + factor / size^exponent, least squares in logarithms. "
        "Another irreducible loss gives other exponents (--irreducible).",
        "A family has the same training options, except for sizes, learning rate, batch, warmup and seed. Its name has "
        "the options that other runs do not share.",
        "Intervals are 95 %, by bootstrap of the residuals, for families of four runs or more. Bold or *: the interval "
        "excludes 1.",
        f"Equivalent factor: how many times as many parameters or tokens the {BASELINE} with the same options needs "
        "for the same loss, at the largest number that both families have. Extrapolated: beyond the numbers run.",
    ]


def _read_points(arms: list[Arm], column: str, irreducible: float) -> tuple[list[Point], list[str]]:
    """Return the points of the finished runs, and notes about those that are left out."""
    named = [(arm.name, run) for arm in arms for run in arm.runs]
    runs = [run for _, run in named]
    sets = [name_sets(run, column) for run in runs]
    losses = [read_losses(run).get(column, (math.nan, None))[0] for run in runs]
    if all(map(math.isnan, losses)):
        raise RunError(f"no finished run has a loss in column {column!r}; {REMEDIES[column]}")
    if not any(loss > irreducible for loss in losses):
        highest = max(loss for loss in losses if not math.isnan(loss))
        raise RunError(f"--irreducible {irreducible:g}: above every loss ({column}, at most {highest:.3f}); use less")
    scored = [own for own, loss in zip(sets, losses, strict=True) if not math.isnan(loss)]
    most = max(scored, key=scored.count)  # of equally many, the first
    strangers, notes = _find_other_data(runs)
    points: list[Point] = []
    skipped: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for (name, run), own, loss, family in zip(named, sets, losses, name_families(runs), strict=True):
        tokens, total, memory = (run.result.get(key) for key in ("tokens", "parameters", "memory_parameters"))
        if math.isnan(loss):
            skipped[f"no {column}, {REMEDIES[column]}"].append((name, run.seed))
        elif own != most:
            skipped["scored on other sets than most runs"].append((name, run.seed))
        elif loss <= irreducible:
            skipped[f"no {column} above {irreducible:g}"].append((name, run.seed))
        elif run.folder.path in strangers:
            skipped[strangers[run.folder.path]].append((name, run.seed))
        elif not (total and tokens and memory is not None):
            skipped["no parameters or tokens in result.json"].append((name, run.seed))
        else:
            points.append(Point(family.name, total, total - memory, tokens, run.seed, loss, name, family.baseline))
    return points, [*_describe_skipped("left out", skipped), *notes]


def _describe_skipped(start: str, skipped: Mapping[str, list[tuple[str, int]]]) -> list[str]:
    """Return a note for each reason, which counts and names its runs by arm and seed."""
    notes = []
    for reason, runs in skipped.items():
        seeds = {name: sorted(seed for other, seed in runs if other == name) for name, _ in runs}
        names = (f"{name} (seed{'s' * (len(s) > 1)} {', '.join(map(str, s))})" for name, s in seeds.items())
        notes.append(f"{start}, {reason}, {len(runs)} run{'s' * (len(runs) > 1)}: {', '.join(names)}")
    return notes


def _describe_unused(points: list[Point], panel: Series) -> list[str]:
    """Return notes about the runs that a panel does not show."""
    skipped: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for point in [point for point in points if point not in panel.points]:
        has_sizes = len({getattr(p, panel.quantity) for p in points if p.family == point.family}) > 1
        reason = f"not one of two sizes with {panel.condition}" if has_sizes else "its family has one size"
        skipped[reason].append((point.run, point.seed))
    return _describe_skipped(f"not in loss against {panel.quantity}", skipped)


def _find_other_data(runs: list[ArmRun]) -> tuple[dict[Path, str], list[str]]:
    """Return why runs are left out because of their training data, by folder, and a note about missing records.

    Runs with the same seed and data options are compared up to the end of the shorter one. Those that differ from most
    of them are left out; of two halves, the one without a Transformer.
    """
    reasons: dict[Path, str] = {}
    unrecorded: list[str] = []
    groups: dict[str, list[list[ArmRun]]] = defaultdict(list)
    for run in runs:
        try:
            if check_same_data([run.folder]):
                unrecorded.append(str(run.folder.path))
                continue
        except RunError as error:
            reasons[run.folder.path] = str(error)
            continue
        data = {key: value for key, value in read_changes(run.config).items() if key.startswith("data.")}
        parts = groups[repr((run.seed, data))]
        part = next((part for part in parts if _has_same_data(part[0], run)), [])
        if not part:
            parts.append(part)
        elif check_same_data([part[0].folder, run.folder]):
            unrecorded.append(str(run.folder.path))
        part.append(run)
    for parts in groups.values():
        most = max(parts, key=lambda part: (len(part), any(name_memory(run.config) == BASELINE for run in part)))
        others = [run.folder.path for part in parts if part is not most for run in part]
        reasons |= dict.fromkeys(others, "trained on other data than most runs with the same seed and data options")
    note = f"training data not compared, no record of a step that other runs recorded: {', '.join(unrecorded)}"
    return reasons, [note] if unrecorded else []


def _has_same_data(run: ArmRun, other: ArmRun) -> bool:
    try:
        check_same_data([run.folder, other.folder])
    except RunError:
        return False
    return True


def _build_rows(panel: Series) -> list[list[str]]:
    rows, baselines = [], {p.family: p.baseline for p in panel.points}
    sizes = {f: [getattr(p, panel.quantity) for p in panel.points if p.family == f] for f in panel.laws}
    for family, law in panel.laws.items():
        counts = [str(len(set(sizes[family]))), str(len(sizes[family]))]
        row = [panel.quantity, family, *counts, f"{law.exponent:.4f}", _format_interval(law.interval())]
        baseline = baselines[family]
        base = panel.laws.get(baseline)
        if base and law is not base and base.exponent > 0:
            size = min(max(sizes[family]), max(sizes[baseline]))
            factor, interval = equivalent_factor(law, base, size)
            is_inside = min(sizes[baseline]) <= factor * size <= max(sizes[baseline])
            text = f"{factor:.3f}" + ("" if is_inside else " extrapolated")
            excludes_one = interval is not None and (interval[0] > 1 or interval[1] < 1)
            row += [f"**{text}**" if excludes_one else text, _format_interval(interval)]
        rows.append(row + [ABSENT] * (8 - len(row)))
    return rows


def _format_interval(interval: tuple[float, float] | None) -> str:
    return "{:.3f} to {:.3f}".format(*interval) if interval else ABSENT


def draw_panels(panels: list[Series], column: str) -> Any:
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
