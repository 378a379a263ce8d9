"""Plans of a verdict: its runs before they start, and the number of pairs by the noise of finished runs."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stackexp.errors import RunError
from stackexp.frame import Row
from stackexp.reports.arms import OTHER, choose_column, compare_arms, find_baseline, load_arms, select_finished
from stackexp.reports.noise import TOTAL, PairGrid, build_noise, find_grids, pool_deviations, split_variance
from stackexp.reports.report import Report, Table
from stackexp.reports.verdict import measure_seconds
from stackexp.sequential import (
    LEVEL,
    POWER,
    compute_deviation_interval,
    count_pairs,
    estimate_deviation,
    format_pairs,
)
from stackexp.sweeps.trials import has_diverged
from stackexp.sweeps.verdict import PairPlan, Question, QuestionStage, list_undecided
from stackexp.tables import ABSENT
from stackexp.terminal import format_duration


def format_runs(verdict: Question) -> str:
    """Return the runs of both stages, and the time of those left by the finished runs of each arm.

    After the tuning, the pairs are those that the first one would be planned with.
    """
    config, tuning, plan = verdict.config, verdict.tuning, verdict.read_plan()
    lines, seconds = [f"folder  {verdict.folder}"], dict[str, float]()
    if tuning:
        seconds |= _average_seconds(tuning)
        lines.append(_format_stage("tuning", tuning, seconds, verdict.arms))
    if plan is None and (tuning is None or tuning.read_scores().keys() == tuning.trials.keys()):
        plan = verdict.choose_plan()
    if plan is None:
        pairs = config.pairs or config.max_pairs
        bound = "" if config.pairs else ", at most; the tuning seeds show the noise"
        trials = verdict.build_pairs(PairPlan({}, {arm: {} for arm in verdict.arms}, [config.first_seed])).trials
        configs = len({(trial.name, str(verdict.points[arm])) for (arm, *_), trial in trials.items()})
        num_arms = len(verdict.arms)
        equal = f" with {configs} configs" * (configs < num_arms)  # equal arms share runs
        return "\n".join([*lines, f"pairs   {pairs * configs} runs: {pairs} seeds of {num_arms} arms{equal}{bound}"])
    stage = verdict.build_pairs(plan)
    arms = list_undecided(plan, stage.read_scores()) if config.stop_when_decided else verdict.arms
    lines.append(_format_stage("pairs", stage, seconds | _average_seconds(stage), arms))
    if plan.deviation is not None and plan.degrees is not None:
        low, high = compute_deviation_interval(plan.deviation, plan.degrees)
        level = LEVEL / (len(verdict.arms) - 1)
        needed = count_pairs(plan.effect, plan.deviation, level, degrees=plan.degrees)
        lines.append(
            f"noise   deviation of a pair {plan.deviation:.4f} ({low:.4f} to {high:.4f}): an effect of {plan.effect:g} "
            f"takes {format_pairs(needed)} pairs, {plan.pairs} are planned"
        )
    return "\n".join(lines)


def _average_seconds(stage: QuestionStage) -> dict[str, float]:
    return {arm: statistics.fmean(values.values()) for arm, values in measure_seconds(stage).items()}


def _format_stage(name: str, stage: QuestionStage, seconds: dict[str, float], arms: Sequence[str]) -> str:
    """Return the number of runs of a stage, and the time of those of `arms` that are left."""
    trials = {trial.name: trial for trial in stage.trials.values()}
    users: dict[str, list[str]] = {name: [] for name in trials}  # the arms that share a run, the needed ones first
    for (arm, *_), trial in stage.trials.items():
        users[trial.name].insert(0 if arm in arms else len(trials), arm)
    missing = [
        users[name][0] for name, trial in trials.items() if not trial.folder.is_finished and not has_diverged(trial)
    ]
    left = [arm for arm in missing if arm in arms]
    text = f"{name:7} {len(trials)} runs, {len(trials) - len(missing)} done"
    if len(missing) > len(left):
        text += f", {len(missing) - len(left)} not needed, because their arms are decided"
    if left and seconds.keys() >= set(left):
        duration = format_duration(sum(seconds[arm] for arm in left))
        text += f"; the rest takes about {duration}, one run after the other"
    return text


# Before any run


class Target(NamedTuple):
    """The effect to be found, and the number of arms of the verdict that looks for it."""

    effect: float
    arms: int


def build_pair_plan(
    paths: Sequence[Path], effect: float, baseline: str | None = None, arms_of_verdict: int = 1
) -> Report:
    """Build a table of the pairs that find an effect with probability 0.8, from the noise of finished runs.

    Each arm is tested at the level divided by the number of arms of the verdict.
    A grid of `seed` and `data.shuffle_seed` also gives the noise by source. Without one, the last row pools the
    arms with the same seeds, where most arms share them. Raises RunError if no arm has two pairs with the baseline.
    """
    target = Target(effect, arms_of_verdict)
    arms, notes = load_arms(paths)
    grid_base, grids, grid_notes = find_grids(arms, baseline)
    if grid_base:
        return _plan_grids(grid_base, grids, target, notes + grid_notes)
    finished = {name: rows for name in arms if (rows := select_finished(arms[name]))}
    base = find_baseline(finished, baseline)
    if base is None:
        raise RunError(f"{', '.join(map(str, paths))}: no Transformer without a memory; choose --baseline")
    compared = [compare_arms(arm, rows, base, finished[base]) for arm, rows in finished.items() if arm != base]
    compared = [comparison for comparison in compared if len(comparison.pairs) > 1]
    column = choose_column(None, [comparison.values for comparison in compared])
    differences = {
        c.arm: dict(zip((run["seed"] for run, _ in c.pairs), c.values[column], strict=True))
        for c in compared
        if column in c.values
    }
    if not differences:
        raise RunError(f"{base}: no arm has two finished runs with the same seeds and data; train more seeds")
    hours = _measure_hours([pair for comparison in compared for pair in comparison.pairs])
    lines = [
        _plan_row(arm, *estimate_deviation(list(values.values())), target, hours) for arm, values in differences.items()
    ]
    groups: dict[tuple[int, ...], list[list[float]]] = {}
    for values in differences.values():
        groups.setdefault(tuple(sorted(values)), []).append([values[seed] for seed in sorted(values)])
    pooled = max(groups.values(), key=len)
    if len(pooled) > 1:
        label = f"pooled ({len(pooled)} arms of {len(pooled[0])} pairs)"
        lines.append(_plan_row(label, *pool_deviations(np.array(pooled)), target, hours))
    left_out = [arm for arm in finished if arm not in (base, *differences)]
    if left_out:
        notes.append(f"left out, because they have fewer than two pairs ({column}): {', '.join(left_out)}")
    return Report([_tabulate_plan(effect, lines)], [*notes, _describe_plan(base, target, column)], [])


def _plan_grids(base: str, grids: dict[str, PairGrid], target: Target, notes: list[str]) -> Report:
    """Return the noise by source, and the pairs for its total."""
    hours = _measure_hours([pair for grid in grids.values() for pair in grid.pairs])
    (column,) = {grid.column for grid in grids.values()}
    total = {arm: split_variance(grid.differences)[TOTAL] for arm, grid in grids.items()}
    lines = [_plan_row(arm, float(x), float(low), float(high), target, hours) for arm, (x, low, high) in total.items()]
    tables = [build_noise(base, grids), _tabulate_plan(target.effect, lines)]
    return Report(tables, [*notes, _describe_plan(base, target, column)], [])


def _measure_hours(pairs: Sequence[tuple[Row, Row]]) -> float:
    """Return the median duration of both runs of a pair; NaN if none is recorded."""
    known = [ours["seconds"] + base["seconds"] for ours, base in pairs if "seconds" in ours and "seconds" in base]
    return statistics.median(known) / 3600 if known else math.nan


def _tabulate_plan(effect: float, rows: list[list[str]]) -> Table:
    header = ["arm", "deviation of a pair", f"pairs for {effect:g}", "hours"]
    return Table(f"Pairs for an effect of {effect:g}", header, rows)


def _describe_plan(base: str, target: Target, column: str) -> str:
    loss = {OTHER: "validation loss", "V2": "loss on V2"}.get(column, column)
    return (
        f"Pairs with {base} that find a difference of {target.effect:g} nats with probability {POWER:g} at level "
        f"{LEVEL:g}, with a look after every pair, for an arm of a verdict on {target.arms}. The noise is that of the "
        f"{loss}. Deviations have 95 % intervals. Hours: the median duration of both runs, one after the other, times "
        "the pairs."
    )


def _plan_row(arm: str, deviation: float, low: float, high: float, target: Target, hours: float) -> list[str]:
    pairs = count_pairs(target.effect, deviation, LEVEL / target.arms)
    text = format_pairs(pairs)
    time = text.replace(str(pairs), f"{pairs * hours:.1f}") if math.isfinite(hours) else ABSENT
    return [arm, f"{deviation:.4f} ({low:.4f} to {high:.4f})", text, time]
