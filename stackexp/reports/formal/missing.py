"""Find the commands that fill the missing cells of the formal-language table."""

import shlex
from collections import defaultdict
from pathlib import Path

from stackexp.config.affects import flatten_config
from stackexp.errors import ConfigError
from stackexp.reports.formal.cells import Cell
from stackexp.reports.formal.collect import Report
from stackexp.reports.formal.paper import find_column
from stackexp.reports.formal.runs import Options
from stackexp.sweeps.grid import expand
from stackexp.sweeps.sweep import COPY, list_shipped, load_sweep
from stackexp.tasks import TASKS

FULL_TABLE = "python -m stackexp sweep run formal_table"
"""The shipped sweep that fills every cell."""

CellKey = tuple[str, str]
"""Task and column."""
Seeds = dict[CellKey, set[int]]


class SweepProgress:
    """The sweeps that the runs of a report belong to, and the seeds that they lack in each cell."""

    def __init__(self, report: Report) -> None:
        self.notes: list[str] = []
        self._missing: dict[Path, Seeds] = {}
        finished: dict[Path, Seeds] = defaultdict(lambda: defaultdict(set))
        for run in report.runs:
            if run.is_finished:
                finished[run.path.parent][run.task, run.column].add(run.seed)
        folders = dict.fromkeys([*report.paths, *(run.path.parent for run in report.runs)])
        for folder in folders:
            if (folder / COPY).is_file():
                self._add_sweep(folder, finished[folder])

    def _add_sweep(self, folder: Path, finished: Seeds) -> None:
        try:
            planned = _plan_seeds(folder)
        except ConfigError as error:
            self.notes.append(f"{folder}: its sweep cannot be read ({error})")
            return
        self._missing[folder] = {key: seeds - finished[key] for key, seeds in planned.items()}
        total, left = (sum(map(len, seeds.values())) for seeds in (planned, self._missing[folder]))
        if left:
            command = build_sweep_command(folder)
            self.notes.append(f"{folder}: {left} of {total} trials are not finished: `{command}`")

    def find_command(self, key: CellKey) -> str:
        """Return the command of the first sweep that lacks trials of a cell, or an empty string."""
        folders = (folder for folder, missing in self._missing.items() if missing.get(key))
        return next(map(build_sweep_command, folders), "")


def find_commands(report: Report, sweeps: SweepProgress) -> dict[CellKey, str]:
    """Return the command that fills or completes each missing or unfinished cell."""
    commands = {}
    for key, cell in report.cells.items():
        if cell.pending:
            commands[key] = _resume_runs(cell)
        elif not cell.runs:
            commands[key] = sweeps.find_command(key) or FULL_TABLE
    return commands


def build_sweep_command(folder: Path) -> str:
    """Return the command of the sweep in a folder: by name if it is a shipped sweep in its default folder."""
    is_shipped = folder.name in list_shipped() and folder.resolve() == Path("runs", folder.name).resolve()
    return f"python -m stackexp sweep run {folder.name if is_shipped else shlex.quote(str(folder))}"


def _resume_runs(cell: Cell) -> str:
    """Return the commands for the runs of a cell that are unfinished, or not tested over all lengths."""
    commands = []
    for run in cell.pending:
        folder = shlex.quote(str(run.path))
        if run.is_finished:
            commands.append(f"python -m stackexp test --run {folder} data.eval_max_length={cell.lengths[1]}")
        else:
            commands.append(f"python -m stackexp fit --run {folder}")
    return "; ".join(commands)


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
