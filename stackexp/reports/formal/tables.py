"""The formal-language table: what it says, and in Markdown."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stackexp.reports.formal.collect import (
    COLUMNS,
    DEPTH,
    Cell,
    FormalRun,
    Report,
    median_validation,
    median_validation_loss,
    paper,
)
from stackexp.reports.formal.recipes import (
    Sweeps,
    curriculum,
    differences,
    feedback,
    missing,
    name_of,
    overrides,
    slots,
    without_task,
)
from stackexp.reports.tables import ABSENT

SHORT, COARSE, UNFINISHED = "↓", "†", "‡"
LEGEND = (
    "Ours: best / median of the seeds (number of seeds), mean accuracy over strings of length {first}..{last} "
    "({manner}). Bold: at least the paper's figure, at its two decimals; {short}: below it. paper: Table 1 of "
    "arXiv 2507.15343, best of the seeds; {absent}: it prints none. StackTrans: any axis but depth. "
    "Steps of training: {steps}."
)
RECIPE_HEADER = (
    *("task", "axis", "read", "feedback", "lambda", "S", "curriculum", "steps", "seeds", "validation"),
    "recipe",
)


@dataclass(frozen=True)
class Text:
    """What a table says of a cell, before it is in any markup."""

    best: str
    rest: str = ""
    bold: bool = False


# What the tables say


def ours(report: Report, cell: Cell, numbers: dict[tuple[str, str], int]) -> Text:
    """Best / median (seeds) with its marks; of an empty cell, the number of the command that fills it."""
    number = numbers.get((cell.task, cell.column))
    reference = f" [{number}]" if number else ""
    if not cell.scores:
        return Text("missing", UNFINISHED * cell.unfinished + reference)
    marks = COARSE * bool(report.coarse(cell)) + UNFINISHED * cell.unfinished
    rest = f"{SHORT * cell.short} / {statistics.median(cell.scores):.2f} ({len(cell.scores)}){marks}"
    return Text(f"{max(cell.scores):.2f}", rest + reference, cell.reached)


def header() -> list[str]:
    """Task, then each model and the paper's figure; that of StackTrans is for both of ours."""
    columns = ["task"]
    for column in COLUMNS:
        columns += [column] if column == "StackTrans" else [column, "paper"]
    return columns


def rows(report: Report, numbers: dict[tuple[str, str], int]) -> list[tuple[str, list[Text]]]:
    """(task, cells) as `header` has them."""
    found = []
    for task in paper.TASKS:
        cells = []
        for column in COLUMNS:
            cell = report.cells[task, column]
            cells.append(ours(report, cell, numbers))
            if column != "StackTrans":
                cells.append(Text(ABSENT if cell.paper is None else f"{cell.paper:.2f}"))
        found.append((task, cells))
    return found


def legend(report: Report) -> str:
    first, last = report.among
    how = manner(report.finest.stride, report.finest.sequences)
    return LEGEND.format(first=first, last=last, manner=how, short=SHORT, absent=ABSENT, steps=_steps(report))


def _steps(report: Report) -> str:
    """Of each column, those of all its tasks."""
    found: dict[str, list[int]] = defaultdict(list)
    for (_, column), cell in report.cells.items():
        found[column] += [run.step for run in cell.runs]
    return "; ".join(f"{column} {_range(found[column])}" for column in COLUMNS if found[column])


def _range(steps: list[int]) -> str:
    return f"{min(steps):,}" if min(steps) == max(steps) else f"{min(steps):,} to {max(steps):,}"


def manner(stride: int, sequences: int) -> str:
    """How thorough a test is."""
    lengths = "every length" if stride == 1 else f"one length in {stride}"
    return f"{lengths}, {sequences} strings of each"


def notes(report: Report, sweeps: Sweeps) -> list[str]:
    """What is to be known of single cells, of recipes not taken and of runs left out; commands stand in `code`."""
    found = [*_coarse(report)]
    cells = [cell for cell in report.cells.values() if cell.unfinished]
    if cells:
        found.append(f"{UNFINISHED} not all runs are finished and tested: " + "; ".join(map(_unfinished, cells)))
    for cell in report.cells.values():
        where = f"{cell.column}, {cell.task}"
        found += [f"{where}: recipe not taken: {_other(cell, runs)}" for runs in cell.others]
        again = ", ".join(f"{run.path} (seed {run.seed})" for run in cell.again)
        found += [f"{where}: seeds that are there already, not counted: {again}"] * bool(again)
    return [*found, *sweeps.lines(), *report.left_out]


