"""The table of formal languages by arm: the models of one `verdict` file, tuned equally, on every task."""

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stackexp.config.affects import AFFECT_RESULTS, find_changed_keys
from stackexp.errors import RunError
from stackexp.evaluation.accuracy import Lengths
from stackexp.frame import Row, get_options, read_start
from stackexp.lazy import LazyModule
from stackexp.reports.arms import compute_difference, find_stack_changes, list_paths
from stackexp.reports.formal_runs import (
    SOLVED,
    FormalRun,
    count_solved,
    join_paths,
    label_task,
    read_runs,
    sort_tasks,
)
from stackexp.reports.report import Report, Table
from stackexp.sequential import LEVEL, adjust_holm
from stackexp.sweeps.schema import format_value
from stackexp.tables import ABSENT

stats = LazyModule("scipy.stats")

COLUMNS = ("seed", "path", "validation_accuracy", "validation_loss", "optimizer.lr", "data.curriculum_steps")
"""Columns of the CSV from the row of a run."""
TUNING = "tuning"
"""Folder of the runs that chose the options of an arm; they have no score."""


def build_arms(paths: Sequence[Path], lengths: Lengths = (41, 500), one_setting: bool = False) -> Report:
    """Build the table of mean accuracies with intervals over seeds, and the number of solved seeds.

    With `one_setting`, only runs count that have the setting of their arm, see `choose_settings`. Of runs with the same
    options and seed, the last one counts. Raises RunError if no run has a score over the lengths, or if two runs of an
    arm have one seed and other options, as with two budgets.
    """
    runs, notes = read_runs(paths, lengths)
    if one_setting:
        settings, setting_notes = choose_settings(runs)
        notes += setting_notes
        runs = [run for run in runs if is_trial(run) or _has_setting(run.row, settings)]
    runs.sort(key=lambda run: read_start(run.row), reverse=True)
    scored, failures, more_notes = _find_seeds(runs)
    if not scored:
        raise RunError(f"{join_paths(paths)}: no finished run is tested over {lengths[0]}..{lengths[1]}")
    notes += more_notes
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    records: list[dict[str, Any]] = []
    for (task, arm, _), (run, score) in scored.items():
        scores[task][arm].append(score)
        records.append({"task": task, "arm": arm, "score": score} | {key: run.row.get(key) for key in COLUMNS})
    records.sort(key=lambda record: (record["task"], record["arm"], record["seed"]))
    counted = [*(run for run, _ in scored.values()), *failures.values()]
    changes = {run.row["arm"]: list_changes(run.row) for run in counted}
    arms = sorted(changes)
    failed = Counter((task, arm) for task, arm, _ in failures)
    ranges = {run.task: run.lengths for run in runs}
    means, solved = [], []
    for task in sort_tasks({run.task for run in counted}):
        best = find_best_arms(scores[task])
        label = label_task(task, ranges[task], lengths)
        means.append([label, *(_format_mean(scores[task].get(arm, []), arm in best) for arm in arms)])
        solved.append([label, *(count_solved(scores[task].get(arm, []), failed[task, arm]) for arm in arms)])
    hours, note = _add_hours(runs)
    solved.append(["hours", *(f"{hours[arm]:.1f}" for arm in arms)])
    ours = {arm: ", ".join(found) for arm, found in changes.items() if found}
    notes += [note, *(f"{arm} (ours) differs from the paper's stack in {found}" for arm, found in ours.items())]
    marks = {arm: " (ours)" if arm in ours else "" if changes[arm] is None else " (paper)" for arm in arms}
    header = ["task", *(arm + mark for arm, mark in marks.items())]
    title = (
        f"Mean accuracy on lengths {lengths[0]} to {lengths[1]}, or those stated, with {1 - LEVEL:.0%} intervals over "
        "seeds (Student's t). Bold or *: the highest mean and those not significantly lower, by permutation tests; "
        "none if no arm is significantly lower"
    )
    tables = [Table(title, header, means)]
    tables.append(Table(f"Seeds with a mean accuracy of at least {SOLVED}, of all", header, solved))
    return Report(tables, notes, records)


