"""`report scaling`: power laws with bands, the choice of comparable runs, and equivalent sizes."""

from pathlib import Path

import numpy as np
import pytest
from language_runs import finish, write_run

from stackexp import cli
from stackexp.reports.power_law import equivalent_factor, fit_power_law
from stackexp.reports.scaling import Point, build_scaling, select_series
from stackexp.tables import ABSENT

SIZES = (15e6, 30e6, 60e6, 125e6)


def write_ladder(folder: Path, gain: float = 1.2) -> Path:
    """Write runs of both families; the stack equals a Transformer `gain` times its size."""
    for size in SIZES:
        for family, memory, effective in (("transformer", 0, size), ("stacktrans", size // 10, size * gain)):
            name = "null" if family == "transformer" else family
            run = write_run(folder / f"{family}-{size / 1e6:.0f}m-0123abcd", f"model.memory={name}")
            finish(
                run,
                1.5 + 30 * effective**-0.2,
                parameters=int(size),
                memory_parameters=int(memory),
                tokens=int(20 * (size - memory)),
            )
    return folder


def test_an_exact_power_law_is_recovered():
    sizes = np.array(SIZES)
    law = fit_power_law(sizes, 1.5 + 30 * sizes**-0.2, irreducible=1.5)
    assert law.exponent == pytest.approx(0.2)
    assert np.exp(law.intercept) == pytest.approx(30)
    assert law.interval() == pytest.approx((0.2, 0.2))
    assert law.predict(1e9) == pytest.approx(1.5 + 30 * 1e9**-0.2)
    assert fit_power_law(SIZES[:3], [3, 2, 1]).interval() is None, "three runs give no band"


def test_the_band_covers_the_true_law_in_95_percent_of_repetitions():
    sizes, generator = np.geomspace(1e7, 1e9, 8), np.random.default_rng(0)
    truth, covered = 20 * sizes**-0.1, 0
    for _ in range(200):
        law = fit_power_law(sizes, truth * np.exp(0.01 * generator.standard_normal(8)))
        low, high = law.predict_band(sizes)
        covered += int(low[3] <= truth[3] <= high[3])
    assert 0.86 <= covered / 200 <= 0.99


def test_the_equivalent_factor_is_that_of_the_sizes():
    sizes = np.array(SIZES)
    base = fit_power_law(sizes, 30 * sizes**-0.2)
    factor, interval = equivalent_factor(fit_power_law(sizes, 30 * (1.5 * sizes) ** -0.2), base, 60e6)
    assert factor == pytest.approx(1.5)
    assert interval == pytest.approx((1.5, 1.5))
    flat = fit_power_law(sizes, [2.0, 2.1, 2.0, 2.05])
    _, interval = equivalent_factor(base, flat, 60e6)
    assert interval is not None
    assert interval[1] == np.inf, "a baseline that may not improve has no bound"


def test_runs_are_compared_at_a_fixed_budget_before_a_fixed_ratio():
    ladder = [Point("Transformer", n, n, 20 * n, 0, 3.0) for n in (10, 20, 40)]
    fixed = [Point("Transformer", n, n, 500, 0, 3.0) for n in (10, 20)]
    series = select_series([*ladder[:2], *fixed], "parameters")
    assert series is not None
    assert (series.condition, series.points) == ("500 tokens", fixed)
    series = select_series([*ladder, *fixed], "parameters")
    assert series is not None
    assert (series.condition, series.points) == ("20 tokens per parameter outside the memory", ladder)
    series = select_series([*ladder[:2], Point("Transformer", 20, 20, 800, 0, 3.0)], "tokens")
    assert series is not None
    assert series.condition == "20 parameters outside the memory"
    assert select_series([Point("Transformer", n, n, 10**n, 0, 3.0) for n in (1, 2, 3)], "parameters") is None
    assert select_series([], "tokens") is None


def test_both_panels_of_a_ladder(tmp_path, capsys):
    write_ladder(tmp_path)
    arguments = ["--irreducible", "1.5", "--loss", "average", "--figure", str(tmp_path / "scaling.png")]
    assert cli.main(["report", "scaling", str(tmp_path), *arguments]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows[2] == ["parameters", "Transformer", "4", "0.2000", "0.200", "to", "0.200", ABSENT, ABSENT]
    assert rows[3][:4] == ["parameters", "StackTrans", "4", "0.2000"]
    assert rows[3][7:9] == ["1.200", "extrapolated*"]
    assert rows[4][0] == rows[5][0] == "tokens"
    assert rows[5][7:9] == ["1.333", "extrapolated*"], "20 tokens per parameter outside the memory, a tenth of all"
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_missing_panels_have_commands(tmp_path):
    finish(write_run(tmp_path / "one-0123abcd", "model.memory=null"), 3.0)
    report = build_scaling([tmp_path])
    assert report.draw is None
    missing = [note for note in report.notes if note.startswith("missing")]
    assert [note.split(":")[0] for note in missing] == [
        "missing loss against parameters",
        "missing loss against tokens",
    ]
    assert all(note.endswith("`python -m stackexp sweep run ladder`") for note in missing)
    report = build_scaling([tmp_path], irreducible=4)
    assert f"left out, no average above 4: {tmp_path}/one-0123abcd" in report.notes


def test_runs_scored_on_other_sets_are_left_out(tmp_path):
    write_ladder(tmp_path)
    run = write_run(tmp_path / "other-0123abcd", "model.memory=null")
    finish(run, 2.0, sets={"another": {"loss": 2.0}}, parameters=10**8, tokens=2 * 10**9)
    report = build_scaling([tmp_path])
    assert f"left out, scored on other sets than most runs: {run}" in report.notes
    assert len(report.records) == 8
    assert len(build_scaling([tmp_path], measure="training loss").records) == 9
