"""The paper's action study (Figure 5): push, pop and no-op probabilities over the layers of trained runs."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from stackexp.errors import ConfigError, RunError
from stackexp.evaluation.loading import LoadedRun, load_run
from stackexp.frame import read_rows
from stackexp.inspection.inspect import InspectionInput, open_run_data, open_set, open_task, record
from stackexp.models.memories.residual_stack import ResidualStack
from stackexp.models.stack_recording import ACTIONS, find_recorded
from stackexp.reports.arms import load_arms, select_finished
from stackexp.reports.report import MARKERS, PALETTE, Report, Table, new_figure

PARTS = ("first", "middle", "last")
LEGEND = (
    "Probabilities are means over tokens and heads. First, middle and last: thirds of the stacks, in the order of the "
    "layers. In brackets: the lowest and the highest run of a name. The first memory of a residual_stack is left out, "
    "because its actions have no effect.",
    "Push early, pop late: pushes are more likely in the first third than in the last, and pops in the last than in "
    "the first. It is the pattern that the paper describes.",
)


class Profile(NamedTuple):
    """The mean actions of a run: probabilities [stacks, 3], in the order of ACTIONS."""

    seed: int
    folder: Path
    title: str
    probabilities: np.ndarray

    @property
    def parts(self) -> np.ndarray:
        """The means over the first, middle and last third of the stacks [3, 3]."""
        return np.stack([part.mean(0) for part in np.array_split(self.probabilities, 3)])

    @property
    def pushes_early_and_pops_late(self) -> bool:
        """Return True if the run shows the paper's pattern."""
        push, pop, _ = self.parts.T
        return bool(push[0] > push[2] and pop[2] > pop[0])


def build_actions(paths: Sequence[Path], set_name: str | None = None, num_chunks: int = 256) -> Report:
    """Build the report of all runs with a stack at or below `paths`.

    Each run is measured on `num_chunks` chunks or problems of a validation set, its first one by default, or on strings
    of its formal language. Raises RunError if no run has a stack of at least three layers.
    """
    profiles: dict[str, list[Profile]] = defaultdict(list)
    problems: list[str] = []
    arms, notes = load_arms(paths, with_generated_data=True)
    for name, run in [(name, run) for name, rows in arms.items() for run in select_finished(rows)]:
        path = Path(run["path"])
        try:
            if run.get("model.memory.kind") not in ("stack", "residual_stack"):
                notes.append(f"skipped, without a stack: {path}")
                continue
            profile = _measure(load_run(path), set_name, num_chunks)
            profiles[name].append(profile)
        except (ConfigError, RunError) as error:
            problems.append(f"skipped {path}: {error}")
    if not profiles:
        remedy = "give finished runs with model.memory.kind=stack or residual_stack"
        raise RunError(f"{', '.join(map(str, paths))}: {'; '.join(problems or [*notes, remedy])}")
    header = [
        "run",
        "runs",
        *(f"{action} {part}" for action in ("push", "pop") for part in PARTS),
        "push early, pop late",
    ]
    rows = [_build_row(name, runs) for name, runs in profiles.items()]
    titles = {name: runs[0].title for name, runs in profiles.items()}
    measured = [f"{name}: measured on {title}" for name, title in titles.items()]
    records = [
        {"run": name, "seed": run.seed, "folder": str(run.folder), "stack": stack}
        | dict(zip(ACTIONS, map(float, values), strict=True))
        for name, runs in profiles.items()
        for run in runs
        for stack, values in enumerate(run.probabilities)
    ]
    table = Table("Actions over the layers", header, rows)
    return Report([table], [*LEGEND, *measured, *problems, *notes], records, lambda: draw_actions(profiles))


def build_arithmetic_actions(folder: Path) -> Report:
    """Build the report of the arithmetic runs at or below `folder`. Raises RunError if there are none."""
    runs = [Path(row["path"]) for row in read_rows([folder]) if row.get("data.kind") == "arithmetic"]
    if not runs:
        raise RunError(f"{folder}: no runs on arithmetic; run `python -m stackexp sweep run arithmetic`")
    return build_actions(runs)


@torch.no_grad()
def _measure(run: LoadedRun, set_name: str | None, num_chunks: int) -> Profile:
    inputs = _open_input(run, set_name, num_chunks)
    stacks, _ = record(run, inputs)
    if isinstance(find_recorded(run.model)[0], ResidualStack):  # its slots are equal before the first action
        stacks = stacks[1:]
    if len(stacks) < len(PARTS):
        raise RunError(f"a study of layers requires {len(PARTS)} stacks, found {len(stacks)}; use more layers")
    means = np.stack([[stack.values[action].mean() for action in ACTIONS] for stack in stacks])
    return Profile(run.config.seed, run.folder.path, inputs.title, means)


def _open_input(run: LoadedRun, set_name: str | None, num_chunks: int) -> InspectionInput:
    if run.config.data.objective == "transduction":
        if set_name is not None:
            raise ConfigError(f"report actions: --set {set_name}: the run has strings of {run.config.data.task} only")
        return open_task(run, run.config.data.task)
    if set_name is None:
        set_name = open_run_data(run, None).list_set_names("validate")[0]
    return open_set(run, set_name, num_chunks)


def _build_row(name: str, runs: list[Profile]) -> list[str]:
    parts = np.stack([run.parts for run in runs])  # [runs, parts, actions]
    cells = [
        _format_range(parts[:, part, ACTIONS.index(action)]) for action in ("push", "pop") for part in range(len(PARTS))
    ]
    found = sum(run.pushes_early_and_pops_late for run in runs)
    return [name, str(len(runs)), *cells, f"{found} of {len(runs)}"]


def _format_range(values: np.ndarray) -> str:
    text = f"{values.mean():.3f}"
    return text if len(values) < 2 else f"{text} ({values.min():.3f}-{values.max():.3f})"


def draw_actions(profiles: dict[str, list[Profile]]) -> Any:
    """Draw a panel for each name: the probability of each action over the layers, and thin lines for single runs."""
    from matplotlib.ticker import MaxNLocator

    columns = min(3, len(profiles))
    rows = math.ceil(len(profiles) / columns)
    figure, _ = new_figure(3.4 * columns + 0.6, 2.8 * rows + 0.5, rows, columns, sharey=True)
    for axes, (name, runs) in zip(figure.axes, profiles.items(), strict=False):
        for i, action in enumerate(ACTIONS):
            curves = [run.probabilities[:, i] for run in runs]
            for curve in curves if len(runs) > 1 else []:
                axes.plot(curve, color=PALETTE[i], linewidth=0.6, alpha=0.5)
            if len({len(curve) for curve in curves}) == 1:
                label = action.replace("_", "-")
                axes.plot(np.mean(curves, 0), f"{MARKERS[i]}-", color=PALETTE[i], markersize=4, label=label)
        axes.set(xlabel="Stack", ylim=(0, 1))
        axes.set_title(f"{name}, {len(runs)} run{'s' * (len(runs) > 1)}", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in figure.axes[len(profiles) :]:
        axes.set_visible(False)
    figure.axes[0].set_ylabel("Probability")
    figure.axes[0].legend(fontsize=8)
    return figure