Seed = tuple[str, str, int]
"""Task, arm and seed of a run."""


def _find_seeds(
    runs: Sequence[FormalRun],
) -> tuple[dict[Seed, tuple[FormalRun, float]], dict[Seed, FormalRun], list[str]]:
    """Return the run and score of each seed, the seeds whose runs all failed, and notes; `runs` has the last run first.

    Runs that only chose options are not among them. Raises RunError for runs of one seed with other options.
    """
    scored: dict[Seed, tuple[FormalRun, float]] = {}
    failures: dict[Seed, FormalRun] = {}
    unscored, replaced = [], []
    for run in runs:
        key = run.task, run.row["arm"], run.row["seed"]
        score = run.compute_score(run.lengths)
        if is_trial(run):
            unscored += [] if run.is_finished else [Path(run.row["path"])]
        elif run.has_failed:
            failures[key] = run
        elif not run.is_finished or score is None:
            unscored.append(Path(run.row["path"]))
        elif key not in scored:
            scored[key] = run, score
        elif not find_changed_keys(get_options(scored[key][0].row), get_options(run.row), AFFECT_RESULTS):
            replaced.append(run.row)
        else:
            other = scored[key][0].row["path"]
            raise RunError(
                f"{run.row['path']} and {other} are runs of {key[1]} on {key[0]} with one seed; give the folder of one"
            )
    failures = {key: run for key, run in failures.items() if key not in scored}
    notes = []
    if failures:
        counts = Counter((arm, task) for task, arm, _ in failures)
        listed = ", ".join(f"{arm} on {task} ({count})" for (arm, task), count in counts.items())
        notes.append(f"Failed runs count as not solved, and are in no mean accuracy: {listed}")
    if unscored:
        notes.append(f"left out, not finished and tested over these lengths: {join_paths(unscored)}")
    return scored, failures, notes + list_paths("left out, a later run has the same seed", replaced)


def _add_hours(runs: Sequence[FormalRun]) -> tuple[dict[str, float], str]:
    """Return the hours of each arm with its tuning, and a note on them."""
    hours: dict[str, float] = defaultdict(float)
    for run in runs:
        arm = run.row["arm"]
        hours[arm.rpartition("-")[0] if is_trial(run) else arm] += run.row.get("seconds", 0.0) / 3600
    untimed = sum(run.is_finished and "seconds" not in run.row for run in runs)
    missing = f"; those without a recorded time ({untimed}) count as 0" if untimed else ""
    return hours, (
        "Hours: of all runs with their tuning, one run after the other; of runs by earlier versions, the last session"
        + missing
    )


def _has_setting(row: Row, settings: dict[str, dict[str, Any]]) -> bool:
    """Return True if a run has the setting of its arm."""
    setting = settings.get(row["arm"])
    return setting is not None and all(row.get(key) == value for key, value in setting.items())


def is_trial(run: FormalRun) -> bool:
    """Return True for a run that only chose the options of an arm."""
    return Path(run.row["path"]).parent.name == TUNING


