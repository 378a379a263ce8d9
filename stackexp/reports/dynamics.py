"""The paper's figure of training dynamics: raw and smoothed training loss, with the crossings of the baseline."""

from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stackexp.errors import RunError
from stackexp.metric_tags import TRAIN_LOSS
from stackexp.reports.arms import Arm, describe_unfinished, find_arm, rank_arm, read_arms
from stackexp.reports.compare import explain_other_data
from stackexp.reports.differences import compare_arms, compute_difference
from stackexp.reports.figures import abbreviate_thousands, new_figure, smooth_losses
from stackexp.reports.paper import find_variant
from stackexp.reports.report import LINE_STYLES, PALETTE, Report, Table
from stackexp.runs import RunFolder
from stackexp.tables import ABSENT

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
    """The training loss of an arm: of each run {tokens: loss}, and of their mean tokens, raw and smoothed [N].

    `late` are the seeds left out because they have not reached half of the tokens of the others.
    """

    name: str
    runs: dict[int, dict[int, float]]
    window: int
    tokens: Any
    raw: Any
    smoothed: Any
    late: tuple[int, ...] = ()


class Crossing(NamedTuple):
    """The smoothed difference from the baseline over common tokens [N], and the tokens where its sign changes.

    `last` is the difference of each seed at the last of these tokens.
    """

    tokens: Any
    difference: Any
    crossings: list[int]
    last: list[float]


def build_dynamics(
    paths: Sequence[Path], only: Sequence[str] = (), baseline: str | None = None, smooth: int | None = None
) -> Report:
    """Build the report of the runs at or below `paths`, unfinished ones included.

    `only` names arms; by default all, or the paper's two if there are many. `smooth` is the number of steps in a
    moving average, by default 4 % of the steps.
    """
    found, notes = read_arms(paths)
    read = {arm.name: read_curve(arm, smooth) for arm in found}
    arms = [arm for arm in found if read[arm.name] is not None]
    remedy = "give runs that have made a step, not copies"
    named = [find_arm(found, name) for name in (*only, *([baseline] if baseline else []))]
    if unread := [arm.name for arm in named if arm not in arms] or ([] if arms else [*map(str, paths)]):
        raise RunError(f"{', '.join(unread)}: no training losses in metrics.jsonl; {remedy}")
    if without := [arm.name for arm in found if arm not in arms]:
        notes.append(f"no training losses in metrics.jsonl: {', '.join(without)}; {remedy}")
    base = _find_baseline(arms, baseline)
    chosen = _choose_arms(arms, base, only)
    if len(chosen) < len(arms):
        left_out = ", ".join(arm.name for arm in arms if arm not in chosen)
        notes.append(f"not shown (choose with --only): {left_out}")
    curves = [curve for arm in chosen if (curve := read[arm.name]) is not None]
    own = curves[0]
    comparisons = {arm.name: compare_arms(arm, base) for arm in chosen if arm is not base}
    unpaired = {arm.name: _find_unpaired(arm, base) for arm in chosen if arm is not base}
    crossings = {c.name: find_crossings(c, own, unpaired.get(c.name, ())) for c in curves if c is not own}
    sizes = {name: comparison.format_sizes(base) for name, comparison in comparisons.items()}
    rows = [[*_build_row(c, crossings.get(c.name)), *sizes.get(c.name, [ABSENT] * 2)] for c in curves]
    header = ["run", "seeds", "tokens", "smoothed loss", f"minus {own.name}", "at tokens", "crossings", "last crossing"]
    header += ["parameters", "FLOPs/token"]
    mismatches = [
        f"{name}, seed {seed}: not compared with {base.name}: {reason}"
        for name, reasons in unpaired.items()
        for seed, reason in sorted(reasons.items())
    ]
    mismatches += [
        f"{curve.name}, seed {seed}: left out, has not reached half of the tokens of the other seeds"
        for curve in curves
        for seed in sorted(curve.late)
    ]
    notes = [LEGEND, *mismatches, *describe_unfinished(chosen), *notes]
    records = [
        {"run": curve.name, "tokens": int(t), "loss": raw, "smoothed": smoothed}
        for curve in curves
        for t, raw, smoothed in zip(curve.tokens, curve.raw, curve.smoothed, strict=True)
    ]
    return Report(
        [Table("Training loss", header, rows)],
        notes,
        records,
        lambda: draw_dynamics(curves, own, crossings),
    )


def _find_baseline(arms: list[Arm], name: str | None) -> Arm:
    if name is None:
        transformers = [arm for arm in arms if find_variant(arm.config) == "Transformer"]
        return min(transformers or arms, key=rank_arm)
    return find_arm(arms, name)


def _find_unpaired(arm: Arm, base: Arm) -> dict[int, str]:
    """Return why runs of the same seed cannot be compared: {seed: reason}. Unfinished runs are checked, too."""
    bases = {folder.read_options()["seed"]: folder for folder in reversed(base.folders)}
    reasons = {}
    for folder in reversed(arm.folders):
        seed, other = folder.read_options()["seed"], bases.get(folder.read_options()["seed"])
        if other and (reason := _find_mismatch(folder, other)):
            reasons[seed] = reason
    return reasons


def _find_mismatch(folder: RunFolder, other: RunFolder) -> str:
    ours, theirs = (run.read_options()["trainer.max_steps"] for run in (folder, other))
    if ours != theirs:
        return f"trained for {ours:,} steps, the baseline for {theirs:,}"
    return explain_other_data(other, folder)


