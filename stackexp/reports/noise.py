"""The noise of a paired difference by source: initialization, data order and evaluation chunks.

The source are runs of a grid of `seed` and `data.shuffle_seed`. A difference between an arm and the baseline is mean +
seed + order + rest, all random and independent, with one pair of runs for each seed and order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stackexp.errors import RunError
from stackexp.frame import Row
from stackexp.modules.scores import TOO_FEW_CHUNKS
from stackexp.reports.arms import (
    ArmComparison,
    Arms,
    choose_column,
    count_runs,
    find_baseline,
    find_differences,
    select_finished,
)
from stackexp.reports.report import Table
from stackexp.reports.training_data import explain_other_data
from stackexp.sequential import LEVEL
from stackexp.tables import ABSENT

ORDER_SEED = "data.shuffle_seed"
DRAWS = 20_000
ENDS = (LEVEL / 2, 1 - LEVEL / 2)
SEED, ORDER, REST, TOTAL = "initialization", "data order", "both together", "one pair"

Deviation = tuple[float, float, float]
"""A standard deviation and its 95 % interval."""


class PairGrid(NamedTuple):
    """The pairs (run, baseline's run) of an arm, seed by seed, and their differences [seeds, orders] in one column."""

    pairs: list[tuple[Row, Row]]
    differences: np.ndarray
    column: str


def find_grids(arms: Arms, baseline: str | None) -> tuple[str | None, dict[str, PairGrid], list[str]]:
    """Return the baseline, the grid of each other arm, and notes on arms without a complete one.

    There is none unless runs have different values of `data.shuffle_seed`. Raises RunError if no arm has a complete
    grid.
    """
    rows = [row for members in arms.values() for row in select_finished(members) if row.get(ORDER_SEED) is not None]
    if len({row[ORDER_SEED] for row in rows}) < 2:
        return None, {}, []
    groups: Arms = {}
    for row in rows:
        groups.setdefault(row["arm"], []).append(row)
    base = find_baseline(groups, baseline)
    if base is None:
        return None, {}, []
    others = [name for name in arms if any(row.get(ORDER_SEED) is None for row in select_finished(arms[name]))]
    comparisons, notes = [], [f"left out, without {ORDER_SEED}: {', '.join(others)}"] if others else []
    for arm, members in groups.items():
        if arm == base:
            continue
        pairs, missing = _pair_cells(members, groups[base])
        if missing:
            notes.append(f"{arm}: no grid with {base}; {missing}")
        else:
            comparisons.append(ArmComparison(arm, pairs))
    column = choose_column(None, [comparison.values for comparison in comparisons])
    notes += [f"{c.arm}: no grid with {base}; a run has no {column}" for c in comparisons if column not in c.values]
    grids = {
        c.arm: PairGrid(c.pairs, np.reshape(c.values[column], (len({run["seed"] for run, _ in c.pairs}), -1)), column)
        for c in comparisons
        if column in c.values
    }
    if not grids:
        raise RunError("; ".join(notes) or f"{base}: no other arm has runs with {ORDER_SEED}")
    return base, grids, notes


def _pair_cells(rows: Sequence[Row], base_rows: Sequence[Row]) -> tuple[list[tuple[Row, Row]], str]:
    """Return the pairs of a complete grid, seed by seed; or why there is none."""
    ours, theirs = ({(row["seed"], row[ORDER_SEED]): row for row in group} for group in (rows, base_rows))
    for group in (rows, base_rows):
        if other := [key for row in group for key in find_differences(group[0], row) if key != ORDER_SEED]:
            return [], f"its runs differ in {other[0]}"
    seeds, orders = (sorted({cell[i] for cell in ours}) for i in (0, 1))
    if len(seeds) < 2 or len(orders) < 2:
        return [], f"expected two seeds and two orders or more, found {len(seeds)} and {len(orders)}"
    cells = [(seed, order) for seed in seeds for order in orders]
    if absent := [cell for cell in cells if cell not in ours or cell not in theirs]:
        seed, order = absent[0]
        return [], f"{count_runs(len(absent))} missing, the first with seed={seed}, shuffle_seed={order}"
    pairs = [(ours[cell], theirs[cell]) for cell in cells]
    for run, base in pairs:
        if reason := explain_other_data(base, run):
            return [], f"{run['path']}: {reason}"
    return pairs, ""


def split_variance(values: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the standard deviation of each source and of one pair, with 95 % intervals.

    Estimates are those of the analysis of variance: (mean square of the seeds - that of the rest) / orders, likewise
    for the orders, and at least 0. Intervals are generalized confidence intervals (Weerahandi 1993): quantiles of these
    expressions when each sum of squares is divided by a random chi-square instead of its degrees of freedom. By
    simulation, they cover 0.93 to 0.98.

    Args:
        values: Differences [..., seeds, orders], at least 2 x 2.
    """
    num_seeds, num_orders = values.shape[-2:]
    mean = values.mean((-2, -1), keepdims=True)
    seeds, orders = (values.mean(axis, keepdims=True) - mean for axis in (-1, -2))
    rest = values - mean - seeds - orders
    squares = [(n * part**2).sum((-2, -1)) for n, part in ((num_orders, seeds), (num_seeds, orders), (1, rest))]
    degrees = [num_seeds - 1, num_orders - 1, (num_seeds - 1) * (num_orders - 1)]
    chi_squares = _draw_chi_squares(degrees)

    def combine(by_seed: np.ndarray, by_order: np.ndarray, by_rest: np.ndarray) -> dict[str, np.ndarray]:
        parts = {SEED: (by_seed - by_rest) / num_orders, ORDER: (by_order - by_rest) / num_seeds, REST: by_rest}
        parts[TOTAL] = sum(parts.values())  # type: ignore[assignment]
        return {name: np.sqrt(np.maximum(part, 0)) for name, part in parts.items()}

    estimates = combine(*(s / d for s, d in zip(squares, degrees, strict=True)))
    drawn = combine(*(s[..., None] / c for s, c in zip(squares, chi_squares, strict=True)))
    return {name: (estimates[name], *np.quantile(drawn[name], ENDS, axis=-1)) for name in estimates}


def _draw_chi_squares(degrees: Sequence[int]) -> np.ndarray:
    """Return random values [len(degrees), DRAWS], the same in each call."""
    return np.random.default_rng(0).chisquare(degrees, (DRAWS, len(degrees))).T


def pool_deviations(values: np.ndarray) -> Deviation:
    """Return the standard deviation of a pair, pooled over arms, and its 95 % interval.

    All arms share the baseline's runs, so their differences are correlated. The variance is that of the seeds' means
    plus that of the rest. The interval is a generalized one, as in `split_variance`; by simulation, it covers 0.94 to
    0.98.

    Args:
        values: Differences [arms, seeds], at least two seeds.
    """
    arms, seeds = values.shape
    centered = values - values.mean(1, keepdims=True)
    common = centered.mean(0)
    squares = [(common**2).sum(), (1 - 1 / arms) * ((centered - common) ** 2).sum()]
    degrees = [seeds - 1, (arms - 1) * (seeds - 1)]
    used = slice(min(arms, 2))  # one arm has no rest
    estimate = sum(s / d for s, d in zip(squares[used], degrees[used], strict=True))
    drawn = sum(s / c for s, c in zip(squares[used], _draw_chi_squares(degrees[used]), strict=True))
    deviation, low, high = np.sqrt([estimate, *np.quantile(drawn, ENDS)]).tolist()
    return deviation, low, high


def build_noise(base: str, grids: dict[str, PairGrid]) -> Table:
    """Return a table of the deviations by source."""
    rows = []
    for arm, grid in grids.items():
        parts = split_variance(grid.differences)
        total = sum(float(deviation) ** 2 for source, (deviation, _, _) in parts.items() if source != TOTAL)
        for source, (deviation, low, high) in parts.items():
            share = f"{deviation**2 / total:.0%}" if total and source != TOTAL else ABSENT
            rows.append([arm, source, f"{deviation:.4f}", f"{low:.4f} to {high:.4f}", share])
        noise = ArmComparison(arm, grid.pairs).noise.get(grid.column)
        chunks = f"{noise.num_chunks} evaluation chunks" if noise else "evaluation chunks"
        rows.append([arm, chunks, f"{noise.chunk:.4f}" if noise else TOO_FEW_CHUNKS, ABSENT, ABSENT])
    shapes = " or ".join(sorted({" x ".join(map(str, grid.differences.shape)) for grid in grids.values()}))
    title = (
        f"Deviation of a pair's difference from {base} by source, {shapes} seeds and orders. Evaluation chunks: what "
        "other chunks would change; all pairs share theirs"
    )
    return Table(title, ["arm", "source", "deviation", "95 % interval", "share"], rows, num_labels=2)
