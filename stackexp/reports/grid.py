"""Results of a sweep: a table, the loss against each searched number, and the paper's heat maps of H, d_s and S."""

import itertools
import json
import re
import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from stackexp.config.affects import flatten_config
from stackexp.config.model import PAPER_SYMBOLS
from stackexp.errors import RunError
from stackexp.frame import read_run
from stackexp.reports.arms import group_bigrams
from stackexp.reports.report import Report, Table
from stackexp.sweeps.schema import Values, format_value, shorten_keys
from stackexp.sweeps.sweep import Sweep, load_last_run
from stackexp.sweeps.trials import Trial, read_objective
from stackexp.tables import ABSENT

KEYS = {symbol: key for key, symbol in PAPER_SYMBOLS.items()}
"""H, d_s and S -> their config keys."""
MEANINGS = {"H": "stack heads", "d_s": "slot size", "S": "stack slots"}
LOSSES = {"training loss": "train_loss", "validation loss": "val/average/loss"}
"""Titles of the plotted losses -> their columns in the DataFrame of runs."""
OBJECTIVES = {"train_loss.last_20_steps": "training loss", "average.loss": "validation loss"}
"""Objectives that are one of these losses."""
MAX_TICKS = 8
"""An axis with at most this many values has a tick at each."""
TrialSummary = dict[str, Any]
"""The finished trials that differ only in their seed: name, values (without the seed), seeds, objective, losses (by
title), parameters, memory_parameters, trials, rows (of these runs). Objective and losses have mean and std, 0 for one
seed."""


def summarize_trials(sweep: Sweep) -> list[TrialSummary]:
    """Return the finished trials, grouped over seeds, the best objective first. Raises RunError if there are none."""
    finished = [trial for trial in sweep.trials if trial.folder.is_finished]
    if not finished:
        raise RunError(f'{sweep.folder}: no finished trials yet; run "sweep status" to see progress')
    objectives = {trial.name: read_objective(trial, sweep.config.objective) for trial in finished}
    groups: dict[str, list[Trial]] = defaultdict(list)
    for trial in finished:
        if objectives[trial.name][0] is not None:
            groups[json.dumps(_drop_seed(trial.values), sort_keys=True)].append(trial)
    if not groups:
        problem = objectives[finished[0].name][1]
        raise RunError(f"{sweep.folder}: {problem}; choose another objective in the sweep's YAML")
    results = [_build_result(trials, [objectives[t.name][0] for t in trials]) for trials in groups.values()]
    sign = 1 if sweep.config.direction == "minimize" else -1
    return sorted(results, key=lambda result: sign * result["objective"]["mean"])


def _build_result(trials: list[Trial], objectives: list[Any]) -> TrialSummary:
    rows = [flatten_config(trial.config) | read_run(trial.folder) for trial in trials]
    losses = {title: [row[key] for row in rows if key in row] for title, key in LOSSES.items()}
    label = trials[0].name.rpartition("-")[0]
    return {
        "name": re.sub(r"(?:^|-)seed=\d+(?=-|$)", "", label).strip("-") or "trial",
        "values": _drop_seed(trials[0].values),
        "seeds": len(trials),
        "objective": _compute_spread(objectives),
        "losses": {title: _compute_spread(values) for title, values in losses.items() if len(values) == len(rows)},
        "parameters": rows[0].get("parameters"),
        "memory_parameters": rows[0].get("memory_parameters"),
        "trials": [trial.name for trial in trials],
        "rows": rows,
    }


def _drop_seed(values: Values) -> Values:
    return {key: value for key, value in values.items() if key != "seed"}


def _compute_spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}


def _format_spread(spread: dict[str, float] | None) -> str:
    if spread is None:
        return ABSENT
    return f"{spread['mean']:.4f} ± {spread['std']:.4f}" if spread["std"] else f"{spread['mean']:.4f}"


