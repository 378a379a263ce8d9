"""The report on states: how far states drift and actions blur with length, and whether this predicts failure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stackexp.evaluation.benchmarks.results import format_score
from stackexp.lazy import LazyModule
from stackexp.reports.formal_runs import SOLVED, FormalRun
from stackexp.reports.report import LINE_STYLES, PALETTE, Report, Table, new_figure
from stackexp.tables import ABSENT

stats = LazyModule("scipy.stats")

SCORED = (41, 500)
LENGTHS = (10, 20, 40, 60, 100, 200, 500)
REFERENCE_LENGTH = 40
"""Centers of states at longer strings are compared with those up to this length."""
EARLY, LATE = 20, 60
"""Predictions use figures at these two lengths, and nothing beyond the longest validation strings."""
SHOWN = (EARLY, LATE, 500)
DEPTHS = ((1, 5), (6, 10), (11, 20), (21, 40), (41, 60), (61, 100), (101, 200), (201, 500))
MIN_RUNS, ENOUGH_RUNS = 4, 6
"""Predictions require this many runs, and intervals this many."""
RESAMPLES = 2000

Measurements = dict[tuple[str, int], dict[str, float]]
"""(place, length) -> measurements. Places are "hidden", "answers", "stack 0 actions", "stack 0 read", "stack 0 top"
and "depth 1-5"."""

LEGEND = (
    "Within/between is the distance of two tokens in one state of the task's automaton, over that of two tokens in "
    "different states: 0 if each state is a point, 1 if the states cannot be separated. Shift is the distance of a "
    f"state's center from its center at lengths up to {REFERENCE_LENGTH}, over the distance of two centers there. Both "
    "compare the last five symbols of a string, or those of its answer.",
    "Slots are those of the stack with the lowest within/between at length "
    f"{REFERENCE_LENGTH}: what it reads, or its top slot. Probabilities are means over tokens, stacks and heads; the "
    "CSV file has each stack.",
)


@dataclass(frozen=True)
class StateRun:
    """A run on a formal language, its score over SCORED, and its measurements."""

    run: FormalRun
    score: float
    measurements: Measurements

    @property
    def is_solved(self) -> bool:
        """True if the score is at least SOLVED."""
        return self.score >= SOLVED

    @property
    def validation_accuracy(self) -> float:
        """The accuracy on validation strings, of 41 to 60 symbols by default."""
        return self.run.row["validation_accuracy"]

    @property
    def labels(self) -> list[str]:
        """The name, task, model and seed of the run."""
        row = self.run.row
        return [row["arm"], row["data.task"], self.run.column, str(row["seed"])]

    @property
    def slot_place(self) -> str | None:
        """The place of the slots that separate the states best; None without a stack."""
        ratios = {
            place: values["within_between"]
            for (place, length), values in self.measurements.items()
            if length == REFERENCE_LENGTH and place.endswith((" read", " top"))
        }
        return min(ratios, key=lambda place: ratios[place], default=None)

    def get(self, place: str | None, length: int, name: str) -> float | None:
        """Return a measurement, or None if there is none."""
        return self.measurements.get((place or "", length), {}).get(name)

    def get_change(self, place: str | None) -> float | None:
        """Return by how much within/between grows from EARLY to LATE."""
        early, late = (self.get(place, length, "within_between") for length in (EARLY, LATE))
        return None if early is None or late is None else late - early

    def average_stacks(self, length: int, name: str) -> float | None:
        """Return the mean over the stacks of a measurement of their actions."""
        values = [v[name] for (place, n), v in self.measurements.items() if n == length and place.endswith(" actions")]
        return float(np.mean(values)) if values else None

    def average_depth(self, depth: tuple[int, int], max_length: int = SCORED[1]) -> float | None:
        """Return the accuracy of answers at these depths, over all strings up to a length."""
        place = "depth {}-{}".format(*depth)
        found = [v for (p, length), v in self.measurements.items() if p == place and length <= max_length]
        weights = [values["answers"] for values in found]
        return float(np.average([values["accuracy"] for values in found], weights=weights)) if found else None

    def get_deepest_accuracy(self) -> float | None:
        """Return the accuracy at the largest depths that strings up to LATE reach."""
        values = [self.average_depth(depth, LATE) for depth in DEPTHS]
        return next((value for value in reversed(values) if value is not None), None)


class Predictor(NamedTuple):
    """A figure that may predict failure. `sign` is 1 if larger values are worse, otherwise -1."""

    name: str
    sign: int
    compute: Callable[[StateRun], float | None]


BASELINE = Predictor("validation accuracy", -1, lambda run: run.validation_accuracy)
PREDICTORS = [
    Predictor(f"hidden: within/between at {LATE}", 1, lambda run: run.get("hidden", LATE, "within_between")),
    Predictor(f"hidden: its growth from {EARLY} to {LATE}", 1, lambda run: run.get_change("hidden")),
    Predictor(f"hidden: shift at {LATE}", 1, lambda run: run.get("hidden", LATE, "shift")),
    Predictor(f"slots: within/between at {LATE}", 1, lambda run: run.get(run.slot_place, LATE, "within_between")),
    Predictor(f"slots: its growth from {EARLY} to {LATE}", 1, lambda run: run.get_change(run.slot_place)),
    Predictor(f"slots: shift at {LATE}", 1, lambda run: run.get(run.slot_place, LATE, "shift")),
    Predictor(f"actions: largest probability at {LATE}", -1, lambda run: run.average_stacks(LATE, "max_probability")),
    Predictor(f"actions: below 0.9 at {LATE}", 1, lambda run: run.average_stacks(LATE, "below_0.9")),
    Predictor(f"actions: below 0.99 at {LATE}", 1, lambda run: run.average_stacks(LATE, "below_0.99")),
    Predictor(f"actions: entropy at {LATE}", 1, lambda run: run.average_stacks(LATE, "entropy")),
    Predictor(f"accuracy at the largest depth up to {LATE}", -1, StateRun.get_deepest_accuracy),
]


def build_state_report(runs: Sequence[StateRun], notes: Sequence[str]) -> Report:
    """Build the tables, the figure and the records of measured runs."""
    tables = [_build_distances(runs), *_build_actions(runs), *_build_depths(runs)]
    passing = [run for run in runs if run.validation_accuracy >= SOLVED]
    failing = sum(not run.is_solved for run in passing)
    prediction = build_prediction(runs, f"Prediction of failure, {len(runs)} runs")
    remarks = [
        f"Of {len(passing)} runs with a validation accuracy of at least {SOLVED}, {failing} fail over "
        f"{SCORED[0]}..{SCORED[1]}: their mean accuracy is below {SOLVED}."
    ]
    if prediction:
        tables.append(prediction)
        remarks.append(
            f"A prediction uses strings of up to {LATE} symbols only. AUC is the probability that a failed run has the "
            "worse figure than a solved run. The accuracy and the difference are on the same runs. Intervals: 95 %, by "
            "bootstrap over the runs; they cover neither the choice of these runs nor other tasks. An interval of "
            "length 0 says only that no pair of these runs is in the wrong order."
        )
        if 0 < failing < len(passing) < len(runs):
            among = build_prediction(
                passing, f"Prediction among the {len(passing)} runs with a validation accuracy of {SOLVED}"
            )
            tables += [among] if among else []
    else:
        remarks.append(f"no prediction: it requires {MIN_RUNS} runs, some solved and some not")
    records = [
        dict(zip(("run", "task", "model", "seed"), run.labels, strict=True))
        | {"folder": run.run.row["path"], "score": run.score, "validation_accuracy": run.validation_accuracy}
        | {"place": place, "length": length}
        | values
        for run in runs
        for (place, length), values in run.measurements.items()
    ]
    return Report(tables, [*LEGEND, *remarks, *notes], records, lambda: draw_states(runs))


# Tables


def _build_table(title: str, header: Sequence[str], rows: Sequence[tuple[StateRun, list[str]]]) -> Table:
    ordered = sorted(rows, key=lambda row: (row[0].labels[1], -row[0].score))
    cells = [
        [*run.labels, f"**{run.score:.3f}**" if run.is_solved else f"{run.score:.3f}", *row] for run, row in ordered
    ]
    score = f"score {SCORED[0]}..{SCORED[1]}"
    return Table(title, ["run", "task", "model", "seed", score, *header], cells, 4)


def _build_distances(runs: Sequence[StateRun]) -> Table:
    header = ["validation", *(f"hidden {n}" for n in SHOWN), f"shift {LATE}", f"shift {SHOWN[-1]}"]
    header += ["slots", *(f"slots {n}" for n in SHOWN), f"shift {LATE}", f"shift {SHOWN[-1]}"]
    rows = []
    for run in runs:
        row = [format_score(run.validation_accuracy)]
        for place in ("hidden", run.slot_place):
            row += [] if place == "hidden" else [place or ABSENT]
            row += [format_score(run.get(place, n, "within_between")) for n in SHOWN]
            row += [format_score(run.get(place, n, "shift")) for n in SHOWN[1:]]
        rows.append((run, row))
    return _build_table("Within/between and shift of the states, by length; bold: solved", header, rows)


def _build_actions(runs: Sequence[StateRun]) -> list[Table]:
    names = {"max_probability": "largest", "below_0.9": "<0.9", "below_0.99": "<0.99", "entropy": "entropy"}
    header = [f"{title} {n}" for title in names.values() for n in SHOWN]
    rows = [(run, [format_score(run.average_stacks(n, name)) for name in names for n in SHOWN]) for run in runs]
    rows = [(run, row) for run, row in rows if set(row) != {ABSENT}]
    title = (
        "Sharpness of the actions: the largest probability, the share of tokens below 0.9 and 0.99, the entropy (nats)"
    )
    return [_build_table(title, header, rows)] if rows else []


def _build_depths(runs: Sequence[StateRun]) -> list[Table]:
    rows = [(run, [format_score(run.average_depth(depth)) for depth in DEPTHS]) for run in runs]
    rows = [(run, row) for run, row in rows if set(row) != {ABSENT}]
    title = "Accuracy by depth, over all lengths: nesting of brackets, or the position in the stack from the top"
    return [_build_table(title, [f"{first}-{last}" for first, last in DEPTHS], rows)] if rows else []


# Prediction


def build_prediction(runs: Sequence[StateRun], title: str) -> Table | None:
    """Return how well each figure predicts failure, or None with too few runs or if all or none of them fail."""
    rows = []
    for predictor in [BASELINE, *PREDICTORS]:
        known = [(run, value) for run in runs if (value := predictor.compute(run)) is not None]
        failed = sum(not run.is_solved for run, _ in known)
        if len(known) < MIN_RUNS or failed in (0, len(known)):
            continue
        scores, baseline = (np.array([f(run) for run, _ in known]) for f in (lambda run: run.score, BASELINE.compute))
        figures, is_failed = np.array([value for _, value in known]), scores < SOLVED

        def predict(rows: Any, figures=figures, sign=predictor.sign, baseline=baseline, scores=scores) -> np.ndarray:
            """Return the statistics [4, ...] of the runs with these numbers [..., N]."""
            is_failed = scores[rows] < SOLVED
            areas = [compute_auc(v[rows], is_failed) for v in (sign * figures, -baseline)]
            return np.stack([correlate_ranks(figures[rows], scores[rows]), *areas, areas[0] - areas[1]])

        draws = np.random.default_rng(0).integers(len(known), size=(RESAMPLES, len(known)))
        statistics = zip(predict(np.arange(len(known))), predict(draws), ("+.2f", ".2f", ".2f", "+.2f"), strict=True)
        cells = [_format_statistic(*statistic, len(known)) for statistic in statistics]
        if predictor is BASELINE:
            cells[2:] = [ABSENT, ABSENT]
        rows.append([predictor.name, str(len(known)), str(int(is_failed.sum())), *cells])
    header = ["figure", "runs", "failed", "rank correlation with the score", "AUC", "AUC of the accuracy", "difference"]
    return Table(title, header, rows) if rows else None


def _format_statistic(value: float, resampled: np.ndarray, style: str, num_runs: int) -> str:
    if np.isnan(value):  # the figure is the same in all runs
        return ABSENT
    if num_runs < ENOUGH_RUNS:
        return f"{value:{style}} (too few runs)"
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    return f"{value:{style}} ({low:.2f} to {high:.2f})"


def correlate_ranks(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return Spearman's rank correlation over the last dimension; NaN for constant values."""
    a, b = (stats.rankdata(values, axis=-1) for values in (x, y))
    a, b = (ranks - ranks.mean(-1, keepdims=True) for ranks in (a, b))
    with np.errstate(invalid="ignore"):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))