def choose_settings(runs: Sequence[FormalRun]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Choose one setting of each arm for all tasks, {arm: {option: value}}, and describe it in notes.

    The setting is the trial with the highest mean validation accuracy over the tasks that the arm is tuned on; of equal
    ones, the first. A `verdict` has the same trials on every task. Raises RunError without finished trials, or
    if no arm has a setting that is tried on all tasks.
    """
    trials: dict[str, list[FormalRun]] = defaultdict(list)
    for run in runs:
        if is_trial(run) and run.is_finished and "validation_accuracy" in run.row:
            trials[run.row["arm"].rpartition("-")[0]].append(run)
    if not trials:
        raise RunError(
            f"no finished run in a folder {TUNING}/ chooses a setting; give the folder of a tuned verdict, too"
        )
    settings, notes = {}, []
    for arm, tried in trials.items():
        if not (searched := _find_searched_options(tried)):
            notes.append(f"{arm}: left out, its finished trials do not differ in an option")
            continue
        points: dict[str, list[FormalRun]] = defaultdict(list)
        for run in tried:
            points[json.dumps([run.row.get(key) for key in searched])].append(run)
        tasks, runs_of_all = {run.task for run in tried}, {(run.task, run.row["seed"]) for run in tried}
        means = [
            (statistics.fmean(run.row["validation_accuracy"] for run in point), point[0].row)
            for point in points.values()
            if {(run.task, run.row["seed"]) for run in point} == runs_of_all  # others cannot be compared
        ]
        if not means:
            notes.append(f"{arm}: left out, no setting has finished trials on all of {', '.join(sorted(tasks))}")
            continue
        mean, best = max(means, key=lambda item: item[0])
        settings[arm] = {key: best.get(key) for key in searched}
        listed = ", ".join(f"{key}={format_value(value)}" for key, value in settings[arm].items())
        score = f"mean validation accuracy of {mean:.3f} over the {len(tasks)} tuned tasks"
        notes.append(f"One setting of {arm}: {listed}; {score}")
    if not settings:
        raise RunError("; ".join(notes))
    return settings, notes


def _find_searched_options(runs: Sequence[FormalRun]) -> list[str]:
    """Return the options that differ between the trials of a task and affect the results."""
    first: dict[str, Row] = {}
    found: dict[str, None] = {}
    for run in runs:
        options = get_options(run.row)
        found |= dict.fromkeys(find_changed_keys(first.setdefault(run.task, options), options, AFFECT_RESULTS))
    return sorted(found.keys() - {"seed"})


def list_changes(row: Row) -> list[str] | None:
    """Return the options in which a stack differs from the paper's, except its axis and noise in training.

    None for a model without a stack.
    """
    if row.get("model.memory.kind") != "stack":
        return None
    changes = find_stack_changes(row).items()
    return [f"{key}={format_value(value)}" for key, value in changes if key not in ("axis", "action_noise")]


def find_best_arms(scores: Mapping[str, Sequence[float]]) -> set[str]:
    """Return the arm with the highest mean on a task and those that are not significantly lower; none if all are such.

    Each arm is compared with the highest by an exact, one-sided permutation test of the means, at 5 % by Holm's method
    over the arms. It assumes no distribution: seeds either solve a task or stay near guessing.
    """
    if not scores:
        return set()
    best = max(scores, key=lambda arm: statistics.fmean(scores[arm]))
    others = [arm for arm in scores if arm != best]
    p_values = adjust_holm([_compute_p_value(scores[best], scores[arm]) for arm in others])
    lower = {arm for arm, p in zip(others, p_values, strict=True) if p <= LEVEL}
    return scores.keys() - lower if lower else set()


def _compute_p_value(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the p-value of mean(x) <= mean(y): the share of permutations with at least this difference."""

    def subtract_means(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
        return x.mean(axis) - y.mean(axis)

    if min(len(x), len(y)) < 2:
        return 1.0  # scipy requires two values
    # Exact up to 9,999 permutations, random above
    return float(stats.permutation_test((x, y), subtract_means, vectorized=True, alternative="greater", rng=0).pvalue)


def _format_mean(values: list[float], is_best: bool) -> str:
    """Return the mean with its interval, cut at 0 and 1."""
    if not values:
        return ABSENT
    mean, low, high = compute_difference(values)[:3]
    text = f"**{mean:.2f}**" if is_best else f"{mean:.2f}"
    return text if low is None or high is None else f"{text} ({max(0.0, low):.2f} to {min(1.0, high):.2f})"
