"""The interventions on the memories of a verdict's pairs: a file in each run folder, and their table.

interventions.json has the step, weights and chunks that were measured, and the changes of the loss in nats.
"""

import contextlib
import math
from typing import Any

from stackexp.errors import RunError
from stackexp.files import read_hashed_json
from stackexp.reports.arms import compute_difference, count_runs
from stackexp.reports.report import Table
from stackexp.runs import RunFolder
from stackexp.sweeps.trials import Trial
from stackexp.sweeps.verdict import Question, QuestionStage
from stackexp.tables import ABSENT

FILE = "interventions.json"
VERSION, MEAN_ACTION = {"version": 2}, "mean action"
"""Before version 2, `MEAN_ACTION` froze actions at their mean over the first four batches."""
Changes = dict[str, float]
"""Intervention -> change of the loss."""


def list_memory_trials(pairs: QuestionStage) -> dict[str, list[Trial]]:
    """Return the finished trials of each model with a memory and validation sets."""
    trials: dict[str, list[Trial]] = {}
    for (arm, _, _), trial in pairs.trials.items():
        config = trial.config
        if getattr(config.data, "validation", None) != {} and getattr(config.model, "memory", None) is not None:
            trials.setdefault(arm, []).extend([trial] if trial.folder.is_finished else [])
    return trials


def get_identity(verdict: Question, folder: RunFolder) -> dict[str, Any]:
    """Return what identifies a measurement: the step, "last" or the averaged weights "ema", and the chunks of a set."""
    weights = "ema" if verdict.config.score.startswith("ema.") else "last"
    step, chunks = folder.read_result().steps, verdict.config.interventions_chunks
    return {"step": step, "weights": weights, "chunks": chunks}


def read_changes(folder: RunFolder, identity: dict[str, Any]) -> Changes | None:
    """Return the measured changes of a run; None if others or none were measured. Raises RunError for damage."""
    path = folder.path / FILE
    if not path.is_file():
        return None
    contents = read_hashed_json(path, "repeat `verdict`, which measures again")
    return contents["changes"] if identity.items() <= contents.items() else None


def list_unmeasured(verdict: Question) -> list[RunFolder]:
    """Return the runs that have the checkpoint of their last step, but no measured changes, or damaged ones.

    There are none before the plan is made.
    """
    plan = verdict.read_plan()
    arms = list_memory_trials(verdict.build_pairs(plan)) if plan else {}
    folders = dict.fromkeys(trial.folder for trials in arms.values() for trial in trials)
    missing = []
    for folder in folders:
        identity, newest = get_identity(verdict, folder), folder.newest_checkpoint()
        if newest is not None and int(newest.name) == identity["step"]:
            changes = None
            with contextlib.suppress(RunError):
                changes = read_changes(folder, identity | VERSION)
            missing += [folder] if changes is None else []
    return missing


def build_interventions(verdict: Question, pairs: QuestionStage) -> tuple[Table | None, list[str]]:
    """Return a table of the changes, mean over seeds, and notes about runs without them. Nothing is measured."""
    rows: list[list[str]] = []
    notes: list[str] = []
    material = f"{verdict.config.interventions_chunks} chunks of each validation set"
    for arm, trials in list_memory_trials(pairs).items():
        measured: list[Changes] = []
        older = 0
        for trial in trials:
            if trial.config.data.objective == "transduction":
                material = "all validation strings"
            try:
                identity = get_identity(verdict, trial.folder)
                changes = read_changes(trial.folder, identity)
                has_mean = changes is not None and MEAN_ACTION in changes
                older += has_mean and read_changes(trial.folder, identity | VERSION) is None
            except RunError as error:
                notes.append(str(error))
                continue
            measured += [changes] if changes else []
        if len(measured) < len(trials):
            count = count_runs(len(trials) - len(measured))
            notes.append(f"{arm}: {count} without interventions: not measured yet, or the last checkpoint is deleted")
        if older:
            notes.append(
                f"{arm}: {count_runs(older)} with actions frozen at the mean of four batches, not of all tokens"
            )
        for name in dict.fromkeys(name for changes in measured for name in changes):
            found = [changes.get(name) for changes in measured]  # None: a loss that is not finite
            values = [change for change in found if change is not None and math.isfinite(change)]
            if not values:
                rows.append([arm, name, ABSENT, ABSENT, "0"])
                continue
            difference = compute_difference(values)
            interval = ABSENT if difference.low is None else f"{difference.low:+.4f} to {difference.high:+.4f}"
            rows.append([arm, name, f"{difference.mean:+.4f}", interval, str(len(values))])
    title = (
        f"Interventions on trained memories: change of the loss, mean over seeds, on {material}. Intervals over seeds"
    )
    header = ["arm", "intervention", "change of the loss", "95 % interval", "runs"]
    return (Table(title, header, rows, num_labels=2) if rows else None), notes
