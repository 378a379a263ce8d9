"""The commands that reproduce the recipe of a run, and those that fill missing cells of the formal-language table."""

import functools
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

from stackexp.config.affects import flatten_config
from stackexp.config.compose import compose
from stackexp.errors import ConfigError
from stackexp.reports.formal.cells import Report
from stackexp.reports.formal.paper import COLUMNS, find_column
from stackexp.reports.formal.runs import FormalRun, Options, select_recipe
from stackexp.sweeps.grid import expand, format_value
from stackexp.sweeps.shipped import list_shipped
from stackexp.sweeps.sweep import COPY, load_sweep
from stackexp.tasks import TASKS

TASK_OPTIONS = ("data.task", "data.vocab_size", "data.output_vocab_size", "model.vocab_size", "model.output_vocab_size")
MAX_OVERRIDES = 4
"""A recipe that differs in more options from the shipped config is named by its run folder."""
FULL_TABLE = "python -m stackexp sweep run formal_table"
"""The shipped sweep that fills every cell."""

CellKey = tuple[str, str]
"""Task and column."""
Seeds = dict[CellKey, set[int]]


# Recipes


def name_recipe(run: FormalRun) -> str:
    """Return the shipped config with the overrides that reproduce a run, or the run's config if that is shorter."""
    name = f"formal/{COLUMNS[run.column]}" + f"/{run.task}" * (run.column == "StackTrans")
    shipped = _compose_recipe(name)
    changes = find_differences(run.recipe, shipped) if shipped else {}
    if shipped is None or len(changes) > MAX_OVERRIDES:
        return f"{run.path}/config.yaml"
    return f"{name} {format_overrides(changes)}".strip()


@functools.cache
def _compose_recipe(name: str) -> Options | None:
    """Return the recipe of a shipped config, or None if this version does not ship it."""
    try:
        return select_recipe(flatten_config(compose([name])))
    except ConfigError:
        return None


def find_differences(recipe: Options, other: Options) -> dict[str, Any]:
    """Return the options of `recipe` that differ from `other`, except those of the task; None for missing ones."""
    keys = [key for key in {**other, **recipe} if key not in TASK_OPTIONS]
    return {key: recipe.get(key) for key in keys if recipe.get(key) != other.get(key)}


def format_overrides(options: dict[str, Any]) -> str:
    """Return options as overrides for the command line."""
    return " ".join(shlex.quote(f"{key}={format_value(value)}") for key, value in options.items())


# Missing cells


def find_commands(report: Report) -> tuple[dict[str, list[CellKey]], list[str]]:
    """Return command -> the missing or unfinished cells that it completes, and notes about unfinished sweeps.

    The runs of a cell are resumed. A cell without runs is filled by the first sweep of the report that lacks trials of
    it, else by the shipped sweep.
    """
    sweeps, notes = _find_missing_trials(report)
    commands: dict[str, list[CellKey]] = defaultdict(list)
    for key, cell in report.cells.items():
        if cell.pending:
            commands["; ".join(map(_resume_run, cell.pending))].append(key)
        elif not cell.runs:
            commands[next((command for command, missing in sweeps if missing.get(key)), FULL_TABLE)].append(key)
    return commands, notes


def _resume_run(run: FormalRun) -> str:
    folder = shlex.quote(str(run.path))
    if run.is_finished:
        return f"python -m stackexp test --run {folder} data.eval_max_length={run.lengths[1]}"
    return f"python -m stackexp fit --run {folder}"


def _find_missing_trials(report: Report) -> tuple[list[tuple[str, Seeds]], list[str]]:
    """Return command and missing seeds of each sweep that has runs in the report, and notes about unfinished ones."""
    finished: dict[Path, Seeds] = defaultdict(lambda: defaultdict(set))
    for run in report.runs:
        if run.is_finished:
            finished[run.path.parent][run.task, run.column].add(run.seed)
    sweeps, notes = [], []
    for folder in dict.fromkeys([*report.paths, *(run.path.parent for run in report.runs)]):
        if not (folder / COPY).is_file():
            continue
        try:
            planned = _plan_seeds(folder)
        except ConfigError as error:
            notes.append(f"{folder}: its sweep cannot be read ({error})")
            continue
        missing = {key: seeds - finished[folder][key] for key, seeds in planned.items()}
        command = build_sweep_command(folder)
        sweeps.append((command, missing))
        total, left = (sum(map(len, seeds.values())) for seeds in (planned, missing))
        if left:
            notes.append(f"{folder}: {left} of {total} trials are not finished: `{command}`")
    return sweeps, notes


def build_sweep_command(folder: Path) -> str:
    """Return the command of the sweep in a folder: by name if it is a shipped sweep in its default folder."""
    is_shipped = folder.name in list_shipped() and folder.resolve() == Path("runs", folder.name).resolve()
    return f"python -m stackexp sweep run {folder.name if is_shipped else shlex.quote(str(folder))}"


def _plan_seeds(folder: Path) -> Seeds:
    """Return the seeds of the trials of a sweep in each cell. A search chooses its trials later and has none."""
    sweep = load_sweep(str(folder))
    planned: Seeds = defaultdict(set)
    composed: dict[str, Options] = {}  # composing is slow: once for all tasks and seeds
    for _, values in [] if sweep.config.search else expand(sweep.config):
        key = repr({k: v for k, v in values.items() if k not in ("seed", "data.task")})
        if key not in composed:
            composed[key] = flatten_config(sweep.build_trial(values, "any").config)
        config = composed[key]
        column = find_column(config) if config["data.kind"] == "formal_language" else None
        task = values.get("data.task", config.get("data.task"))
        if column and task in TASKS:
            planned[task, column].add(values["seed"] if "seed" in values else config["seed"])
    return planned
