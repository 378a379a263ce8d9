"""Report the results of a sweep from its run folders: a table by objective, and the loss against each searched key."""

import json
import re
import statistics
from collections import defaultdict
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from stackexp.config.affects import flatten_config, select_options
from stackexp.config.model import SYMBOLS
from stackexp.errors import RunError
from stackexp.reports.figures import new_figure, save_figure
from stackexp.sweeps.grid import Values, format_value, shorten_keys
from stackexp.sweeps.sweep import Sweep
from stackexp.sweeps.trials import Trial, get_number, read_objective
from stackexp.tables import ABSENT, Style, format_table

VALIDATION = "average.loss"
LOSSES = {"training loss": "train_loss.last_20_steps", "validation loss": VALIDATION}
"""Titles of the plotted losses -> their paths in result.json."""
MEANINGS = {"H": "stack heads", "d_s": "slot size", "S": "stack slots"}


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (0 for one value) over seeds."""

    mean: float
    std: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.std:.4f}" if self.std else f"{self.mean:.4f}"


@dataclass(frozen=True)
class Row:
    """The finished trials that differ only in their seed.

    `values` are the searched values without the seed. `losses` has the titles of LOSSES, the validation loss only if
    there are validation sets.
    """

    name: str
    values: Values
    seeds: int
    objective: Spread
    losses: dict[str, Spread]
    parameters: int
    memory_parameters: int
    trials: list[str]


def collect_results(sweep: Sweep) -> list[Row]:
    """Return the finished trials, grouped over seeds, the best objective first. Raises RunError if there are none."""
    groups: dict[str, list[Trial]] = {}
    finished = [trial for trial in sweep.trials if trial.folder.is_finished]
    if not finished:
        raise RunError(f'{sweep.folder}: no finished trials yet; run "sweep status" to see progress')
    for trial in finished:
        if read_objective(trial, sweep.config.objective)[0] is not None:
            groups.setdefault(json.dumps(_drop_seed(trial.values), sort_keys=True), []).append(trial)
    if not groups:
        _, problem = read_objective(finished[0], sweep.config.objective)
        raise RunError(f"{sweep.folder}: {problem}; choose another objective in the sweep's YAML")
    rows = [_build_row(trials, sweep.config.objective) for trials in groups.values()]
    sign = 1 if sweep.config.direction == "minimize" else -1
    return sorted(rows, key=lambda row: sign * row.objective.mean)


def describe_unscored(sweep: Sweep) -> list[str]:
    """Return a note for each finished trial without an objective, such as one whose loss is not finite."""
    finished = [trial for trial in sweep.trials if trial.folder.is_finished]
    problems = [(trial.name, read_objective(trial, sweep.config.objective)[1]) for trial in finished]
    return [f"left out: {name}: {problem}" for name, problem in problems if problem]


def _build_row(trials: list[Trial], objective: str) -> Row:
    results = [trial.folder.read_result().to_dict() for trial in trials]
    losses = {title: path for title, path in LOSSES.items() if path != VALIDATION or results[0].get("average")}
    return Row(
        name=re.sub(r"-?seed=\d+$", "", trials[0].name.rpartition("-")[0]) or "trial",
        values=_drop_seed(trials[0].values),
        seeds=len(trials),
        objective=_compute_spread(results, objective),
        losses={title: _compute_spread(results, path) for title, path in losses.items()},
        parameters=results[0]["parameters"],
        memory_parameters=results[0]["memory_parameters"],
        trials=[trial.name for trial in trials],
    )


def _drop_seed(values: Values) -> Values:
    return {key: value for key, value in values.items() if key != "seed"}


def _compute_spread(results: list[dict[str, Any]], path: str) -> Spread:
    numbers = [get_number(result, path) for result in results]
    return Spread(statistics.mean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0)


def format_results(sweep: Sweep, rows: list[Row], style: Style = "terminal") -> str:
    """Return a table with one line per row; ± is the standard deviation over seeds."""
    titles = [title for title, path in LOSSES.items() if path != sweep.config.objective and title in rows[0].losses]
    header = ["trial", sweep.config.objective, *titles, "seeds", "parameters", "in the memory"]
    lines = []
    for row in rows:
        losses = [str(row.losses[title]) for title in titles]
        sizes = [str(row.seeds), f"{row.parameters:,}", f"{row.memory_parameters:,}"]
        lines.append([row.name, str(row.objective), *losses, *sizes])
    columns = [LOSSES.get(title, title) for title in header[1 : 2 + len(titles)]]
    for name, loss in average_bigrams(sweep).items():
        lines.append([name, *(f"{loss:.4f}" if c == VALIDATION else ABSENT for c in columns), *[ABSENT] * 3])
    return format_table(lines, header=header, align="<" + ">" * (len(header) - 1), style=style)


def average_bigrams(sweep: Sweep) -> dict[str, float]:
    """Return the validation loss of bigram counts of the training tokens, averaged over seeds: {name of row: loss}."""
    counts: dict[str, dict[int, float]] = defaultdict(dict)
    for trial in sweep.trials:
        if trial.folder.is_finished and "bigrams" in (result := trial.folder.read_result().to_dict()):
            varied = {k: v for k, v in trial.values.items() if k.startswith("data.")}
            data = select_options(flatten_config(trial.config), ["training"]).keys() & varied.keys()
            names = [f"{result['tokens']:,} tokens", *(f"{k}={format_value(varied[k])}" for k in sorted(data))]
            counts[", ".join(names)][trial.config.seed] = result["bigrams"]["average"]["loss"]
    return {
        "bigram counts" + f" ({name})" * (len(counts) > 1): statistics.mean(losses.values())
        for name, losses in counts.items()
    }


def draw_results(sweep: Sweep, rows: list[Row], folder: Path) -> list[Path]:
    """Plot the losses against each key with several numbers, as <key>.png and <key>.pdf, and return the paths.

    In each figure, the other keys have the values of the sweep's center, or of the best trial if there is no center.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for key, name in shorten_keys(rows[0].values).items():
        selected = select_rows(rows, key, sweep.config.center)
        if len({row.values[key] for row in selected}) > 1:
            figure = _draw_losses(key, selected, describe_fixed(selected[0].values, key))
            paths += [folder / f"{name}.png", folder / f"{name}.pdf"]
            for path in paths[-2:]:
                save_figure(figure, path)
    return paths


