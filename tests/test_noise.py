"""The noise of a pair by source, from grids of seeds and data orders."""

import math

import numpy as np
import pytest
from language_runs import finish, write_run

from stackexp.cli import main
from stackexp.reports.noise import ORDER, REST, SEED, TOTAL, pool_deviations, split_variance


@pytest.mark.parametrize("deviations", [(1.0, 0.5, 0.3), (0.0, 1.0, 1.0), (0.2, 0.2, 2.0)])
@pytest.mark.parametrize("shape", [(3, 3), (6, 4)])
def test_intervals_cover_the_deviations(deviations, shape, monkeypatch):
    """Intervals of a deviation of 0 begin at 0, so they cover it more often. Those of the sum cover 0.926 or more."""
    monkeypatch.setattr("stackexp.reports.noise.DRAWS", 2000)
    random, count = np.random.default_rng(1), 1500
    parts = [random.normal(0, 1, (count, *size)) for size in ((shape[0], 1), (1, shape[1]), shape)]
    values = 0.1 + sum(deviation * part for deviation, part in zip(deviations, parts, strict=True))
    found = split_variance(values)
    for name, deviation in zip((SEED, ORDER, REST), deviations, strict=True):
        _, low, high = found[name]
        assert 0.93 <= np.mean((low <= deviation) & (deviation <= high)) <= (1 if name != REST else 0.97), name
    total, low, high = found[TOTAL]
    true = np.hypot.reduce(deviations)
    assert np.mean((low <= true) & (true <= high)) >= 0.92
    assert np.mean(total**2) == pytest.approx(true**2, rel=0.1), "without bias"


def test_additive_grids_have_the_deviations_of_rows_and_columns():
    rows, columns = np.array([0.0, 1.0, 5.0]), np.array([2.0, 3.0, 7.0, 1.0])
    found = split_variance(rows[:, None] + columns)
    assert found[SEED][0] == pytest.approx(rows.std(ddof=1))
    assert found[ORDER][0] == pytest.approx(columns.std(ddof=1))
    assert found[REST][0] == pytest.approx(0, abs=1e-12)


def write_grid(root, arm, losses, *overrides, orders=(0, 1)):
    for (seed, order), loss in losses.items():
        run = root / f"{arm}-seed={seed}-shuffle_seed={order}-{abs(hash((arm, seed, order))) % 16**8:08x}"
        write_run(run, f"data.shuffle_seed={order}", *overrides, seed=seed, data=f"{order:02d}")
        finish(run, loss, seconds_of_last_session=1800.0)


def test_plan_splits_the_noise_of_a_grid(tmp_path, capsys):
    """The differences are 0.01 * seed + 0.04 * order, so nothing is left for both together."""
    cells = [(seed, order) for seed in range(3) for order in range(2)]
    write_grid(tmp_path, "wide", {cell: 4 + cell[0] for cell in cells}, "model.memory=null")
    write_grid(tmp_path, "stack", {(s, o): 4 + s + 0.01 * s + 0.04 * o for s, o in cells})
    command = ["plan", "--effect", "0.05", "--runs", str(tmp_path), "--baseline", "wide"]
    assert main(command) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    deviations = {row[1]: row[-5] for row in rows if row[:1] == ["stack"] and "to" in row and "(" not in row[1]}
    assert deviations["initialization"] == "0.0100"
    assert deviations["data"] == f"{0.04 / np.sqrt(2):.4f}"
    assert deviations["both"] == "0.0000"
    assert deviations["one"] == f"{np.hypot(0.01, 0.04 / np.sqrt(2)):.4f}"
    (plan,) = [row for row in rows if row[:1] == ["stack"] and row[2].startswith("(")]
    assert plan[1] == deviations["one"]
    assert float(plan[-1]) == pytest.approx(int(plan[-2]), abs=0.1), "a pair takes an hour"
    next(tmp_path.glob("stack-seed=2-shuffle_seed=1-*")).joinpath("result.json").unlink()
    assert main(command) == 1
    assert "1 run missing, the first with seed=2, shuffle_seed=1" in capsys.readouterr().err


@pytest.mark.parametrize(("arms", "seeds"), [(17, 3), (4, 3), (2, 8), (1, 4)])
@pytest.mark.parametrize("shared", [0.0, 0.7])
def test_the_pooled_deviation_allows_for_the_shared_baseline(arms, seeds, shared, monkeypatch):
    """`shared` is the part of the variance that the runs of the baseline add to all arms."""
    monkeypatch.setattr("stackexp.reports.noise.DRAWS", 2000)
    random = np.random.default_rng(arms + seeds)
    values = math.sqrt(shared) * random.standard_normal((400, 1, seeds))
    values = values + math.sqrt(1 - shared) * random.standard_normal((400, arms, seeds)) + random.random((arms, 1))
    found = np.array([pool_deviations(row) for row in values])
    assert np.mean((found[:, 1] < 1) & (found[:, 2] > 1)) == pytest.approx(0.955, abs=0.03)
    assert np.mean(found[:, 0] ** 2) == pytest.approx(1, abs=0.15)
