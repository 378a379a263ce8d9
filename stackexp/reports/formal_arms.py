"""The table of formal languages by arm: the models of one `verdict` file, tuned equally, on every task."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stackexp.errors import RunError
from stackexp.evaluation.accuracy import Lengths, average_accuracy
from stackexp.frame import list_rows, load_runs
from stackexp.reports.formal_runs import Evaluation
from stackexp.reports.report import Report, Table
from stackexp.sequential import LEVEL
from stackexp.tables import ABSENT
from stackexp.tasks import TASKS

SOLVED = 0.99
"""Mean accuracy from which a run counts as a solution."""
COLUMNS = ("seed", "path", "validation_accuracy", "validation_loss", "optimizer.lr", "data.curriculum_steps")
"""Columns of the CSV from the row of a run."""
TUNING = "tuning"
"""Folder of the runs that chose the options of an arm; they have no score."""


def build_arms(paths: Sequence[Path], lengths: Lengths = (41, 500)) -> Report:
    """Build the table of mean accuracies with intervals over seeds, and the number of solved seeds.

    Raises RunError if no run has a score over the lengths.
    """
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    hours: dict[str, float] = defaultdict(float)
    records: list[dict[str, Any]] = []
    left_out: dict[str, int] = defaultdict(int)
    for row in list_rows(load_runs(paths)):
        if row["state"] != "finished" or row.get("data.kind") != "formal_language":
            left_out[f"{row['state']}, {row.get('data.kind', 'no config')}"] += 1
            continue
        path, arm, task = Path(row["path"]), row["arm"], row["data.task"]
        is_tuning = path.parent.name == TUNING
        hours[arm.rpartition("-")[0] if is_tuning else arm] += row.get("seconds_of_last_session", 0.0) / 3600
        evaluation = Evaluation.read(path, row)
        if not is_tuning and evaluation.covers(lengths):
            score = average_accuracy(evaluation.accuracy, lengths)
            scores[task][arm].append(score)
            records.append({"task": task, "arm": arm, "score": score} | {key: row.get(key) for key in COLUMNS})
        elif not is_tuning:
            left_out["not tested over these lengths"] += 1
    if not scores:
        raise RunError(f"{', '.join(map(str, paths))}: no finished run is tested over {lengths[0]}..{lengths[1]}")
    arms = list(dict.fromkeys(arm for row in scores.values() for arm in row))
    tasks = [task for task in TASKS if task in scores] + [task for task in scores if task not in TASKS]
    means, solved = [], []
    for task in tasks:
        best = max(statistics.fmean(values) for values in scores[task].values())
        means.append([task, *(_format_mean(scores[task].get(arm, []), best) for arm in arms)])
        solved.append([task, *(_count_solved(scores[task].get(arm, [])) for arm in arms)])
    solved.append(["core-hours", *(f"{hours[arm]:.1f}" for arm in arms)])
    first, last = lengths
    title = (
        f"Mean accuracy on lengths {first} to {last} with {1 - LEVEL:.0%} intervals over seeds (Student's t). Bold or "
        "*: the highest mean"
    )
    tables = [Table(title, ["task", *arms], means)]
    tables.append(Table(f"Seeds with a mean accuracy of at least {SOLVED}, of all", ["task", *arms], solved))
    notes = [f"left out, {reason}: {count}" for reason, count in left_out.items()]
    return Report(tables, notes, records)


def _format_mean(values: list[float], best: float) -> str:
    """Return the mean with its interval, cut at 0 and 1."""
    if not values:
        return ABSENT
    mean = statistics.fmean(values)
    text = f"**{mean:.2f}**" if mean == best else f"{mean:.2f}"
    if len(values) < 2:
        return text
    from scipy.stats import t

    half = float(t.ppf(1 - LEVEL / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{text} ({max(0.0, mean - half):.2f} to {min(1.0, mean + half):.2f})"


def _count_solved(values: list[float]) -> str:
    return f"{sum(value >= SOLVED for value in values)}/{len(values)}" if values else ABSENT