def _choose_arms(arms: list[Arm], base: Arm, only: Sequence[str]) -> list[Arm]:
    """Return the baseline and the other arms to show."""
    chosen = [find_arm(arms, name) for name in only] or arms
    if len(chosen) > MAX_CURVES and not only:
        stacks = sorted((arm for arm in arms if find_variant(arm.config) == "StackTrans"), key=rank_arm)
        chosen = stacks[:1] or arms[: MAX_CURVES - 1]
    return [base, *(arm for arm in chosen if arm is not base)]


def read_curve(arm: Arm, smooth: int | None = None) -> Curve | None:
    """Return the mean curve over the tokens that all seeds have reached, or None if there is no loss yet.

    Seeds that have just begun are left out, because they would cut off the curves of the others.
    """
    runs: dict[int, dict[int, float]] = {}
    for folder in arm.folders:
        lines = (line for line in folder.read_metrics() if line.get(TRAIN_LOSS) is not None)
        if record := {line["tokens"]: line[TRAIN_LOSS] for line in lines}:
            runs.setdefault(folder.read_options()["seed"], record)
    reached = {seed: max(record) for seed, record in runs.items()}
    late = tuple(seed for seed in runs if reached[seed] < max(reached.values()) / 2)
    curve = average_curves(arm.name, {seed: record for seed, record in runs.items() if seed not in late}, smooth)
    return curve and curve._replace(late=late)


def average_curves(name: str, runs: dict[int, dict[int, float]], smooth: int | None = None) -> Curve | None:
    """Return the mean curve of runs {seed: {tokens: loss}} over their common tokens, or None if there are none."""
    tokens = sorted(set.intersection(*(set(record) for record in runs.values()))) if runs else []
    if not tokens:
        return None
    raw = np.mean([[record[t] for t in tokens] for record in runs.values()], axis=0)
    window = smooth or max(1, round(SMOOTHED_FRACTION * len(tokens)))
    return Curve(name, runs, window, np.array(tokens), raw, smooth_losses(raw, window))


def find_crossings(curve: Curve, baseline: Curve, left_out: Collection[int] = ()) -> Crossing:
    """Return the smoothed difference over common tokens and seeds, except those `left_out`.

    A crossing is where its sign changes for a whole window.
    """
    seeds = [seed for seed in curve.runs if seed in baseline.runs and seed not in left_out]
    records = [(curve.runs[seed], baseline.runs[seed]) for seed in seeds]
    tokens = sorted(set.intersection(*(set(ours) & set(base) for ours, base in records))) if records else []
    if not tokens:
        return Crossing(np.array([]), np.array([]), [], [])
    differences = [smooth_losses(np.array([ours[t] - base[t] for t in tokens]), curve.window) for ours, base in records]
    difference = np.mean(differences, axis=0)
    is_above = difference > 0
    starts = [0, *(np.flatnonzero(is_above[1:] != is_above[:-1]) + 1)]
    ends = [*starts[1:], len(tokens)]
    lasting = [start for start, end in zip(starts, ends, strict=False) if end - start >= curve.window]
    changes = [i for before, i in pairwise(lasting) if is_above[i] != is_above[before]]
    return Crossing(np.array(tokens), difference, [tokens[i] for i in changes], [float(d[-1]) for d in differences])


def _build_row(curve: Curve, crossing: Crossing | None) -> list[str]:
    cells = [curve.name, str(len(curve.runs)), f"{curve.tokens[-1]:,}", f"{curve.smoothed[-1]:.3f}"]
    if crossing is None or not len(crossing.tokens):
        return [*cells, *[ABSENT] * 4]
    last = f"{crossing.crossings[-1]:,}" if crossing.crossings else ABSENT
    difference = [str(compute_difference(crossing.last)), f"{crossing.tokens[-1]:,}"]
    return [*cells, *difference, str(len(crossing.crossings)), last]


def draw_dynamics(curves: list[Curve], baseline: Curve, crossings: dict[str, Crossing]) -> Any:
    """Draw the losses, and below them the differences from the baseline with their crossings."""
    figure, (top, bottom) = new_figure(6.8, 5.2, rows=2, sharex=True, height_ratios=(2, 1))
    for i, curve in enumerate(curves):
        style = {"color": PALETTE[i % len(PALETTE)], "linestyle": LINE_STYLES[i % len(LINE_STYLES)]}
        top.plot(curve.tokens, curve.raw, color=style["color"], alpha=0.25, linewidth=0.6)
        top.plot(curve.tokens, curve.smoothed, linewidth=1.4, label=curve.name, **style)
        if curve.name in crossings:
            found = crossings[curve.name]
            bottom.plot(found.tokens, found.difference, linewidth=1.2, **style)
            bottom.plot(found.crossings, [0] * len(found.crossings), "o", color=style["color"], markerfacecolor="white")
    skipped = len(baseline.tokens) // 20  # the first steps would set the scale
    top.set_ylim(min(curve.raw.min() for curve in curves) - 0.05, baseline.smoothed[skipped] + 0.05)
    late = [abs(d) for c in crossings.values() for d in c.difference[c.tokens > baseline.tokens[skipped]]]
    if late and max(late) > 0:
        bottom.set_ylim(-1.2 * max(late), 1.2 * max(late))
    top.set(ylabel="Training loss (nats per token)")
    top.legend(title="thin: raw, thick: smoothed", title_fontsize=8, fontsize=8)
    bottom.axhline(0, color="black", linewidth=0.8)
    bottom.set(xlabel="Tokens", ylabel=f"Minus {baseline.name}")
    bottom.set_title("circles: crossings", fontsize=8, loc="right")
    abbreviate_thousands(bottom.xaxis)
    return figure
