"""Benchmarks of several models: a table of tasks, and the average score over the training tokens."""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stackexp.errors import RunError
from stackexp.evaluation.benchmarks.results import (
    FILE,
    Evaluation,
    TaskScores,
    average_tasks,
    format_score,
    read_evaluations,
)
from stackexp.files import read_json
from stackexp.frame import find_runs, name_arm
from stackexp.metric_tags import DOWNSTREAM
from stackexp.reports import paper_benchmarks
from stackexp.reports.figures import abbreviate_thousands, new_figure
from stackexp.reports.report import LINE_STYLES, MARKERS, PALETTE, Report, Table
from stackexp.runs import RunFolder
from stackexp.tables import ABSENT

SCORES = {"accuracy": "Accuracy", "bits_per_byte": "Bits per byte of the right answer"}


@dataclass(frozen=True)
class Column:
    """One model: a run, or the file of `evaluate --out`. `evaluation` is that of its last scored checkpoint."""

    name: str
    source: Path
    folder: RunFolder | None
    evaluations: list[Evaluation]

    @property
    def evaluation(self) -> Evaluation | None:
        """The evaluation that the tables show: of the last step; preferred without --limit and without --num_fewshot.

        Evaluations of one step with the same options are merged: they named the checkpoint in different ways.
        """

        def rank(evaluation: Evaluation) -> tuple[bool, bool, int, str]:
            return evaluation.limit is None, evaluation.num_fewshot is None, evaluation.step or 0, evaluation.time

        ranked = sorted(self.evaluations, key=rank)
        if not ranked:
            return None
        last = ranked[-1]
        same = [evaluation for evaluation in ranked if evaluation.options[1:] == last.options[1:]]
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
    if not names and not any(_read_curve(column, score)[0] for column in columns for score in SCORES):
        command = f"python -m stackexp evaluate --run {shlex.quote(str(columns[0].source))} --tasks smollm2"
        raise RunError(f"{', '.join(map(str, paths))}: no benchmarks yet; run `{command}`")
    common = [name for name in names if all(name in column.tasks for column in columns)]
    tables = [_build_table(score, title, columns, names, common) for score, title in SCORES.items()] if names else []
    has_paper = any(name in paper_benchmarks.TASK_NAMES for name in names)
    if has_paper:
        names = sorted({*names, *paper_benchmarks.TASK_NAMES})
        tables.insert(0, paper_benchmarks.build_paper_table({column.name: column.tasks for column in columns}))
    return Report(
        tables,
        [*_describe(columns, names), *([paper_benchmarks.NOTE] if has_paper else [])],
        [record for column in columns for record in _list_records(column)],
        lambda: draw_benchmarks(columns),
    )


def _read_columns(paths: Sequence[Path]) -> list[Column]:
    files = [path for path in paths if path.suffix == ".json"]
    folders = find_runs(path for path in paths if path not in files)
    for file in files:
        if not file.is_file():
            raise RunError(f"{file}: no such file; write it with `evaluate --out {file}`")
    sources = [(folder.path, folder) for folder in folders] + [(file, None) for file in files]
    choices = [[name_arm(path) if folder else path.stem, path.name, str(path)] for path, folder in sources]
    columns = []
    for names, (path, folder) in zip(choices, sources, strict=True):
        name = next(name for i, name in enumerate(names) if [c[i] for c in choices].count(name) == 1)
        columns.append(Column(name, path, folder, read_evaluations(folder.path / FILE if folder else path)))
    if not columns:
        raise RunError(f"{', '.join(map(str, paths))}: no run folders; give run folders or folders of them")
    return columns


def _build_table(score: str, title: str, columns: list[Column], names: list[str], common: list[str]) -> Table:
    guesses = {name: next(c.tasks[name].random_guess for c in columns if name in c.tasks) for name in names}
    has_guess = score == "accuracy"
    rows = [
        [name, *([format_score(guesses[name])] if has_guess else []), *(_format_cell(c, name, score) for c in columns)]
        for name in names
    ]
    if len(common) > 1:
        averages = [average_tasks({name: c.tasks[name] for name in common}, score) for c in columns]
        known = [guess for name in common if (guess := guesses[name]) is not None]
        guess_cells = [format_score(math.fsum(known) / len(known) if known else None)] if has_guess else []
        label = f"average of {'all' if len(common) == len(names) else f'{len(common)} common'} tasks"
        rows.append([label, *guess_cells, *(format_score(*(average or (None, None))) for average in averages)])
    return Table(title, ["task", *(["random"] if has_guess else []), *(c.name for c in columns)], rows)


def _format_cell(column: Column, name: str, score: str) -> str:
    scores = column.tasks.get(name)
    return ABSENT if scores is None else format_score(getattr(scores, score), getattr(scores, f"{score}_stderr"))


