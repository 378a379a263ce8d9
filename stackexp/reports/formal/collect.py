"""Collect runs on formal languages as the cells of the paper's Table 1."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stackexp.config.yaml_files import flatten, read_file
from stackexp.errors import RunError
from stackexp.reports.formal.cells import Cell, build_cell
from stackexp.reports.formal.paper import COLUMNS, find_column
from stackexp.reports.formal.runs import Evaluation, FormalRun, Lengths, read_run
from stackexp.reports.summaries import find_runs
from stackexp.tasks import TASKS


@dataclass(frozen=True)
class Report:
    """The cells by (task, column), all runs found below `paths`, and notes about skipped folders and files."""

    paths: list[Path]
    lengths: Lengths
    runs: list[FormalRun]
    cells: dict[tuple[str, str], Cell]
    skipped: list[str]

    @cached_property
    def finest(self) -> Evaluation:
        """The most thorough evaluation in the table."""
        evaluations = [run.find_evaluation(self.lengths) for cell in self.cells.values() for run in cell.runs]
        return max((e for e in evaluations if e), key=lambda evaluation: evaluation.count_strings(self.lengths))

    def find_coarse(self, cell: Cell) -> list[Evaluation]:
        """Return the evaluations of a cell that are less thorough than others in the table."""
        evaluations, most = [run.find_evaluation(self.lengths) for run in cell.runs], self.finest
        return [e for e in evaluations if e and e.count_strings(self.lengths) < most.count_strings(self.lengths)]


def collect_report(paths: Sequence[Path | str], lengths: Lengths) -> Report:
    """Build the table of the runs in these folders.

    Raises RunError for a folder without runs, and if no run is finished and tested over the lengths.
    """
    runs, skipped = [], defaultdict(list)
    for path in paths:
        if not find_runs([path]):
            raise RunError(f"{path}: no run folder in it or below; give runs/<name>/<id>, or a folder of run folders")
    for path in (run.path for run in find_runs(paths)):
        config = flatten(read_file(path / "config.yaml")[1])
        if config.get("data.kind") != "formal_language":
            skipped["not a formal language"].append(path)
        elif column := find_column(config):
            runs.append(read_run(path, config, column))
        else:
            skipped["the table has no column for this model"].append(path)
    unused = [run.unused for run in runs if run.unused]
    if unused:
        skipped["test of another checkpoint, or with overrides that change more than the test"] = unused
    notes = [f"skipped, {reason}: {_join_paths(found)}" for reason, found in skipped.items()]
    groups = defaultdict(list)
    for run in runs:
        groups[run.task, run.column].append(run)
    keys = [(task, column) for task in TASKS for column in COLUMNS]
    cells = {(task, column): build_cell(task, column, groups[task, column], lengths) for task, column in keys}
    if not any(cell.scores for cell in cells.values()):
        unscored = f"{len(runs)} runs are unfinished or not tested over {lengths[0]}..{lengths[1]}"
        raise RunError(
            f"{_join_paths(paths)}: no finished run on a formal language ({'; '.join([unscored, *notes])}); finish or "
            "test one"
        )
    return Report([Path(path) for path in paths], lengths, runs, cells, notes)


def _join_paths(paths: Sequence[Path | str], limit: int = 3) -> str:
    shown = ", ".join(map(str, paths[:limit]))
    return shown if len(paths) <= limit else f"{shown} and {len(paths) - limit} more"