def compute_auc(figures: np.ndarray, is_failed: np.ndarray) -> np.ndarray:
    """Return the share of pairs, over the last dimension, whose failed run has the larger figure; a tie counts 1/2.

    It is NaN if all or none of the runs failed.
    """
    failed = is_failed.sum(-1)
    solved = is_failed.shape[-1] - failed
    above = (stats.rankdata(figures, axis=-1) * is_failed).sum(-1) - failed * (failed + 1) / 2
    with np.errstate(invalid="ignore"):
        return above / (failed * solved)


# Figure


def draw_states(runs: Sequence[StateRun]) -> Any:
    """Draw within/between of hidden states and slots, and the accuracy, against the length: one line for each run."""
    from matplotlib.lines import Line2D

    figure, panels = new_figure(10, 3.6, 1, 3, sharex=True)
    models = list(dict.fromkeys(run.run.column for run in runs))
    styles: dict[str, Any] = {model: LINE_STYLES[i % len(LINE_STYLES)] for i, model in enumerate(models)}
    for run in runs:
        style = {"color": PALETTE[0 if run.is_solved else 1], "linestyle": styles[run.run.column], "linewidth": 1}
        for axes, place in zip(panels, ("hidden", run.slot_place, "answers"), strict=True):
            name = "accuracy" if place == "answers" else "within_between"
            values = {n: value for n in LENGTHS if (value := run.get(place, n, name)) is not None}
            axes.plot(list(values), list(values.values()), alpha=0.8, **style)
    titles = ("Hidden states: within/between", "Slots: within/between", "Accuracy")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=9)
        axes.set(xscale="log", ylim=(-0.02, 1.04), xlabel="Length")
        axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS], fontsize=8)
        axes.minorticks_off()
        axes.axvspan(LENGTHS[0], REFERENCE_LENGTH, color="black", alpha=0.07, linewidth=0)
    handles = [Line2D([], [], color=PALETTE[i], linewidth=2) for i in (0, 1)]
    handles += [Line2D([], [], color="black", linestyle=styles[model]) for model in models]
    legend = {"loc": "outside lower center", "ncols": len(handles), "fontsize": 8, "frameon": False}
    figure.legend(handles, [f"solved (at least {SOLVED})", "failed", *models], **legend)
    return figure
