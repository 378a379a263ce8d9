"""The paper's hyperparameter figure: loss over stack heads, slot size and slots, and heat maps of the grid."""

from typing import Any

import numpy as np

from stackexp.config.model import SYMBOLS
from stackexp.errors import RunError
from stackexp.reports.missing_runs import build_sweep_command
from stackexp.reports.report import Report, Table
from stackexp.reports.sweeps import (
    LOSSES,
    MEANINGS,
    VALIDATION,
    Row,
    average_bigrams,
    collect_results,
    describe_fixed,
    describe_unscored,
    plot_losses,
    select_rows,
)
from stackexp.sweeps.grid import Values, expand, shorten_keys
from stackexp.sweeps.sweep import Sweep, load_last_run
from stackexp.tables import ABSENT

KEYS = {symbol: key for key, symbol in SYMBOLS.items()}
"""H, d_s and S -> their config keys."""


def build_grid(target: str) -> Report:
    """Build the report of a sweep over H, d_s and S, given as its folder, its name or its YAML file."""
    sweep = load_last_run(target)
    rows = collect_results(sweep)
    varied = [symbol for symbol in KEYS if len(_list_values(rows, symbol)) > 1]
    if not varied:
        raise RunError(f"{sweep.folder}: the finished trials have one value of H, d_s and S each; run stack_grid")
    titles = [title for title in LOSSES if title in rows[0].losses]
    table = [[row.name, *(str(row.losses[t]) for t in titles), str(row.seeds), f"{row.parameters:,}"] for row in rows]
    for name, loss in average_bigrams(sweep).items():
        losses = (f"{loss:.4f}" if LOSSES[title] == VALIDATION else ABSENT for title in titles)
        table.append([name, *losses, *[ABSENT] * 2])
    notes = ["Mean ± standard deviation over the seeds, in nats per token. The best objective comes first."]
    notes += [*_describe_missing(sweep, rows), *describe_unscored(sweep)]
    records = [
        {"trial": row.name, **row.values, "seeds": row.seeds, "parameters": row.parameters}
        | {f"{title} {key}": value for title in titles for key, value in vars(row.losses[title]).items()}
        for row in rows
    ]
    header = ["trial", *titles, "seeds", "parameters"]
    return Report(
        [Table(f"Sweep {sweep.name}", header, table)],
        notes,
        records,
        lambda: draw_grid(rows, sweep.config.center, varied),
    )


def _list_values(rows: list[Row], symbol: str) -> list[Any]:
    """Return the numbers that a key takes; none if it was not searched."""
    return sorted({row.values[KEYS[symbol]] for row in rows if type(row.values.get(KEYS[symbol])) in (int, float)})


def _describe_missing(sweep: Sweep, rows: list[Row]) -> list[str]:
    """Return the planned trials without results, and the cells of the heat maps that are not planned."""
    if sweep.config.search:
        return ["A search chooses its trials: cells without a trial stay empty."]
    planned = [{key: value for key, value in values.items() if key != "seed"} for _, values in expand(sweep.config)]
    done = [row.values for row in rows]
    names = shorten_keys(rows[0].values)
    missing = [values for i, values in enumerate(planned) if values not in done and values not in planned[:i]]
    lines = [", ".join(f"{names.get(key, key)}={value}" for key, value in values.items()) for values in missing]
    notes = [f"missing {'; '.join(lines)}: `{build_sweep_command(sweep.folder)}`"] if lines else []
    if sweep.config.axes:
        notes.append(
            "The sweep varies one key at a time, so most cells of the heat maps are empty: use `grid`, not `axes`."
        )
    return notes


def draw_grid(rows: list[Row], center: Values, varied: list[str]) -> Any:
    """Draw the loss against each varied key; below, if two keys vary, the H x d_s heat map for each S."""
    from matplotlib.figure import Figure

    if not all(select_rows(rows, KEYS[symbol], center) for symbol in varied):  # not finished
        center = {}
    slots = _list_values(rows, "S") or [None]
    has_maps = len(varied) > 1
    figure: Any = Figure(figsize=(9.5, 6.4 if has_maps else 3.2), layout="constrained")
    top, bottom = figure.subfigures(2, 1) if has_maps else (figure, None)
    for axes, symbol in zip(top.subplots(1, len(varied), squeeze=False)[0], varied, strict=True):
        selected = select_rows(rows, KEYS[symbol], center)
        plot_losses(axes, KEYS[symbol], selected)
        axes.set_title(describe_fixed(selected[0].values, KEYS[symbol]), fontsize=8)
        axes.grid(alpha=0.3)
    if has_maps:
        _draw_maps(bottom, rows, center, slots)
    return figure


def _draw_maps(figure: Any, rows: list[Row], center: Values, slots: list[Any]) -> None:
    """Draw a heat map for each number of slots. Cells without a finished trial are hatched."""
    title = next(title for title in reversed(LOSSES) if title in rows[0].losses)
    heads, sizes = _list_values(rows, "H") or [None], _list_values(rows, "d_s") or [None]
    others = {key: value for key, value in (rows[0].values | center).items() if key not in KEYS.values()}
    losses = {
        tuple(row.values.get(KEYS[symbol]) for symbol in KEYS): row.losses[title].mean
        for row in rows
        if all(row.values.get(key) == value for key, value in others.items())
    }
    low, high = min(losses.values()), max(losses.values())
    panels = figure.subplots(1, len(slots), squeeze=False, sharey=True)[0]
    for axes, s in zip(panels, slots, strict=True):
        cells = np.array([[losses.get((h, d, s), np.nan) for h in heads] for d in sizes], dtype=float)
        axes.set_facecolor("#dddddd")
        axes.patch.set_hatch("//")
        image = axes.imshow(cells, cmap="cividis", vmin=low, vmax=high, origin="lower", aspect="auto")
        for (y, x), loss in np.ndenumerate(cells):
            if not np.isnan(loss):
                is_dark = loss < (low + high) / 2
                axes.text(
                    x, y, f"{loss:.3f}", ha="center", va="center", fontsize=7, color="white" if is_dark else "black"
                )
        axes.set_xticks(range(len(heads)), [ABSENT if h is None else f"{h:g}" for h in heads])
        axes.set_yticks(range(len(sizes)), [ABSENT if d is None else f"{d:g}" for d in sizes])
        axes.set_xlabel(f"{MEANINGS['H']} ($H$)")
        axes.set_title("" if s is None else f"$S$ = {s:g}", fontsize=9)
    panels[0].set_ylabel(f"{MEANINGS['d_s']} ($d_s$)")
    figure.colorbar(image, ax=panels, label=f"{title.capitalize()} (hatched: missing)")
