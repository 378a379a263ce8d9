"""What a sweep has found, from its run folders alone: a table by objective, and the loss against each searched key."""

import json
import re
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stackexp.config.model import SYMBOLS
from stackexp.reports.tables import table
from stackexp.sweeps.grid import Sweep, short_names
from stackexp.sweeps.status import figure

LOSSES = {"training loss": "train_loss.last_20_steps", "validation loss": "average.loss"}
"""What the curves show: titles and paths into result.json."""
MEANINGS = {"H": "stack heads", "d_s": "size of a slot", "S": "slots of a stack"}


class Spread(NamedTuple):
    """Mean and sample standard deviation (0 for one value) over seeds."""

    mean: float
    std: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} +- {self.std:.4f}" if self.std else f"{self.mean:.4f}"


@dataclass(frozen=True)
class Row:
    """The finished trials that differ by their seed alone."""

    name: str
    values: dict[str, Any]  # searched key -> value, without the seed
    seeds: int
    objective: Spread
    losses: dict[str, Spread]  # LOSSES; a validation loss only where there are sets
    parameters: int
    memory_parameters: int
    trials: list[str]

    def as_dict(self) -> dict[str, Any]:
        spreads = {"objective": self.objective._asdict(), "losses": {k: v._asdict() for k, v in self.losses.items()}}
        return asdict(self) | spreads


def collect(sweep: Sweep) -> list[Row]:
    """The finished trials, those of several seeds in one row, the best objective first. Raises RunError without one."""
    groups: dict[str, list[Any]] = {}
    for trial in sweep.trials:
        if trial.folder.finished:
            values = {key: value for key, value in trial.values.items() if key != "seed"}
            groups.setdefault(json.dumps(values, sort_keys=True), []).append((trial, values))
    rows = [_row([trial for trial, _ in group], group[0][1], sweep.config.objective) for group in groups.values()]
    sign = 1 if sweep.config.direction == "minimize" else -1
    return sorted(rows, key=lambda row: sign * row.objective.mean)


def _row(trials: list[Any], values: dict[str, Any], objective: str) -> Row:
    results = [json.loads(trial.folder.result.read_text()) for trial in trials]
    losses = {title: path for title, path in LOSSES.items() if path != "average.loss" or results[0].get("average")}
    return Row(
        name=re.sub(r"-?seed=\d+$", "", trials[0].name.rpartition("-")[0]) or "trial",
        values=values,
        seeds=len(trials),
        objective=_spread(results, objective),
        losses={title: _spread(results, path) for title, path in losses.items()},
        parameters=results[0]["parameters"],
        memory_parameters=results[0]["memory_parameters"],
        trials=[trial.name for trial in trials],
    )


def _spread(results: list[dict[str, Any]], path: str) -> Spread:
    figures = [figure(result, path) for result in results]
    return Spread(statistics.mean(figures), statistics.stdev(figures) if len(figures) > 1 else 0.0)


def results_table(sweep: Sweep, rows: list[Row], markdown: bool = False) -> str:
    """One line per row; `+-` is the standard deviation over seeds."""
    titles = [title for title, path in LOSSES.items() if path != sweep.config.objective and title in rows[0].losses]
    header = ["trial", sweep.config.objective, *titles, "seeds", "parameters", "in the memory"]
    lines = [header]
    for row in rows:
        figures = [str(row.objective), *(str(row.losses[title]) for title in titles)]
        lines.append([row.name, *figures, str(row.seeds), f"{row.parameters:,}", f"{row.memory_parameters:,}"])
    if not markdown:
        return table(lines, align="<" + ">" * (len(header) - 1), rules=(1,))
    rule = "|---|" + "---:|" * (len(header) - 1)
    text = ["| " + " | ".join(cells).replace("+-", "±") + " |" for cells in lines]
    return "\n".join([text[0], rule, *text[1:]])


def draw(sweep: Sweep, rows: list[Row], folder: Path) -> list[Path]:
    """For each key with several numbers, training and validation loss against it, as <key>.png and <key>.pdf.

    Each figure cuts through the center of the sweep, or through the best trial: all other keys have its values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for key, name in short_names(rows[0].values).items():
        found = cut(rows, key, sweep.config.center)
        if len({row.values[key] for row in found}) > 1:
            paths += _draw_axis(key, name, found, folder)
    return paths


def cut(rows: list[Row], key: str, center: dict[str, Any]) -> list[Row]:
    """The rows, by `key`, whose other keys have the values of the center, or else of the best row."""
    through = rows[0].values | center
    others = through.keys() - {key}
    found = [row for row in rows if all(row.values.get(other) == through[other] for other in others)]
    return sorted((r for r in found if type(r.values[key]) in (int, float)), key=lambda row: row.values[key])


def _draw_axis(key: str, name: str, rows: list[Row], folder: Path) -> list[Path]:
    from matplotlib.figure import Figure

    symbol = SYMBOLS.get(key)
    drawing = Figure(figsize=(4.2, 3.2), layout="constrained")
    axes = drawing.add_subplot()
    numbers = [row.values[key] for row in rows]
    for title in rows[0].losses:
        spreads = [row.losses[title] for row in rows]
        means, deviations = [spread.mean for spread in spreads], [spread.std for spread in spreads]
        axes.errorbar(numbers, means, yerr=deviations if any(deviations) else None, fmt="o-", capsize=3, label=title)
    if min(numbers) > 0 and max(numbers) / min(numbers) >= 8:
        axes.set_xscale("log", base=2 if symbol else 10)
    if symbol:
        axes.set_xticks(numbers, labels=[f"{number:g}" for number in numbers], minor=False)
        axes.minorticks_off()
    label = f"${symbol}$ ({MEANINGS[symbol]})" if symbol else key
    axes.set(xlabel=label, ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    paths = [folder / f"{name}.png", folder / f"{name}.pdf"]
    for path in paths:
        drawing.savefig(path, dpi=200)
    return paths