def build_trial_table(sweep: Sweep, results: Sequence[TrialSummary]) -> Table:
    """Return a table with a line for each result, and one for the bigram counts of each corpus.

    The columns are the objective and the losses. ± is the standard deviation over the seeds.
    """
    titles = [title for title in _list_titles(results) if title != OBJECTIVES.get(sweep.config.objective)]
    columns = [sweep.config.objective, *titles]
    is_repeated = any(result["seeds"] > 1 for result in results)
    header = ["trial", *(f"{column} ± std" if is_repeated else column for column in columns)]
    lines = []
    for result in results:
        spreads = [result["objective"], *(result["losses"].get(title) for title in titles)]
        sizes = (result["parameters"], result["memory_parameters"])
        counts = [str(result["seeds"]), *(ABSENT if size is None else f"{size:,}" for size in sizes)]
        lines.append([result["name"], *map(_format_spread, spreads), *counts])
    rows = [row for result in results for row in result["rows"] if "bigrams/average/loss" in row]
    for name, runs in group_bigrams((row["arm"], row) for row in rows):
        loss = statistics.mean(row["bigrams/average/loss"] for row in runs)
        is_validation = [OBJECTIVES.get(column, column) == "validation loss" for column in columns]
        lines.append([name, *(f"{loss:.4f}" if shown else ABSENT for shown in is_validation), *[ABSENT] * 3])
    return Table(f"Sweep {sweep.name}", [*header, "seeds", "parameters", "in the memory"], lines)


def _list_titles(results: Iterable[TrialSummary]) -> list[str]:
    found = {title for result in results for title in result["losses"]}
    return [title for title in LOSSES if title in found]


# The figure


def select_results(results: Sequence[TrialSummary], key: str, center: Values) -> list[TrialSummary]:
    """Return the results with a number for `key`, sorted by it.

    Their other keys have the values of the center, or else of the best result with a number.
    """
    numeric = [result for result in results if type(result["values"].get(key)) in (int, float)]
    reference = numeric[0]["values"] | center
    selected = [r for r in numeric if all(r["values"].get(k) == reference[k] for k in reference.keys() - {key})]
    return sorted(selected, key=lambda result: result["values"][key])


def describe_fixed(values: Values, key: str) -> str:
    """Return the values of the other keys, such as `d_s = 16, S = 24`."""
    names = shorten_keys(values)
    return ", ".join(f"{names[other]} = {format_value(value)}" for other, value in values.items() if other != key)


def plot_losses(axes: Any, key: str, results: Sequence[TrialSummary]) -> None:
    """Plot the losses of the results, which are sorted by `key`, with their standard deviations."""
    symbol = PAPER_SYMBOLS.get(key)
    numbers = [result["values"][key] for result in results]
    for title, fmt in zip(_list_titles(results), ("o-", "s--"), strict=False):
        points = [(n, r["losses"][title]) for n, r in zip(numbers, results, strict=True) if title in r["losses"]]
        means, deviations = ([spread[kind] for _, spread in points] for kind in ("mean", "std"))
        bars = deviations if any(deviations) else None
        axes.errorbar([number for number, _ in points], means, yerr=bars, fmt=fmt, capsize=3, label=title)
    if min(numbers) > 0 and max(numbers) / min(numbers) >= 8:
        axes.set_xscale("log", base=2 if symbol else 10)
    if len(numbers) <= MAX_TICKS:
        axes.set_xticks(numbers, labels=[f"{number:g}" for number in numbers], minor=False)
        axes.minorticks_off()
    axes.set(xlabel=f"{MEANINGS[symbol]} (${symbol}$)" if symbol else key, ylabel="Loss (nats per token)")
    axes.margins(y=0.25)  # space for the legend
    axes.legend(loc="upper center", ncols=2, fontsize=8)


def build_grid(sweep: str, overrides: Iterable[str] = ()) -> Report:
    """Build the report of a sweep, given as its folder, its name or its YAML file, with overrides of the trials."""
    loaded = load_last_run(sweep, overrides)
    results = summarize_trials(loaded)
    keys = dict.fromkeys(key for result in results for key in result["values"])
    varied = [key for key in keys if len(_list_values(results, key)) > 1]
    waiting = sum(not trial.is_settled for trial in loaded.trials)
    pruned = sum(not trial.folder.is_finished for trial in loaded.trials) - waiting
    command = f"`python -m stackexp sweep run {shlex.quote(str(loaded.folder))}`"
    notes = [f"{waiting} of {len(loaded.trials)} trials are not finished: {command}"] if waiting else []
    notes += [f"{pruned} of {len(loaded.trials)} trials were ended early by the search."] if pruned else []
    notes.append("Losses are means over the seeds, in nats per token. The best objective comes first.")
    if loaded.config.axes:
        notes.append(
            "The sweep varies one key at a time, so most cells of the heat maps are empty: use `grid`, not `axes`."
        )
    for trial in loaded.trials:
        if trial.folder.is_finished and (problem := read_objective(trial, loaded.config.objective)[1]):
            notes.append(f"left out: {trial.name}: {problem}")
    records = [
        {"trial": result["name"], **result["values"], "seeds": result["seeds"], "parameters": result["parameters"]}
        | {
            f"{title} {key}": value
            for title, spread in {loaded.config.objective: result["objective"], **result["losses"]}.items()
            for key, value in spread.items()
        }
        for result in results
    ]
    return Report(
        [build_trial_table(loaded, results)],
        notes,
        records,
        (lambda: draw_grid(results, loaded.config.center, varied)) if varied else None,
    )


