"""How the runs of a formal-language table were made, as commands: the shipped recipes, and what fills missing cells."""

import functools
import json
import shlex
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stackexp.config.affects import flatten_config
from stackexp.config.compose import compose
from stackexp.config.formal_language import TASKS
from stackexp.errors import ConfigError
from stackexp.reports.formal.collect import DEPTH, Cell, FormalRun, Recipe, Report, column_of, recipe_of
from stackexp.sweeps.grid import expand, format_value
from stackexp.sweeps.sweep import COPY, Sweep, get_shipped_folder, load_sweep

SHIPPED = {
    "LSTM": "formal/lstm",
    "StackRNN": "formal/stack_rnn",
    "StackAttn": "formal/stack_attention",
    "Transformer": "formal/transformer",
    "StackTrans": "formal/stacktrans",
    DEPTH: "formal/stacktrans-depth",
}
"""Column -> shipped config; StackTrans has one for each task in the folder of that name."""

TABLE = "formal_table"
"""The shipped sweep that fills every cell."""

OF_THE_TASK = ("data.task", "data.vocab_size", "data.output_vocab_size", "model.vocab_size", "model.output_vocab_size")
MOST = 4
"""So many overrides are spelled out; a recipe that differs in more is named by its run folder."""


def config_of(column: str, task: str) -> str:
    """The shipped config that is the recipe of a cell; those of one for all tasks want data.task besides."""
    return f"{SHIPPED[column]}/{task}" if column == "StackTrans" else SHIPPED[column]


def fit_command(column: str, tasks: list[str], changes: str) -> str:
    """What trains a model on these tasks, with as many seeds as the shipped table has."""
    loops, task = [("seed", map(str, _table().config.seeds))], tasks[0]
    if len(tasks) > 1:
        loops, task = [("task", tasks), *loops], "$task"
    named = "" if column == "StackTrans" else f" data.task={task}"
    begin = "".join(f"for {name} in {' '.join(values)}; do " for name, values in loops)
    command = f"python -m stackexp fit --config {config_of(column, task)}{named}{changes} seed=$seed"
    return begin + command + "; done" * len(loops)


@functools.cache
def _table() -> Sweep:
    """The shipped sweep of all cells."""
    return load_sweep(TABLE)


@functools.cache
def _changes() -> dict[tuple[str, str], str]:
    """(column, task) -> what the shipped table changes of the recipe, as overrides with a space in front."""
    found = {}
    for entry in _table().config.list:
        task = entry["data.task"]
        [column] = [column for column in SHIPPED if config_of(column, task) == entry["config"]]
        changes = {key: value for key, value in entry.items() if key not in ("name", "config", "data.task")}
        found[column, task] = f" {overrides(changes)}" if changes else ""
    return found


def differences(one: Recipe, other: Recipe) -> dict[str, Any]:
    """The keys of which the first recipe has other values, with its values; None for those it lacks."""
    keys = [key for key in {**other, **one} if key not in OF_THE_TASK]
    return {key: one.get(key) for key in keys if one.get(key) != other.get(key)}


def overrides(changes: dict[str, Any]) -> str:
    return " ".join(shlex.quote(f"{key}={format_value(value)}") for key, value in changes.items())


def name_of(run: FormalRun) -> str:
    """The shipped config of a run's cell with what was changed of it; the run's folder if it is something else."""
    name = config_of(run.column, run.task)
    shipped = _shipped(name)
    changes = differences(run.recipe, shipped) if shipped else {}
    if shipped is None or len(changes) > MOST:
        return f"{run.path}/config.yaml"
    return f"{name} {overrides(changes)}".strip()


@functools.cache
def _shipped(name: str) -> Recipe | None:
    try:
        config = compose([name])
    except ConfigError:  # not shipped with this version
        return None
    return recipe_of(flatten_config(config))


def without_task(recipe: Recipe) -> str:
    """What recipes of several tasks have in common, to be compared."""
    return json.dumps({k: v for k, v in recipe.items() if k not in OF_THE_TASK}, sort_keys=True, default=str)


def curriculum(config: dict[str, Any]) -> str:
    """How the longest training string grows, and how many batches have it."""
    longest = config.get("data.longest_fraction")
    share = f", longest in {longest:.0%} of the batches" if longest else ""
    if not config["data.curriculum_steps"]:
        return f"none (1..{config['data.max_length']}){share}"
    start, end = config["data.curriculum_start"], config["data.max_length"]
    return f"{start} to {end} in {config['data.curriculum_steps']:,} steps{share}"


def feedback(config: dict[str, Any]) -> str:
    if not config.get("model.memory.feedback"):
        return "no"
    units = config.get("model.memory.feedback_hidden_size")
    return config.get("model.memory.feedback_activation", "identity") + (f", {units} units" if units else "")


