"""Benchmarks of several models: the paper's Table 2, a table of tasks, and averages over the training tokens."""

import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stackexp.errors import RunError
from stackexp.evaluation.benchmarks.results import (
    FILE,
    BenchmarkEvaluation,
    TaskScores,
    average_scores,
    average_tasks,
    format_score,
    read_evaluations,
)
from stackexp.frame import find_runs, name_runs
from stackexp.metric_tags import DOWNSTREAM
from stackexp.reports.report import LINE_STYLES, MARKERS, PALETTE, Report, Table, abbreviate_thousands, new_figure
from stackexp.runs import RunFolder
from stackexp.tables import ABSENT

SCORES = {"accuracy": "Accuracy", "bits_per_byte": "Bits per byte of the right answer"}
Score = tuple[float, float | None] | None
"""Mean and standard error."""
BENCHMARK_TASKS = {
    "HellaSwag": ("smollm2_hellaswag",),
    "ARC": ("smollm2_arc_easy", "smollm2_arc_challenge"),
    "PIQA": ("smollm2_piqa",),
    "MMLU": ("smollm2_mmlu",),
    "CommonsenseQA": ("smollm2_commonsense_qa",),
    "TriviaQA": ("smollm2_trivia_qa",),
    "Winogrande": ("smollm2_winogrande",),
    "OpenBookQA": ("smollm2_openbookqa",),
    "GSM8K (5-shot)": ("smollm2_gsm8k",),
}
"""Our tasks for each of the paper's benchmarks. ARC is the mean of its two tasks."""
TASK_NAMES = tuple(name for names in BENCHMARK_TASKS.values() for name in names)
PAPER_MODELS = {
    "StackTrans": (1, 44.3, (59.5, 59.0, 71.7, 36.5, 37.1, 11.2, 52.8, 37.5, 33.6)),
    "SmolLM": (0.6, 38.2, (51.8, 50.1, 71.6, 34.4, 35.3, 9.1, 52.8, 37.2, 1.6)),
    "SmolLM2": (4, 40.3, (54.5, 53.0, 71.7, 35.8, 38.0, 16.9, 52.5, 37.4, 3.2)),
    "Qwen2.5": (18, 40.1, (51.2, 45.4, 69.9, 33.7, 31.6, 4.3, 54.1, 37.4, 33.4)),
    "OLMo": (2, 38.7, (60.7, 44.0, 75.2, 31.9, 40.3, 2.8, 53.2, 38.0, 1.8)),
    "TinyLLaMA": (3, 37.9, (55.2, 43.4, 72.9, 32.2, 37.0, 9.8, 55.7, 33.2, 1.7)),
}
"""Model -> its training tokens in trillions, its average accuracy and its accuracies in percent, by benchmark."""
NOTE = (
    "†: from Table 2 of arXiv 2507.15343v2, scored with lighteval; no standard errors are given. ARC is the mean of "
    "ARC easy and challenge, as in the evaluations of the paper's baselines; the paper does not specify it."
)


@dataclass(frozen=True)
class Column:
    """One model: a run, or the file of `evaluate --out`."""

    name: str
    folder: RunFolder | None
    evaluations: list[BenchmarkEvaluation]

    @property
    def evaluation(self) -> BenchmarkEvaluation | None:
        """The evaluation that the tables show: of the last step, if possible without options that change the scores.

        Evaluations of one step with the same options are merged: they named the checkpoint in different ways.
        """

        def rank(evaluation: BenchmarkEvaluation) -> tuple[bool, bool, bool, int, str]:
            is_plain = evaluation.limit is None, evaluation.num_fewshot is None, not evaluation.exclude_long
            return *is_plain, evaluation.step or 0, evaluation.time

        if not self.evaluations:
            return None
        last = max(self.evaluations, key=rank)
        same = sorted((e for e in self.evaluations if e.options[1:] == last.options[1:]), key=rank)
        return dataclasses.replace(last, tasks={name: scores for e in same for name, scores in e.tasks.items()})

    @property
    def tasks(self) -> dict[str, TaskScores]:
        """The scores that the tables show."""
        return self.evaluation.tasks if self.evaluation else {}


