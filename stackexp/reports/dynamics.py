"""The paper's figure of training dynamics: raw and smoothed training loss, with the crossings of the baseline."""

from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stackexp.errors import RunError
from stackexp.frame import Row
from stackexp.metric_tags import TRAIN_LOSS
from stackexp.reports.arms import (
    Arms,
    compare_arms,
    compute_difference,
    describe_sweep,
    find_arm,
    find_baseline,
    list_seeds,
    load_arms,
    rank_arm,
)
from stackexp.reports.compare import read_curve
from stackexp.reports.report import LINE_STYLES, PALETTE, Report, Table, abbreviate_thousands, new_figure, smooth_losses
from stackexp.reports.training_data import explain_other_data
from stackexp.runs import RunFolder
from stackexp.tables import ABSENT

if TYPE_CHECKING:
    import pandas as pd

MAX_CURVES = 6
SMOOTHED_FRACTION = 0.04  # averaging window as a share of the steps
LEGEND = (
    "Losses are means over the seeds. Smoothed: centered moving average, cut off at both ends. Differences: over "
    "seeds and tokens that both have, without runs on other data or another number of tokens; in parentheses the "
    "95 % interval over several seeds (Student's t), bold or * if it excludes zero. Crossing: the "
    "smoothed difference changes its sign for at least one window; with the default window, the curves of two "
    "equal models cross about five times. Parameters and FLOPs per token are not matched; their residual mismatch "
    "is given."
)


class Curve(NamedTuple):
    """The training losses of an arm [N, seeds], over the tokens as index, NaN where a seed has none.

    `late` are seeds that are left out, because they have fewer than half of the tokens of the others.
    """

    name: str
    losses: "pd.DataFrame"
    window: int
    late: tuple[int, ...] = ()

    @property
    def raw(self) -> "pd.Series":
        """The mean over the tokens that all seeds have."""
        return self.losses.dropna().mean(axis=1)

    @property
    def smoothed(self) -> "pd.Series":
        """The moving average over `window` steps."""
        return smooth_losses(self.raw, self.window)


class Crossing(NamedTuple):
    """The smoothed difference from the baseline over common tokens [N], and the tokens where its sign changes.

    `last` is the difference of each seed at the last of these tokens.
    """

    difference: "pd.Series"
    crossings: list[int]
    last: list[float]


def build_dynamics(
    paths: Sequence[Path], only: Sequence[str] = (), baseline: str | None = None, smooth: int | None = None
) -> Report:
    """Build the report of the runs at or below `paths`, unfinished ones included.

    `only` names arms; by default all, or the paper's two if there are many. `smooth` is the number of steps in a
    moving average, by default 4 % of the steps.
    """
    found, skipped = load_arms(paths)
    read = {name: curve for name, rows in found.items() if (curve := read_arm(name, rows, smooth))}
    remedy = "give runs that have made a step, not copies"
    named = [find_arm(found, name) for name in (*only, *([baseline] if baseline else []))]
    if unread := [name for name in named if name not in read] or ([] if read else [*map(str, paths)]):
        raise RunError(f"{', '.join(unread)}: no training losses in metrics.jsonl; {remedy}")
    arms = {name: found[name] for name in read}
    base = find_baseline(arms, baseline) or min(arms, key=lambda name: rank_arm(arms, name))
    chosen = _choose_arms(arms, base, only)
    curves = [read[name] for name in chosen]
    mismatches: list[tuple[str, str, int]] = [
        ("left out, with less than half of the tokens of the other seeds", curve.name, seed)
        for curve in curves
        for seed in curve.late
    ]
    crossings, rows = {}, [[*_build_row(curves[0], None), *[ABSENT] * 2]]
    for curve in curves[1:]:
        unpaired = _find_unpaired(arms[curve.name], arms[base])
        mismatches += [(f"not compared with {base}: {reason}", curve.name, seed) for seed, reason in unpaired.items()]
        crossings[curve.name] = find_crossings(curve, curves[0], unpaired)
        sizes = compare_arms(curve.name, arms[curve.name], base, arms[base]).sizes
        rows.append([*_build_row(curve, crossings[curve.name]), *sizes])
    header = ["run", "seeds", "tokens", "smoothed loss", f"minus {base}", "at tokens", "crossings", "last crossing"]
    notes = [describe_sweep(paths, "ablation"), LEGEND, *list_seeds(mismatches)]
    if left_out := [name for name in arms if name not in chosen]:
        notes.append(f"not shown (choose with --only): {', '.join(left_out)}")
    if without := [name for name in found if name not in arms]:
        notes.append(f"no training losses in metrics.jsonl: {', '.join(without)}; {remedy}")
    records = [
        {"run": curve.name, "tokens": int(t), "loss": raw, "smoothed": smoothed}
        for curve in curves
        for t, raw, smoothed in zip(curve.raw.index, curve.raw, curve.smoothed, strict=True)
    ]
    return Report(
        [Table("Training loss", [*header, "parameters", "FLOPs/token"], rows)],
        [*notes, *skipped],
        records,
        lambda: draw_dynamics(curves, crossings),
    )