def slots(config: dict[str, Any]) -> str:
    """S while training, and in the test where it is another."""
    train, test = config.get("model.memory.num_slots"), config.get("model.memory.eval_num_slots")
    return f"{train}" if test in (None, train) else f"{train}, test {test}"


# Missing cells


def missing(report: Report, sweeps: "Sweeps") -> tuple[dict[tuple[str, str], int], list[str]]:
    """(task, column) -> number, from 1, of the command that fills the cell or adds its seeds; and the commands."""
    where: dict[tuple[str, str], str] = {}
    never: dict[tuple[str, str], list[str]] = defaultdict(list)  # column, changes -> tasks that no run was begun of
    for (task, column), cell in report.cells.items():
        if cell.pending:
            where[task, column] = sweeps.command_of(cell.pending) or _go_on(cell)
        elif not cell.runs and (command := sweeps.command(task, column)):
            where[task, column] = command
        elif not cell.runs:
            never[column, _changes()[column, task]].append(task)
    for (column, changes), tasks in never.items():
        where |= dict.fromkeys(((task, column) for task in tasks), fit_command(column, tasks, changes))
    commands = list(dict.fromkeys(where[key] for key in report.cells if key in where))
    return {key: commands.index(command) + 1 for key, command in where.items()}, commands


def _go_on(cell: Cell) -> str:
    """The commands for the runs that are not finished, or not tested far enough."""
    commands = []
    for run in cell.pending:
        folder = shlex.quote(str(run.path))
        if run.finished:
            commands.append(f"python -m stackexp test --run {folder} data.eval_max_length={cell.among[1]}")
        else:
            commands.append(f"python -m stackexp fit --config {folder}/config.yaml --run {folder}")
    return "; ".join(commands)


class Sweeps:
    """The sweeps that the runs belong to: which cells they are to fill, and how many of their trials are not done."""

    def __init__(self, report: Report, paths: Iterable[Path | str]) -> None:
        self.seeds: dict[Path, dict[tuple[str, str], set[int]]] = {}  # folder -> cell -> seeds of its trials
        self.notes: list[str] = []
        for folder in _sweep_folders(report, paths):
            try:
                self.seeds[folder] = _trials(folder)
            except ConfigError as error:
                self.notes.append(f"{folder}: its sweep cannot be read ({error})")
        self.done: dict[Path, dict[tuple[str, str], set[int]]] = defaultdict(lambda: defaultdict(set))
        for run in report.runs:
            if run.finished:
                self.done[run.path.parent][run.task, run.column].add(run.seed)

    def command(self, task: str, column: str) -> str:
        """What starts the trials of a cell that are not done; nothing if no sweep has any."""
        for folder, cells in self.seeds.items():
            if cells.get((task, column), set()) - self.done[folder][task, column]:
                return command_of(folder)
        return ""

    def command_of(self, runs: list[FormalRun]) -> str:
        """The sweep of the unfinished ones among these runs."""
        folders = [run.path.parent for run in runs if not run.finished and run.path.parent in self.seeds]
        return command_of(folders[0]) if folders else ""

    def lines(self) -> list[str]:
        """How many trials of each sweep are done."""
        found = list(self.notes)
        for folder, cells in self.seeds.items():
            total = sum(map(len, cells.values()))
            left = sum(len(seeds - self.done[folder][cell]) for cell, seeds in cells.items())
            if left:
                found.append(f"{folder}: {left} of {total} trials are not done: `{command_of(folder)}`")
        return found


def command_of(folder: Path) -> str:
    """The command of the sweep in a folder, by its shipped name where it lies in its place."""
    name = folder.name
    shipped = (get_shipped_folder() / f"{name}.yaml").is_file() and folder.resolve() == Path("runs", name).resolve()
    return f"python -m stackexp sweep run {name if shipped else shlex.quote(str(folder))}"


def _sweep_folders(report: Report, paths: Iterable[Path | str]) -> list[Path]:
    candidates = [*map(Path, paths), *(run.path.parent for run in report.runs)]
    return list(dict.fromkeys(folder for folder in candidates if (folder / COPY).is_file()))


def _trials(folder: Path) -> dict[tuple[str, str], set[int]]:
    """Cell -> seeds of the trials that a sweep is to have, but for trials that are in no column."""
    sweep = load_sweep(str(folder))
    if sweep.config.search:  # which chooses its trials as it goes
        return {}
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    composed: dict[str, dict[str, Any]] = {}  # composing takes a while: once for all tasks and seeds
    for _, values in expand(sweep.config):
        key = repr({k: v for k, v in values.items() if k not in ("seed", "data.task")})
        if key not in composed:
            composed[key] = flatten_config(sweep.build_trial(values, "any").config)
        config = composed[key]
        column = column_of(config) if config["data.kind"] == "formal_language" else None
        task = values.get("data.task", config.get("data.task"))
        if column and task in TASKS:
            found[task, column].add(values.get("seed", config["seed"]))
    return found