def build_benchmarks(paths: Sequence[Path]) -> Report:
    """Build the report of the runs at or below `paths`, and of files that `evaluate --out` wrote.

    Raises RunError if there are no runs, or none has a score.
    """
    columns = _read_columns(paths)
    names = sorted({name for column in columns for name in column.tasks})
    command = "`python -m stackexp evaluate --run RUN --tasks smollm2`"
    if not names and not any(_read_curve(column, score)[0] for column in columns for score in SCORES):
        raise RunError(f"{', '.join(map(str, paths))}: no benchmarks yet; run {command}")
    common = [name for name in names if all(name in column.tasks for column in columns)]
    tables = [_build_table(score, columns, names, common) for score in SCORES] if names else []
    has_paper = any(name in TASK_NAMES for name in names)
    if has_paper:
        tables.insert(0, build_paper_table({column.name: column.tasks for column in columns}))
    wanted = {*names, *(TASK_NAMES if has_paper else ())}
    missing = [column.name for column in columns if not wanted <= column.tasks.keys()]
    notes = [f"tasks are missing for {', '.join(missing)}, filled by {command}"] if missing else []
    notes.append("Values: mean ± standard error over the documents. random: expected accuracy of a guess.")
    records = [
        {"model": column.name, "step": e.step, "tokens": e.tokens, "limit": e.limit, "task": name} | vars(scores)
        for column in columns
        for e in column.evaluations
        for name, scores in e.tasks.items()
    ]
    notes += [*map(_describe, (c for c in columns if c.evaluation)), *([NOTE] if has_paper else [])]
    return Report(tables, notes, records, lambda: draw_benchmarks(columns))


def _read_columns(paths: Sequence[Path]) -> list[Column]:
    files = list({path.resolve(): path for path in paths if path.suffix == ".json"}.values())
    folders = find_runs(path for path in paths if path.suffix != ".json")
    for file in files:
        if not file.is_file():
            command = f"evaluate --run RUN --out {shlex.quote(str(file))}"
            raise RunError(f"{file}: no such file; write it with `{command}`")
    sources: list[tuple[Path, RunFolder | None]] = [(folder.path, folder) for folder in folders]
    sources += [(file, None) for file in files]
    names = name_runs([path for path, _ in sources])
    columns = [
        Column(name, folder, read_evaluations(folder.path / FILE if folder else path))
        for name, (path, folder) in zip(names, sources, strict=True)
    ]
    if not columns:
        raise RunError(f"{', '.join(map(str, paths))}: no run folders; give run folders or folders of them")
    return columns


def _describe(column: Column) -> str:
    shown = column.evaluation
    assert shown is not None
    tokens = "" if shown.tokens is None else f" after {shown.tokens:,} tokens"
    limit = "" if shown.limit is None else f", only the first {shown.limit} documents of each task"
    shots = "" if shown.num_fewshot is None else f", {shown.num_fewshot} shots"
    excluded = ", without the documents that exceed its context" if shown.exclude_long else ""
    return f"{column.name}: {shown.checkpoint}{tokens}{limit}{shots}{excluded}"


def _build_table(score: str, columns: list[Column], names: list[str], common: list[str]) -> Table:
    guesses = {name: next(c.tasks[name].random_guess for c in columns if name in c.tasks) for name in names}
    has_guess = score == "accuracy"

    def build_row(label: str, guess: float | None, values: Sequence[Score]) -> list[str]:
        cells = [format_score(*(value or (None, None))) for value in values]
        return [label, *([format_score(guess)] if has_guess else []), *cells]

    def read_score(column: Column, name: str) -> Score:
        scores = column.tasks.get(name)
        return None if scores is None else (getattr(scores, score), getattr(scores, f"{score}_stderr"))

    rows = [build_row(name, guesses[name], [read_score(c, name) for c in columns]) for name in names]
    if len(common) > 1:
        averages = [average_tasks({name: c.tasks[name] for name in common}, score) for c in columns]
        known = [guess for name in common if (guess := guesses[name]) is not None]
        label = f"average of {'all' if len(common) == len(names) else f'{len(common)} common'} tasks"
        rows.append(build_row(label, math.fsum(known) / len(known) if known else None, averages))
    return Table(SCORES[score], ["task", *(["random"] if has_guess else []), *(c.name for c in columns)], rows)


# The paper's table


def score_benchmark(tasks: Mapping[str, TaskScores], benchmark: str, metric: str = "accuracy") -> Score:
    """Return the mean of a score over the tasks of a benchmark; None if one is not scored."""
    chosen = {task: tasks[task] for task in BENCHMARK_TASKS[benchmark] if task in tasks}
    is_complete = len(chosen) == len(BENCHMARK_TASKS[benchmark])
    is_complete = is_complete and all(getattr(scores, metric) is not None for scores in chosen.values())
    return average_tasks(chosen, metric) if is_complete else None


def average_benchmarks(tasks: Mapping[str, TaskScores], metric: str = "accuracy") -> Score:
    """Return the mean of a score over the nine benchmarks; None if one is not scored."""
    scores = [score for benchmark in BENCHMARK_TASKS if (score := score_benchmark(tasks, benchmark, metric))]
    return average_scores(scores) if len(scores) == len(BENCHMARK_TASKS) else None


