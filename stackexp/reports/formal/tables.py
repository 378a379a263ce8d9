"""The formal-language table in Markdown, and the rows and notes that it shares with LaTeX."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from stackexp.reports.formal.cells import Cell, get_median_accuracy, get_median_loss
from stackexp.reports.formal.collect import Report
from stackexp.reports.formal.missing import CellKey, SweepProgress, find_commands
from stackexp.reports.formal.paper import CLASSES, COLUMNS, DEPTH
from stackexp.reports.formal.recipes import (
    find_differences,
    format_curriculum,
    format_feedback,
    format_overrides,
    format_slots,
    hash_without_task,
    name_recipe,
)
from stackexp.reports.formal.runs import Evaluation, FormalRun
from stackexp.tables import ABSENT, format_table
from stackexp.tasks import TASKS

BELOW, COARSE, UNFINISHED = "↓", "†", "‡"
LEGEND = (
    "Ours: best / median over the seeds (number of seeds) of the mean accuracy on lengths {first}..{last} "
    "({thoroughness}). Bold: at least the paper's score at two decimals; {below}: below it. paper: Table 1 of arXiv "
    "2507.15343, best seed; {absent}: not printed. StackTrans: any axis except depth. Training steps: {steps}."
)
RECIPE_HEADER = (
    *("task", "axis", "read", "feedback", "lambda", "S", "curriculum", "steps", "seeds", "validation"),
    "recipe",
)
MAX_SHOWN_DIFFERENCES = 6


class Markup(NamedTuple):
    """The functions of a text format for bold text, italic text and escaping."""

    bold: Callable[[str], str]
    italic: Callable[[str], str]
    escape: Callable[[str], str]


MARKDOWN = Markup("**{}**".format, "*{}*".format, str)


def format_markdown(report: Report) -> str:
    """Return the table, the recipes, the commands for missing cells and notes as Markdown."""
    sweeps = SweepProgress(report)
    parts = [format_table(build_rows(report, MARKDOWN), header=build_header(), style="markdown"), format_legend(report)]
    if rows := build_recipe_rows(report):
        parts += ["**Recipes of StackTrans**", format_table(rows, header=RECIPE_HEADER, style="markdown")]
    sections = {
        "Other models": describe_baselines(report),
        "Commands for missing cells": describe_commands(report, sweeps),
        "Notes": [*build_notes(report), *sweeps.notes, *report.skipped],
    }
    for title, lines in sections.items():
        if lines:
            parts += [f"**{title}**", "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join(parts) + "\n"


# Rows of the table


def build_header() -> list[str]:
    """Return the titles: the task, then each model and the paper's score, which both StackTrans columns share."""
    header = ["task"]
    for column in COLUMNS:
        header += [column] if column == "StackTrans" else [column, "paper"]
    return header


def build_rows(report: Report, markup: Markup) -> list[list[str]]:
    """Return the rows below the header: the name of each class, then its tasks."""
    rows = []
    for name, tasks in CLASSES.items():
        rows.append([markup.italic(name), *[""] * (len(build_header()) - 1)])
        for task in tasks:
            row = [markup.escape(task)]
            for column in COLUMNS:
                cell = report.cells[task, column]
                row.append(_format_cell(report, cell, markup))
                if column != "StackTrans":
                    row.append(markup.escape(ABSENT if cell.paper is None else f"{cell.paper:.2f}"))
            rows.append(row)
    return rows


def _format_cell(report: Report, cell: Cell, markup: Markup) -> str:
    if not cell.scores:
        return markup.escape("missing" + UNFINISHED * cell.is_unfinished)
    best = f"{max(cell.scores):.2f}"
    marks = COARSE * bool(report.find_coarse(cell)) + UNFINISHED * cell.is_unfinished
    rest = f"{BELOW * cell.is_below_paper} / {statistics.median(cell.scores):.2f} ({len(cell.scores)}){marks}"
    return (markup.bold(best) if cell.reaches_paper else best) + markup.escape(rest)


def format_legend(report: Report) -> str:
    """Explain the table: what the scores are, and how long the models were trained."""
    first, last = report.lengths
    steps: dict[str, list[int]] = defaultdict(list)
    for (_, column), cell in report.cells.items():
        steps[column] += [run.step for run in cell.runs]
    return LEGEND.format(
        first=first,
        last=last,
        thoroughness=_format_thoroughness(report.finest),
        below=BELOW,
        absent=ABSENT,
        steps="; ".join(f"{column} {_format_steps(steps[column])}" for column in COLUMNS if steps[column]),
    )


def _format_steps(steps: list[int]) -> str:
    return f"{min(steps):,}" if min(steps) == max(steps) else f"{min(steps):,} to {max(steps):,}"


def _format_thoroughness(evaluation: Evaluation) -> str:
    lengths = "every length" if evaluation.stride == 1 else f"one length in {evaluation.stride}"
    return f"{lengths}, {evaluation.sequences} strings each"


def _format_cells(keys: Iterable[CellKey]) -> str:
    """Return cells as `LSTM: even_pairs, parity_check; StackRNN: all tasks`."""
    columns: dict[str, list[str]] = defaultdict(list)
    for task, column in keys:
        columns[column].append(task)
    return "; ".join(f"{column}: {_format_tasks(tasks)}" for column, tasks in columns.items())


def _format_tasks(tasks: list[str]) -> str:
    return "all tasks" if set(tasks) == set(TASKS) else ", ".join(tasks)


# Recipes