def _find_unpaired(rows: Sequence[Row], base_rows: Sequence[Row]) -> dict[int, str]:
    """Return why runs of the same seed cannot be compared: {seed: reason}. Unfinished runs are checked, too."""
    bases = {row["seed"]: row for row in reversed(base_rows)}
    reasons = {}
    for row in (row for row in reversed(rows) if row["seed"] in bases):
        base = bases[row["seed"]]
        if row["max_steps"] != base["max_steps"]:
            reasons[row["seed"]] = f"trained for {row['max_steps']:,} steps, the baseline for {base['max_steps']:,}"
        elif reason := explain_other_data(base, row):
            reasons[row["seed"]] = reason
    return reasons


def _choose_arms(arms: Arms, base: str, only: Sequence[str]) -> list[str]:
    chosen = list(only or arms)
    if len(chosen) > MAX_CURVES and not only:
        stack = find_baseline(arms, None, "StackTrans")
        chosen = [stack] if stack else chosen[: MAX_CURVES - 1]
    return [base, *(name for name in chosen if name != base)]


def read_arm(name: str, rows: Sequence[Row], smooth: int | None = None) -> Curve | None:
    """Return the mean curve over the tokens that all seeds have reached, or None if there is no loss yet.

    Seeds that have just begun are left out, because they would cut off the curves of the others.
    """
    import pandas as pd

    runs: dict[int, dict[int, float]] = {}
    for row in rows:
        tokens, losses = read_curve(RunFolder(Path(row["path"])), TRAIN_LOSS)
        if tokens:
            runs.setdefault(row["seed"], dict(zip(tokens, losses, strict=True)))
    most = max((max(run) for run in runs.values()), default=0)
    late = tuple(sorted(seed for seed, run in runs.items() if max(run) < most / 2))
    losses = pd.DataFrame({seed: run for seed, run in runs.items() if seed not in late}).sort_index()
    steps = len(losses.dropna())
    return Curve(name, losses, smooth or max(1, round(SMOOTHED_FRACTION * steps)), late) if steps else None


def find_crossings(curve: Curve, baseline: Curve, left_out: Collection[int] = ()) -> Crossing:
    """Return the smoothed difference over common tokens and seeds, except those `left_out`.

    A crossing is where its sign changes for a whole window.
    """
    seeds = [seed for seed in curve.losses if seed in baseline.losses and seed not in left_out]
    common = (curve.losses[seeds] - baseline.losses[seeds]).dropna(how="any" if seeds else "all")  # no seeds: no rows
    differences = smooth_losses(common, curve.window)
    difference = differences.mean(axis=1)
    is_above = (difference > 0).to_numpy()
    starts = [0, *(np.flatnonzero(is_above[1:] != is_above[:-1]) + 1)]
    ends = [*starts[1:], len(difference)]
    lasting = [start for start, end in zip(starts, ends, strict=False) if end - start >= curve.window]
    changes = [i for before, i in pairwise(lasting) if is_above[i] != is_above[before]]
    last = differences.tail(1).to_numpy().ravel().tolist()
    return Crossing(difference, [int(difference.index[i]) for i in changes], last)


def _build_row(curve: Curve, crossing: Crossing | None) -> list[str]:
    cells = [curve.name, str(curve.losses.shape[1]), f"{curve.raw.index[-1]:,}", f"{curve.smoothed.iloc[-1]:.3f}"]
    if crossing is None or crossing.difference.empty:
        return [*cells, *[ABSENT] * 4]
    last = f"{crossing.crossings[-1]:,}" if crossing.crossings else ABSENT
    difference = [str(compute_difference(crossing.last)), f"{crossing.difference.index[-1]:,}"]
    return [*cells, *difference, str(len(crossing.crossings)), last]


def draw_dynamics(curves: list[Curve], crossings: dict[str, Crossing]) -> Any:
    """Draw the losses, the baseline first, and below them the differences from it with their crossings."""
    figure, (top, bottom) = new_figure(6.8, 5.2, rows=2, sharex=True, height_ratios=(2, 1))
    for i, curve in enumerate(curves):
        line = LINE_STYLES[(i + i // len(PALETTE)) % len(LINE_STYLES)]  # a repeated color gets another line
        style = {"color": PALETTE[i % len(PALETTE)], "linestyle": line}
        top.plot(curve.raw, color=style["color"], alpha=0.25, linewidth=0.6)
        top.plot(curve.smoothed, linewidth=1.4, label=curve.name, **style)
        if curve.name in crossings:
            found = crossings[curve.name]
            bottom.plot(found.difference, linewidth=1.2, **style)
            bottom.plot(found.crossings, [0] * len(found.crossings), "o", color=style["color"], markerfacecolor="white")
    baseline = curves[0]
    skipped = len(baseline.raw) // 20  # the first steps would set the scale
    highest = max(curve.smoothed.iloc[len(curve.raw) // 20] for curve in curves)  # of a shorter run, above the baseline
    top.set_ylim(min(curve.raw.min() for curve in curves) - 0.05, highest + 0.05)
    first = baseline.raw.index[skipped] + 1
    largest = max((abs(d) for c in crossings.values() for d in c.difference.loc[first:]), default=0.0)
    if largest > 0:
        bottom.set_ylim(-1.2 * largest, 1.2 * largest)
    top.set(ylabel="Training loss (nats per token)")
    top.legend(title="thin: raw, thick: smoothed", title_fontsize=8, fontsize=8)
    bottom.axhline(0, color="black", linewidth=0.8)
    bottom.set(xlabel="Tokens", ylabel=f"Minus {baseline.name}")
    bottom.set_title("circles: crossings", fontsize=8, loc="right")
    abbreviate_thousands(bottom.xaxis)
    return figure