def _describe(columns: list[Column], names: list[str]) -> list[str]:
    """Return notes: what each column shows, and the commands that fill its missing cells."""
    notes = ["Values: mean ± standard error over the documents. random: expected accuracy of a guess."]
    for column in columns:
        if (shown := column.evaluation) is not None:
            tokens = "" if shown.tokens is None else f" after {shown.tokens:,} tokens"
            limit = "" if shown.limit is None else f", only the first {shown.limit} documents of each task"
            shots = "" if shown.num_fewshot is None else f", {shown.num_fewshot} shots"
            notes.append(f"{column.name}: {shown.checkpoint}{tokens}{limit}{shots}")
        missing = [name for name in names or ["smollm2"] if name not in column.tasks]
        if missing:
            missing = ["smollm2"] if set(missing) == set(paper_benchmarks.TASK_NAMES) else missing
            notes.append(f"missing for {column.name}: `{_write_command(column, missing)}`")
    return notes


def _write_command(column: Column, names: list[str]) -> str:
    shown = column.evaluation
    checkpoint = shown.checkpoint if shown else None
    if column.folder:
        model = ["--run", str(column.source)]
        newest = column.folder.newest_checkpoint()
        model += ["--ckpt_path", checkpoint] if checkpoint and newest and newest.name != Path(checkpoint).name else []
    else:
        model = ["--model", f"hf:{checkpoint or 'FOLDER'}", "--out", str(column.source)]
        config = Path(checkpoint or "", "config.json")
        model += ["--trust-remote-code"] if config.is_file() and "auto_map" in read_json(config) else []
    limits = {"--limit": shown.limit, "--num_fewshot": shown.num_fewshot} if shown else {}
    options = [text for name, value in limits.items() if value is not None for text in (name, str(value))]
    return shlex.join(["python", "-m", "stackexp", "evaluate", *model, "--tasks", ",".join(names), *options])


def _list_records(column: Column) -> list[dict[str, Any]]:
    return [
        {"model": column.name, "step": e.step, "tokens": e.tokens, "limit": e.limit, "task": name} | vars(scores)
        for e in column.evaluations
        for name, scores in e.tasks.items()
    ]


def _read_curve(column: Column, score: str) -> tuple[dict[int, float], int]:
    """Return the average over the tasks that were scored during training, {tokens: average}, and their number."""
    curve: dict[int, float] = {}
    num_tasks = 0
    for line in column.folder.read_metrics() if column.folder else []:
        values = [v for tag, v in line.items() if tag.startswith(f"{DOWNSTREAM}/") and tag.endswith(f"/{score}")]
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            curve[line["tokens"]], num_tasks = math.fsum(known) / len(known), len(known)
    return curve, num_tasks


def _list_points(column: Column, score: str, names: list[str]) -> list[tuple[int | None, float]]:
    """Return tokens and average over the tasks `names` of each evaluation with these tasks and the table's options."""
    shown = column.evaluation
    same = [e for e in column.evaluations if shown and (e.limit, e.num_fewshot) == (shown.limit, shown.num_fewshot)]
    complete = [(e.tokens, {name: e.tasks[name] for name in names}) for e in same if e.tasks.keys() >= set(names)]
    averages = [(tokens, _average_common(tasks, score)) for tokens, tasks in complete]
    return [(tokens, average[0]) for tokens, average in averages if average]


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
        guess = _average_common({name: scored[0].tasks[name] for name in names}, "random_guess") if names else None
        if guess and score == "accuracy":
            axes.axhline(guess[0], color="gray", linestyle=":", label="random guess")
        if score == "accuracy" and set(names) == set(paper_benchmarks.TASK_NAMES):
            _draw_paper(axes)
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


def _average_common(tasks: dict[str, TaskScores], score: str) -> tuple[float, float | None] | None:
    """Return the mean over the tasks; over the paper's nine benchmarks, if the tasks are those."""
    is_paper = set(tasks) == set(paper_benchmarks.TASK_NAMES)
    return paper_benchmarks.average_benchmarks(tasks, score) if is_paper else average_tasks(tasks, score)


def _draw_paper(axes: Any) -> None:
    """Draw the models of the paper's table, on a logarithmic axis: they have up to 18 trillion tokens."""
    for (name, model), marker in zip(paper_benchmarks.PAPER_MODELS.items(), MARKERS, strict=False):
        point = model.tokens * 1e12, model.average / 100
        axes.plot(*point, marker, color="black", fillstyle="none", linestyle="none", label=f"paper: {name}")
    axes.set_xscale("log")


def _count_tasks(number: int) -> str:
    return f"{number} task{'s' * (number != 1)}"