def build_recipe_rows(report: Report) -> list[list[str]]:
    """Return a row of RECIPE_HEADER for each StackTrans cell with runs; validation is the median accuracy."""
    rows = []
    for task in TASKS:
        cell = report.cells[task, "StackTrans"]
        if cell.runs:
            config, accuracy = cell.best_run.config, get_median_accuracy(cell.runs)
            weight = config.get("model.memory.entropy_weight")
            rows.append(
                [
                    task,
                    *(str(config.get(f"model.memory.{key}", ABSENT)) for key in ("axis", "read")),
                    format_feedback(config),
                    ABSENT if weight is None else f"{weight:g}",
                    format_slots(config),
                    format_curriculum(config),
                    f"{cell.best_run.step:,}",
                    ", ".join(str(run.seed) for run in cell.runs),
                    ABSENT if accuracy is None else f"{accuracy:.3f}",
                    f"`{name_recipe(cell.best_run)}`",
                ]
            )
    return rows


def describe_baselines(report: Report) -> list[str]:
    """Return a line for each recipe of the other models, with the tasks that it is used for."""
    recipes: dict[tuple[int, str], list[FormalRun]] = defaultdict(list)
    for (_, column), cell in report.cells.items():
        if cell.runs and column != "StackTrans":
            recipes[COLUMNS.index(column), hash_without_task(cell.best_run.recipe)].append(cell.best_run)
    order = sorted(recipes, key=lambda key: key[0])  # stable: recipes of a column stay in the order of the tasks
    return [f"{COLUMNS[key[0]]}: {_describe_recipe(recipes[key])}" for key in order]


def _describe_recipe(runs: list[FormalRun]) -> str:
    run, config = runs[0], runs[0].config
    parts = [f"`{name_recipe(run)}`", f"{_format_steps([run.step for run in runs])} steps"]
    parts += [f"lr {config['optimizer.lr']:g}", f"curriculum: {format_curriculum(config)}"]
    if run.column == "Transformer":
        parts += [f"positional {config['model.positional']}", "causal" if config["model.causal"] else "not causal"]
    if run.column == DEPTH:
        parts += [f"read {config['model.memory.read']}", f"lambda {config['model.memory.entropy_weight']:g}"]
        parts.append(f"S {format_slots(config)}")
    return f"{', '.join(parts)} ({_format_tasks([run.task for run in runs])})"


# Notes


def describe_commands(report: Report, sweeps: SweepProgress) -> list[str]:
    """Return a line for each command that fills missing cells."""
    cells: dict[str, list[CellKey]] = defaultdict(list)
    for key, command in find_commands(report, sweeps).items():
        cells[command].append(key)
    return [f"`{command}` ({_format_cells(keys)})" for command, keys in cells.items()]


def build_notes(report: Report) -> list[str]:
    """Return notes on coarse tests, unfinished runs, recipes that were not chosen and duplicate seeds."""
    notes = describe_marks(report)
    for cell in report.cells.values():
        name = f"{cell.column}, {cell.task}"
        notes += [f"{name}: recipe not chosen: {_describe_other_recipe(cell, runs)}" for runs in cell.other_recipes]
        if cell.duplicates:
            paths = ", ".join(f"{run.path} (seed {run.seed})" for run in cell.duplicates)
            notes.append(f"{name}: duplicate seeds, not counted: {paths}")
    return notes


def describe_marks(report: Report) -> list[str]:
    """Return a line for each kind of coarse test, and one for unfinished runs."""
    coarse: dict[str, list[CellKey]] = defaultdict(list)
    for key, cell in report.cells.items():
        for thoroughness in dict.fromkeys(map(_format_thoroughness, report.find_coarse(cell))):
            coarse[thoroughness].append(key)
    notes = [f"{COARSE} tested less than others: {how} ({_format_cells(keys)})" for how, keys in sorted(coarse.items())]
    unfinished = [cell for cell in report.cells.values() if cell.is_unfinished]
    if unfinished:
        runs = "; ".join(map(_describe_unfinished, unfinished))
        notes.append(f"{UNFINISHED} some runs are not finished and tested: {runs}")
    return notes


def _describe_unfinished(cell: Cell) -> str:
    runs = [*cell.pending, *(run for run in cell.runs if not run.is_finished)]
    return f"{cell.column} {cell.task}: " + ", ".join(f"{run.path} ({_describe_state(run)})" for run in runs)


def _describe_state(run: FormalRun) -> str:
    if run.is_finished:
        return "not tested over these lengths"
    return f"at step {run.step:,} of {run.config['trainer.max_steps']:,}"


def _describe_other_recipe(cell: Cell, runs: list[FormalRun]) -> str:
    """Describe a recipe that was not chosen: its differences, its seeds and the validation score that decided."""
    chosen = [*cell.runs, *cell.pending][0]
    changes = find_differences(runs[0].recipe, chosen.recipe)
    shown = format_overrides(dict(list(changes.items())[:MAX_SHOWN_DIFFERENCES]))
    shown += " ..." * (len(changes) > MAX_SHOWN_DIFFERENCES)
    finished = [run for run in runs if run.compute_score(cell.lengths) is not None]
    if not finished:
        return f"`{shown}` ({_describe_state(runs[0])}; {runs[0].path})"
    metric, ours, best = "accuracy", get_median_accuracy(finished), get_median_accuracy(cell.runs)
    if ours == best and None not in (losses := (get_median_loss(finished), get_median_loss(cell.runs))):
        metric, (ours, best) = "loss", losses
    validation = f"no validation {metric}" if ours is None else f"validation {metric} {ours:.3g}"
    comparison = "" if best is None else f", chosen {best:.3g}"
    seeds = len({run.seed for run in finished})
    return f"`{shown}` ({seeds} seed{'s' * (seeds != 1)}, {validation}{comparison}; {runs[0].path})"