def _coarse(report: Report) -> list[str]:
    """One line for each manner of a less thorough test."""
    groups: dict[tuple[int, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (task, column), cell in report.cells.items():
        for key in dict.fromkeys((tested.stride, tested.sequences) for tested in report.coarse(cell)):
            groups[key][column].append(task)
    lines = []
    for (stride, sequences), columns in sorted(groups.items()):
        names = "; ".join(f"{column}: {_names(tasks)}" for column, tasks in columns.items())
        lines.append(f"{COARSE} tested less than others: {manner(stride, sequences)} ({names})")
    return lines


def _unfinished(cell: Cell) -> str:
    runs = [*cell.pending, *(run for run in cell.runs if not run.finished)]
    return f"{cell.column} {cell.task}: " + ", ".join(f"{run.path} ({_state(run)})" for run in runs)


def _state(run: FormalRun) -> str:
    if run.finished:
        return "not tested over these lengths"
    return f"at step {run.step:,} of {run.config['trainer.max_steps']:,}"


def _other(cell: Cell, runs: list[FormalRun]) -> str:
    """A recipe not taken: in what it differs, its seeds and its validation accuracy, or loss where that is the same."""
    taken = [*cell.runs, *cell.pending][0]
    changes = differences(runs[0].recipe, taken.recipe)
    shown = overrides(dict(list(changes.items())[:6])) + " ..." * (len(changes) > 6)
    finished = [run for run in runs if run.score(cell.among) is not None]
    seeds = len({run.seed for run in finished})
    what, median, best = "accuracy", median_validation(finished), median_validation(cell.runs)
    losses = median_validation_loss(finished), median_validation_loss(cell.runs)
    if median == best and None not in losses:
        what, (median, best) = "loss", losses
    validation = f"no validation {what}" if median is None else f"validation {what} {median:.3g}"
    against = "" if best is None else f", against {best:.3g}"
    state = f"{seeds} seed{'s' * (seeds != 1)}, {validation}{against}" if finished else _state(runs[0])
    return f"`{shown}` ({state}; {runs[0].path})"


def recipe_row(cell: Cell) -> list[str]:
    """RECIPE_HEADER of a cell with runs. validation: median over the seeds of the accuracy the recipe was chosen by."""
    run = cell.best_run
    config, validation = run.config, median_validation(cell.runs)
    axis, read = (str(config.get(f"model.memory.{key}", ABSENT)) for key in ("axis", "read"))
    weight = config.get("model.memory.entropy_weight")
    return [
        *(cell.task, axis, read, feedback(config)),
        *(ABSENT if weight is None else f"{weight:g}", slots(config)),
        *(curriculum(config), f"{run.step:,}", ", ".join(str(run.seed) for run in cell.runs)),
        *(ABSENT if validation is None else f"{validation:.3f}", f"`{name_of(run)}`"),
    ]


def recipes(report: Report) -> list[list[str]]:
    """One row for each cell of StackTrans that has runs."""
    return [recipe_row(cell) for task in paper.TASKS if (cell := report.cells[task, "StackTrans"]).runs]


def baselines(report: Report) -> list[str]:
    """One line for each recipe of the other models, with the tasks that it was taken for."""
    found: dict[tuple[str, str], list[FormalRun]] = defaultdict(list)
    for (_, column), cell in report.cells.items():
        if cell.runs and column != "StackTrans":
            run = cell.best_run
            found[column, without_task(run.recipe)].append(run)
    order = sorted(found, key=lambda key: COLUMNS.index(key[0]))
    return [f"{column}: {_training(found[column, recipe])}" for column, recipe in order]


def _training(runs: list[FormalRun]) -> str:
    config = runs[0].config
    parts = [f"`{name_of(runs[0])}`", f"{_range([run.step for run in runs])} steps", f"lr {config['optimizer.lr']:g}"]
    parts.append(f"curriculum: {curriculum(config)}")
    if runs[0].column == "Transformer":
        parts += [f"positional {config['model.positional']}", "causal" if config["model.causal"] else "not causal"]
    if runs[0].column == DEPTH:
        memory = {key: config[f"model.memory.{key}"] for key in ("read", "entropy_weight")}
        parts += [f"read {memory['read']}, lambda {memory['entropy_weight']:g}, S {slots(config)}"]
    return f"{', '.join(parts)} ({_names([run.task for run in runs])})"


def _names(tasks: list[str]) -> str:
    return "all tasks" if set(tasks) == set(paper.TASKS) else ", ".join(tasks)


# Markdown


def markdown(report: Report, paths: Iterable[Path | str]) -> str:
    """The table with the paper's figures, the recipes, what is missing and the notes."""
    sweeps = Sweeps(report, paths)
    numbers, commands = missing(report, sweeps)
    lines, kind = [header()], ""
    for task, cells in rows(report, numbers):
        if paper.TASKS[task] != kind:
            kind = paper.TASKS[task]
            lines.append([f"*{kind}*", *[""] * len(cells)])
        lines.append([task, *(_marked_down(cell) for cell in cells)])
    parts = [_pipes(lines), legend(report)]
    if found := recipes(report):
        parts += ["**Recipes of StackTrans**", _pipes([list(RECIPE_HEADER), *found])]
    parts += _list("The other models", baselines(report))
    if commands:
        parts += ["**Missing cells, and the commands that fill them**"]
        parts += ["\n".join(f"{number}. `{command}`" for number, command in enumerate(commands, 1))]
    return "\n\n".join([*parts, *_list("Notes", notes(report, sweeps))]) + "\n"


def _list(title: str, lines: list[str]) -> list[str]:
    return [f"**{title}**", "\n".join(f"- {line}" for line in lines)] if lines else []


def _marked_down(cell: Text) -> str:
    best = f"**{cell.best}**" if cell.bold else cell.best
    return f"{best}{cell.rest}"


def _pipes(lines: Sequence[list[str]]) -> str:
    """A Markdown table, its columns padded to be read in a terminal too."""
    lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(x, widths, strict=True)) + " |" for x in lines]
    return "\n".join([padded[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *padded[1:]])