def build_paper_table(models: Mapping[str, Mapping[str, TaskScores]]) -> Table:
    """Return the paper's table with a column for each of `models`, {name: scores by task}, before the paper's."""

    def build_row(label: str, read: Callable[[Mapping[str, TaskScores]], Score], paper: Sequence[float]) -> list[str]:
        return [label, *(_format_percent(read(tasks)) for tasks in models.values()), *(f"{x:.1f}" for x in paper)]

    printed = zip(*(accuracies for *_, accuracies in PAPER_MODELS.values()), strict=True)
    rows = [
        build_row(name, partial(score_benchmark, benchmark=name), paper)
        for name, paper in zip(BENCHMARK_TASKS, printed, strict=True)
    ]
    rows.append(build_row("average", average_benchmarks, [average for _, average, _ in PAPER_MODELS.values()]))
    header = ["benchmark", *models, *(f"{name}†" for name in PAPER_MODELS)]
    return Table("The paper's benchmarks: accuracy in percent", header, rows)


def _format_percent(score: Score) -> str:
    if score is None:
        return ABSENT
    mean, error = score
    return f"{100 * mean:.1f}" if error is None else f"{100 * mean:.1f} ± {100 * error:.1f}"


# The figure


def _read_curve(column: Column, score: str) -> tuple[dict[int, float], int]:
    """Return the average over the tasks that were scored during training, {tokens: average}, and their number."""
    curve: dict[int, float] = {}
    num_tasks = 0
    for line in column.folder.read_metrics() if column.folder else []:
        values = [v for tag, v in line.items() if tag.startswith(f"{DOWNSTREAM}/") and tag.endswith(f"/{score}")]
        if values and type(line.get("tokens")) is int and all(isinstance(value, int | float) for value in values):
            curve[line["tokens"]], num_tasks = math.fsum(values) / len(values), len(values)
    return curve, num_tasks


def _list_points(column: Column, score: str, names: list[str]) -> list[tuple[int | None, float]]:
    """Return tokens and average over the tasks `names` of each evaluation with these tasks and the table's options."""
    shown = column.evaluation
    same = [e for e in column.evaluations if shown and e.chosen == shown.chosen]
    complete = [(e.tokens, {name: e.tasks[name] for name in names}) for e in same if e.tasks.keys() >= set(names)]
    averages = [(tokens, _average_shared_tasks(tasks, score)) for tokens, tasks in complete]
    return [(tokens, average[0]) for tokens, average in averages if average]


def _average_shared_tasks(tasks: dict[str, TaskScores], score: str) -> Score:
    """Return the mean over the tasks; over the paper's nine benchmarks, if the tasks are those."""
    return average_benchmarks(tasks, score) if set(tasks) == set(TASK_NAMES) else average_tasks(tasks, score)


def draw_benchmarks(columns: list[Column]) -> Any:
    """Draw the averages over the training tokens.

    A line is the average of the tasks that a run scored in training. A point is that of the tasks that all models have
    been scored on by `evaluate`; for a model whose training tokens are unknown it is a dashed line.
    """
    scored = [column for column in columns if column.tasks]
    names = sorted(set.intersection(*(set(column.tasks) for column in scored))) if scored else []
    figure, panels = new_figure(7.2, 3.6, columns=2)
    for axes, (score, title) in zip(panels, SCORES.items(), strict=True):
        for i, column in enumerate(columns):
            _draw_model(axes, column, score, names, i)
        guess = (
            _average_shared_tasks({name: scored[0].tasks[name] for name in names}, "random_guess") if names else None
        )
        if guess and score == "accuracy":
            axes.axhline(guess[0], color="gray", linestyle=":", label="random guess")
        if score == "accuracy" and set(names) == set(TASK_NAMES):
            for (name, (tokens, average, _)), marker in zip(PAPER_MODELS.items(), MARKERS, strict=False):
                style = {"color": "black", "fillstyle": "none", "linestyle": "none", "label": f"paper: {name}"}
                axes.plot(tokens * 1e12, average / 100, marker, **style)
            axes.set_xscale("log")  # up to 18 trillion tokens
        axes.set(xlabel="Tokens", ylabel=f"{title.partition(' of ')[0]}, average")
        abbreviate_thousands(axes.xaxis)
        if axes.lines:
            axes.legend(fontsize=7)
    return figure


def _draw_model(axes: Any, column: Column, score: str, names: list[str], number: int) -> None:
    color = PALETTE[number % len(PALETTE)]
    curve, num_tasks = _read_curve(column, score)
    if curve:
        line = LINE_STYLES[number // len(PALETTE) % len(LINE_STYLES)]
        label = f"{column.name}, {_count_tasks(num_tasks)} in training"
        axes.plot(list(curve), list(curve.values()), line, color=color, label=label)
    points = _list_points(column, score, names) if names else []
    label = f"{column.name}, {_count_tasks(len(names))}"
    if known := sorted((tokens, average) for tokens, average in points if tokens is not None):
        axes.plot(*zip(*known, strict=True), MARKERS[number % len(MARKERS)], color=color, label=label)
    elif points:
        axes.axhline(points[-1][1], color=color, linestyle="--", label=label)


def _count_tasks(number: int) -> str:
    return f"{number} task{'s' * (number != 1)}"