def _list_values(results: Sequence[TrialSummary], key: str) -> list[Any]:
    """Return the numeric values of a key; an empty list if it was not searched."""
    values = (result["values"].get(key) for result in results)
    return sorted({value for value in values if type(value) in (int, float)})


def draw_grid(results: Sequence[TrialSummary], center: Values, varied: Sequence[str]) -> Any:
    """Draw the loss against each varied key; below, if two of H, d_s and S vary, the H x d_s heat map for each S.

    In each curve, the other keys have the values of the sweep's center, or of the best trial if there is no center.
    """
    from matplotlib.figure import Figure

    if not all(select_results(results, key, center) for key in varied):  # not finished
        center = {}
    others, losses = _select_cells(results, center)
    has_maps = len(PAPER_SYMBOLS.keys() & set(varied)) > 1 and bool(losses)
    figure: Any = Figure(figsize=(max(9.5, 3.2 * len(varied)), 6.4 if has_maps else 3.2), layout="constrained")
    top, bottom = figure.subfigures(2, 1) if has_maps else (figure, None)
    for axes, key in zip(top.subplots(1, len(varied), squeeze=False)[0], varied, strict=True):
        selected = select_results(results, key, center)
        plot_losses(axes, key, selected)
        axes.set_title(describe_fixed(selected[0]["values"], key), fontsize=8)
        axes.grid(alpha=0.3)
    if has_maps:
        _draw_maps(bottom, results, others, losses)
    return figure


def _list_axes(results: Sequence[TrialSummary]) -> list[list[Any]]:
    """Return the values of H, d_s and S; [None] for one that was not searched."""
    return [_list_values(results, key) or [None] for key in KEYS.values()]


def _select_cells(results: Sequence[TrialSummary], center: Values) -> tuple[Values, dict[tuple, float]]:
    """Return the fixed values, of the center or else the best cell, and the loss at each (H, d_s, S).

    There may be no cell: a trial of a `list` need not set all of them.
    """
    title, drawn = _list_titles(results)[-1], set(itertools.product(*_list_axes(results)))
    cells = [(tuple(r["values"].get(key) for key in KEYS.values()), r) for r in results if title in r["losses"]]
    cells = [(cell, result) for cell, result in cells if cell in drawn]
    if not cells:
        return {}, {}
    others = {k: value for k, value in (cells[0][1]["values"] | center).items() if k not in KEYS.values()}
    chosen = ((c, r) for c, r in cells if all(r["values"].get(key) == value for key, value in others.items()))
    return others, {cell: result["losses"][title]["mean"] for cell, result in chosen}


def _draw_maps(figure: Any, results: Sequence[TrialSummary], others: Values, losses: dict[tuple, float]) -> None:
    """Draw a heat map for each number of slots. Cells without a finished trial are hatched."""
    title, (heads, sizes, slots) = _list_titles(results)[-1], _list_axes(results)
    if others:
        figure.suptitle(describe_fixed(others, ""), fontsize=8)
    low, high = min(losses.values()), max(losses.values())
    panels = figure.subplots(1, len(slots), squeeze=False, sharey=True)[0]
    for axes, s in zip(panels, slots, strict=True):
        grid = np.array([[losses.get((h, d, s), np.nan) for h in heads] for d in sizes], dtype=float)
        axes.set_facecolor("#dddddd")
        axes.patch.set_hatch("//")
        image = axes.imshow(grid, cmap="cividis", vmin=low, vmax=high, origin="lower", aspect="auto")
        for (y, x), loss in np.ndenumerate(grid):
            if not np.isnan(loss):
                color = "white" if loss < (low + high) / 2 else "black"
                axes.text(x, y, f"{loss:.3f}", ha="center", va="center", fontsize=7, color=color)
        axes.set_xticks(range(len(heads)), [ABSENT if h is None else f"{h:g}" for h in heads])
        axes.set_yticks(range(len(sizes)), [ABSENT if d is None else f"{d:g}" for d in sizes])
        axes.set_xlabel(f"{MEANINGS['H']} ($H$)")
        axes.set_title("" if s is None else f"$S$ = {s:g}", fontsize=9)
    panels[0].set_ylabel(f"{MEANINGS['d_s']} ($d_s$)")
    figure.colorbar(image, ax=panels, label=f"{title.capitalize()} (hatched: missing)")
