"""`report scaling`: power laws with bands, the choice of comparable runs, and equivalent sizes."""

from pathlib import Path

import numpy as np
import pytest
from language_runs import finish, write_run

from stackexp import cli
from stackexp.errors import ConfigError, RunError
from stackexp.reports.scaling import Point, build_scaling, equivalent_factor, fit_power_law, select_series
from stackexp.tables import ABSENT

SIZES = (15e6, 30e6, 60e6, 125e6)


def write_ladder(folder: Path, gain: float = 1.2) -> Path:
    """Write runs of both families; the stack equals a Transformer `gain` times its size."""
    for size in SIZES:
        for family, memory, effective in (("transformer", 0, size), ("stacktrans", size // 10, size * gain)):
            name = "null" if family == "transformer" else family
            run = write_run(folder / f"{family}-{size / 1e6:.0f}m-0123abcd", f"model.memory={name}")
            sizes = {"parameters": int(size), "memory_parameters": int(memory), "tokens": int(20 * (size - memory))}
            finish(run, 1.5 + 30 * effective**-0.2, **sizes)
    return folder


def test_an_exact_power_law_is_recovered():
    sizes = np.array(SIZES)
    law = fit_power_law(sizes, 1.5 + 30 * sizes**-0.2, irreducible=1.5)
    assert (law.exponent, *law.interval()) == pytest.approx((0.2, 0.2, 0.2))
    assert law.predict(1e9) == pytest.approx(1.5 + 30 * 1e9**-0.2)
    assert fit_power_law(SIZES[:3], [3, 2, 1]).interval() is None, "three runs give no band"


@pytest.mark.parametrize("number", [4, 8])
def test_the_band_covers_the_true_law_in_95_percent_of_repetitions(number):
    sizes, generator = np.geomspace(1e7, 1e9, number), np.random.default_rng(0)
    truth, covered = 20 * sizes**-0.1, 0
    for _ in range(300):
        law = fit_power_law(sizes, truth * np.exp(0.01 * generator.standard_normal(number)))
        low, high = law.predict_band(sizes)
        covered += int(low[2] <= truth[2] <= high[2])
    assert 0.91 <= covered / 300 <= 0.98


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
    def select(points, quantity="parameters"):
        return (series := select_series(points, quantity)) and (series.condition, series.points)

    ladder = [Point("Transformer", n, n, 20 * n, 0, 3.0) for n in (10, 20, 40)]
    fixed = [Point("Transformer", n, n, 500, 0, 3.0) for n in (10, 20)]
    assert select([*ladder[:2], *fixed]) == ("500 tokens", fixed)
    assert select([*ladder, *fixed]) == ("20 tokens per parameter outside the memory", ladder)
    two = [Point(family, n, n, 900, 0, 3.0) for family in ("Transformer", "StackTrans") for n in (10, 20)]
    assert select([*ladder, *fixed, *two]) == ("900 tokens", two), "two families instead of one with three sizes"
    longer = [ladder[1], ladder[1]._replace(tokens=800)]
    assert select([ladder[0], *longer], "tokens") == ("20 parameters outside the memory", longer)
    assert select(ladder, "tokens") is select([], "tokens") is None, "in a ladder, the sizes differ, too"
    assert select([Point("Transformer", n, n, 10**n, 0, 3.0) for n in (1, 2, 3)]) is None


def test_the_panel_of_a_ladder(tmp_path, invoke):
    write_ladder(tmp_path)
    arguments = ["--irreducible", "1.5", "--loss", "average", "--figure", str(tmp_path / "scaling.png")]
    printed = invoke("report scaling", tmp_path, *arguments)
    rows = [line.split() for line in printed.splitlines()[2:]]
    assert rows[2] == ["parameters", "Transformer", *["4"] * 2, "0.2000", "0.200", "to", "0.200", ABSENT, ABSENT]
    assert rows[3][:5] == ["parameters", "StackTrans", "4", "4", "0.2000"]
    assert rows[3][8:10] == ["1.200", "extrapolated*"]
    assert "Loss against parameters: runs with 20 tokens per parameter outside the memory." in printed
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def write_size(folder: Path, name: str, size: int, *overrides: str, loss=3.0, seed=0, data="aa", **figures) -> Path:
    """Write a finished run with `size` parameters, none of them in the memory unless `figures` differ."""
    run = write_run(folder / f"{name}-seed={seed}-0123abcd", *overrides, seed=seed, data=data)
    return finish(run, loss, **{"parameters": size} | figures)


def list_families(folder: Path, **options) -> list[tuple[str, ...]]:
    """Return panel, family, sizes and runs of each row."""
    return [tuple(row[:4]) for row in build_scaling([folder], **options).tables[0].rows]


def list_mixed(folder: Path, **options) -> list[str]:
    """Return the notes about families whose runs have different options."""
    return [note for note in build_scaling([folder], **options).notes if "different options" in note]


def test_families_are_separated_by_options_on_request(tmp_path):
    for size in (1000, 2000):
        for rate in (0.001, 0.002):
            scale = f"model.hidden_size={size // 1000 * 64}"
            for name, memory in (("t", "null"), ("s", "stacktrans")):
                options = (f"model.memory={memory}", scale, f"optimizer.lr={rate}")
                write_size(tmp_path, f"{name}{size}-lr={rate}", size, *options, loss=5 - size / 1000)
    assert list_families(tmp_path) == [("parameters", name, "2", "4") for name in ("Transformer", "StackTrans")]
    names = ("Transformer", "StackTrans")
    mixed = [f"{name} has runs with different options, --by separates them: optimizer.lr" for name in names]
    assert sorted(list_mixed(tmp_path)) == sorted(mixed)
    by = ["optimizer.lr"]
    rows = build_scaling([tmp_path], by=by).tables[0].rows
    assert [row[1] for row in rows] == [f"{name} (lr={rate})" for name in names for rate in (0.001, 0.002)]
    assert [row[6] != ABSENT for row in rows] == [False, False, True, True], "the Transformer of the same learning rate"
    assert list_mixed(tmp_path, by=by) == []
    with pytest.raises(ConfigError, match=r"--by optimizer.rate: no run has this option"):
        build_scaling([tmp_path], by=["optimizer.rate"])


def test_a_grid_over_memory_sizes_is_not_a_ladder(tmp_path):
    for heads in (2, 4, 8):
        sizes = {"parameters": 1000 + heads, "memory_parameters": heads}
        write_size(tmp_path, f"H={heads}", 0, "model.memory=stacktrans", f"model.memory.num_heads={heads}", **sizes)
    with pytest.raises(RunError, match=r"^.*: nothing to fit: .*; Filled by `python -m stackexp sweep run ladder`$"):
        build_scaling([tmp_path])
    large = {"parameters": 2016, "memory_parameters": 16}
    write_size(tmp_path, "large", 0, "model.memory=stacktrans", "model.memory.num_heads=8", **large)
    assert list_families(tmp_path) == [("parameters", "StackTrans", "2", "4")]
    (note,) = list_mixed(tmp_path)
    assert note.endswith("--by separates them: model.memory.num_heads")


def test_runs_outside_a_panel_are_counted_and_named(tmp_path):
    for seed in (0, 1):
        for size in (1000, 2000, 3000):
            write_size(tmp_path, f"t{size}", size, "model.memory=null", seed=seed)
        write_size(tmp_path, "long", 1000, "model.memory=null", f"trainer.max_steps={700}", seed=seed, tokens=10**6)
    notes = build_scaling([tmp_path]).notes
    assert "2 runs not in loss against parameters, not one of two sizes with 10.2k tokens: long (seeds 0, 1)" in notes
    text = "not one of two sizes with 1k parameters outside the memory: t2000 (seeds 0, 1), t3000 (seeds 0, 1)"
    assert any(note.endswith(text) for note in notes)


def test_runs_on_other_data_are_left_out(tmp_path):
    for seed in (0, 1):
        for size in (1000, 2000):
            write_size(tmp_path, f"t{size}", size, "model.memory=null", seed=seed)
        data = "aa" if seed else "bb"
        write_size(tmp_path, "other", 3000, "model.memory=null", seed=seed, data=data, tokens=20480)
    report = build_scaling([tmp_path])
    reason = "trained on other data than most runs with the same seed and data options"
    assert f"1 run left out, {reason}: other (seed 0)" in report.notes
    assert len(report.records) == 5
    records = tmp_path / "t2000-seed=1-0123abcd" / "data.jsonl"
    records.write_text(records.read_text().replace('"step": 10', '"step": 7'))
    assert f"1 run without recorded training data, not compared: {records.parent}" in build_scaling([tmp_path]).notes


def test_a_missing_loss_names_the_command_that_measures_it(tmp_path):
    write_ladder(tmp_path)
    with pytest.raises(RunError, match=r"no finished run has a loss in column 'V2'; run `.*`--sets v2,v3`"):
        build_scaling([tmp_path], measure="V2")


@pytest.mark.parametrize(
    ("value", "message"), [("100", "above every loss"), ("-1", "not a loss"), ("nan", "not a loss")]
)
def test_an_impossible_irreducible_loss_is_refused(tmp_path, capsys, value, message):
    write_ladder(tmp_path)
    assert cli.main(["report", "scaling", str(tmp_path), "--irreducible", value]) != 0
    assert f"--irreducible {value}: {message}" in capsys.readouterr().err


def test_nothing_to_fit_is_an_error_with_the_command_to_run(tmp_path):
    run = write_run(tmp_path / "one-0123abcd", "model.memory=null")
    with pytest.raises(RunError, match=r"no finished runs; .*sweep run ladder`; 1 run unfinished, `.*fit.*`"):
        build_scaling([tmp_path])
    finish(run, 3.0)
    with pytest.raises(RunError, match=r"nothing to fit: no family has two sizes.*sweep run ladder`"):
        build_scaling([tmp_path])


def test_runs_scored_on_other_sets_are_left_out(tmp_path):
    write_ladder(tmp_path)
    run = write_run(tmp_path / "other-0123abcd", "model.memory=null")
    finish(run, 2.0, sets={"another": {"loss": 2.0}}, parameters=10**8, tokens=2 * 10**9)
    report = build_scaling([tmp_path])
    assert "1 run left out, scored on other sets than most runs: other (seed 0)" in report.notes
    assert len(report.records) == 8
    assert len(build_scaling([tmp_path], measure="training loss").records) == 9
