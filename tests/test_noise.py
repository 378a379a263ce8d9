"""The noise of a pair by source, from grids of seeds and data orders."""

import itertools
import math
import shutil

import numpy as np
import pytest
from language_runs import finish, write_run

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


def write_grid(root, arm, losses, *overrides):
    for (seed, order), loss in losses.items():
        run = root / f"{arm}-seed={seed}-shuffle_seed={order}-{abs(hash((arm, seed, order))) % 16**8:08x}"
        write_run(run, f"data.shuffle_seed={order}", *overrides, seed=seed, data=f"{order:02d}")
        finish(run, loss, seconds=1800.0)


def test_plan_splits_the_noise_of_a_grid(tmp_path, invoke):
    """The differences are 0.01 * seed + 0.04 * order, so nothing is left for both together."""
    cells = [(seed, order) for seed in range(3) for order in range(2)]
    write_grid(tmp_path, "wide", {cell: 4 + cell[0] for cell in cells}, "model.memory=null")
    write_grid(tmp_path, "stack", {(s, o): 4 + s + 0.01 * s + 0.04 * o for s, o in cells})
    command = ["plan", "--effect", "0.05", "--runs", str(tmp_path), "--baseline", "wide"]
    rows = [line.split() for line in invoke(*command).splitlines()]
    deviations = {row[1]: row[-5] for row in rows if row[:1] == ["stack"] and "to" in row and "(" not in row[1]}
    assert deviations["initialization"] == "0.0100"
    assert deviations["data"] == f"{0.04 / np.sqrt(2):.4f}"
    assert deviations["both"] == "0.0000"
    assert deviations["one"] == f"{np.hypot(0.01, 0.04 / np.sqrt(2)):.4f}"
    (plan,) = [row for row in rows if row[:1] == ["stack"] and row[2].startswith("(")]
    assert plan[1] == deviations["one"]
    assert float(plan[-1]) == pytest.approx(int(plan[-2]), abs=0.1), "a pair takes an hour"
    next(tmp_path.glob("stack-seed=2-shuffle_seed=1-*")).joinpath("result.json").unlink()
    assert "1 run missing, the first with seed=2, shuffle_seed=1" in invoke(*command, expect=1)


@pytest.mark.parametrize("seeds", [2, 3])
def test_an_arm_may_have_fewer_orders_than_the_baseline(seeds, tmp_path, invoke):
    """The differences are 0.01 * seed, so none of the noise is from the order."""
    cells = list(itertools.product(range(seeds), range(3)))
    write_grid(tmp_path, "wide", {(s, o): 4 + s + o for s, o in cells}, "model.memory=null")
    write_grid(tmp_path, "stack", {(s, o): 4 + s + o + 0.01 * s for s, o in cells if o < 2})
    write_grid(tmp_path, "queue", {(s, o): 4 + s + o + 0.01 * s for s, o in cells}, "model.memory=queue")
    printed = invoke("plan --effect 0.05 --runs", tmp_path, "--baseline", "wide")
    rows = {(row[0], row[1]): row[-5] for row in map(str.split, printed.splitlines()) if "to" in row and len(row) > 5}
    for arm in ("stack", "queue"):
        assert (rows[arm, "data"], rows[arm, "both"]) == ("0.0000", "0.0000")
        assert float(rows[arm, "initialization"]) == pytest.approx(0.01 * np.std(range(seeds), ddof=1), abs=1e-4)
    assert f"{seeds} x 2 or {seeds} x 3 seeds and orders" in " ".join(printed.split())


def test_pairs_share_one_loss_and_hours_of_runs_that_have_them(tmp_path, invoke):
    """Arm a has validation sets, arm b has none; all have one order, so seeds are paired."""
    options = {"wide": ["model.memory=null"], "a": [], "b": ["model.memory=queue"]}
    for arm, seed in itertools.product(options, range(3)):
        run = write_run(tmp_path / f"{arm}-seed={seed}-0123abcd", "data.shuffle_seed=0", *options[arm], seed=seed)
        training = 4 + (0.01 if arm == "a" else 0.02) * seed * (arm != "wide")
        figures = {"train_loss": {"last_20_steps": training}}
        figures |= {"seconds": 1800.0} if (arm, seed) != ("a", 1) else {}
        finish(run, 4 + 0.1 * seed * (arm == "a"), **figures, **({"sets": {}, "average": {}} if arm == "b" else {}))

    def plan() -> tuple[dict[str, list[str]], str]:
        printed = invoke("plan --effect 0.05 --runs", tmp_path, "--baseline", "wide")
        return {row[0]: row[1:] for row in map(str.split, printed.splitlines()) if row[1:]}, " ".join(printed.split())

    rows, printed = plan()
    assert (rows["a"][0], rows["b"][0]) == ("0.0100", "0.0200"), "the arms share the training loss only"
    assert "The noise is that of the training loss." in printed
    assert float(rows["a"][-1]) == int(rows["a"][-2]), "a pair takes an hour; the pair without a duration is ignored"
    for run in (*tmp_path.glob("b-seed=0-*"), *tmp_path.glob("b-seed=1-*")):
        shutil.rmtree(run)
    rows, printed = plan()
    assert "left out, because they have fewer than two pairs (average): b" in printed
    assert rows["a"][0] == "0.1000"
    assert "The noise is that of the validation loss." in printed


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


def test_runs_that_the_plan_leaves_out_are_named(tmp_path, invoke):
    cells = [(seed, order) for seed in range(2) for order in range(2)]
    write_grid(tmp_path, "wide", {cell: 4 + cell[0] for cell in cells}, "model.memory=null")
    write_grid(tmp_path, "stack", {(s, o): 4 + s + 0.04 * o for s, o in cells})
    finish(write_run(tmp_path / "queue-seed=0-01234567", "model.memory=queue", seed=0), 4.0)
    write_run(tmp_path / "begun-seed=0-01234568", seed=0)
    printed = invoke("plan", "--effect", "0.05", "--runs", tmp_path, "--baseline", "wide")
    assert "- left out, without data.shuffle_seed: queue\n" in printed
    assert "unfinished, `python -m stackexp fit --run RUN` resumes one" in printed