def select_rows(rows: list[Row], key: str, center: Values) -> list[Row]:
    """Return the rows sorted by `key` whose other keys have the values of the center, or else of the best row."""
    reference = rows[0].values | center
    others = reference.keys() - {key}
    selected = [row for row in rows if all(row.values.get(other) == reference[other] for other in others)]
    numeric = [row for row in selected if type(row.values.get(key)) in (int, float)]
    return sorted(numeric, key=lambda row: row.values[key])


def describe_fixed(values: Values, key: str) -> str:
    """Return the values of the other keys, such as `d_s = 16, S = 24`."""
    names = shorten_keys(values)
    return ", ".join(f"{names[other]} = {format_value(value)}" for other, value in values.items() if other != key)


def _draw_losses(key: str, rows: list[Row], fixed: str) -> Any:
    figure, axes = new_figure(4.2, 3.2)
    plot_losses(axes, key, rows)
    seeds = {row.seeds for row in rows}
    runs = f"mean ± standard deviation of {'-'.join(map(str, sorted(seeds)))} seeds" if seeds != {1} else "one seed"
    axes.set_title(", ".join(filter(None, [fixed, runs])), fontsize=8)
    return figure


def plot_losses(axes: Any, key: str, rows: list[Row]) -> None:
    """Plot the losses of the rows, which are sorted by `key`, with their standard deviations."""
    symbol = SYMBOLS.get(key)
    numbers = [row.values[key] for row in rows]
    for title, fmt in zip(rows[0].losses, ("o-", "s--"), strict=False):
        means, deviations = zip(*(astuple(row.losses[title]) for row in rows), strict=True)
        axes.errorbar(numbers, means, yerr=deviations if any(deviations) else None, fmt=fmt, capsize=3, label=title)
    if min(numbers) > 0 and max(numbers) / min(numbers) >= 8:
        axes.set_xscale("log", base=2 if symbol else 10)
    if symbol:
        axes.set_xticks(numbers, labels=[f"{number:g}" for number in numbers], minor=False)
        axes.minorticks_off()
    axes.set(xlabel=f"{MEANINGS[symbol]} (${symbol}$)" if symbol else key, ylabel="Loss (nats per token)")
    axes.legend()
