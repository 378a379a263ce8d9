"""`report scaling --forecast`: the coverage of its intervals on simulated ladders, and its file."""

import json
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from language_runs import finish, write_run

from stackexp.files import read_hashed_json, read_json, write_hashed_json, write_json
from stackexp.reports.forecast import leave_out_largest, predict_run

FIRST = 15e6
LAWS = {
    "power law": lambda x: 3.5 * np.exp(-0.08 * x),
    "offset": lambda x: 1.7 + 1.5 * np.exp(-0.3 * x),
    "large offset, steep": lambda x: 2.5 + np.exp(-0.6 * x),
    "two power laws": lambda x: 1.69 + 1.48 * np.exp(-0.34 * x) + 1.73 * np.exp(-0.28 * x),
    "flattens": lambda x: np.exp(1.3 - 0.12 * x + 0.006 * x**2),
    "steepens": lambda x: np.exp(1.3 - 0.06 * x - 0.004 * x**2),
    "breaks": lambda x: 1.8 + 1.6 * np.exp(-0.2 * x) * (1 + np.exp(2 * x) / 25) ** -0.02,
    "difference, constant": lambda x: -0.05 + 0 * x,
    "difference, shrinks": lambda x: -0.1 * np.exp(-0.3 * x),
    "difference, grows": lambda x: -0.02 - 0.02 * x,
}
"""Loss by log(size / FIRST), in nats."""
DEVIATIONS = ((0.003, 0.0), (0.015, 0.0), (0.03, 0.0), (0.005, 0.01))
"""Standard deviations between seeds, and between sizes beyond the law."""


def simulate_ladders(law, num_sizes, num_seeds, step, deviations, repetitions):
    """Return the predictions of the largest size from the others, and the part inside their 95 % interval."""
    generator = np.random.default_rng(0)
    sizes = FIRST * step ** np.arange(num_sizes)
    between_seeds, between_sizes = deviations
    values = LAWS[law](np.log(sizes / FIRST))[:, None] + between_sizes * generator.normal(
        size=(repetitions, num_sizes, 1)
    )
    values = values + between_seeds * generator.normal(size=(repetitions, num_sizes, num_seeds))
    known = values[:, :-1]
    squares = known.var(2).sum(1) * num_seeds
    mixture = predict_run(sizes[:-1], np.full(num_sizes - 1, num_seeds), known.mean(2), squares, sizes[-1])
    probability = mixture.cdf(values[:, -1, 0])
    return mixture, np.mean((probability >= 0.025) & (probability <= 0.975))


@pytest.mark.parametrize("law", LAWS)
def test_intervals_cover_the_left_out_largest_size(law):
    for cell in product((4, 6), (1, 3), (3,), ((0.015, 0.0), (0.005, 0.01))):
        assert simulate_ladders(law, *cell, repetitions=300)[1] >= 0.9, cell


@pytest.mark.parametrize("law", ["offset", "large offset, steep", "difference, constant", "difference, shrinks"])
def test_intervals_of_the_model_itself_are_not_too_wide(law):
    """They widen with the sizes and seeds that are missing; with many of both, 95 % are inside."""
    limits = {(6, 3, 3, (0.015, 0.0)): 2.8, (8, 8, 2, (0.01, 0.02)): 2.2, (8, 8, 2, (0.02, 0.0)): 1.5}
    for cell, limit in limits.items():  # multiples of the interval of one run if the law were known
        mixture, _ = simulate_ladders(law, *cell, repetitions=40)
        widths = mixture.quantile(0.975) - mixture.quantile(0.025)
        assert 1 < np.median(widths) / (2 * 1.96 * np.hypot(*cell[-1])) < limit, cell
    assert simulate_ladders(law, *cell, repetitions=300)[1] < 0.985


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_intervals_cover_the_left_out_largest_size_in_the_full_grid(law):
    for cell in product((4, 5, 6), (1, 2, 3), (2, 3), DEVIATIONS):
        assert simulate_ladders(law, *cell, repetitions=2000)[1] >= 0.9, cell


def test_each_size_is_predicted_from_the_smaller_ones():
    law = LAWS["offset"]
    runs = {int(size): [law(np.log(size / FIRST))] * 2 for size in FIRST * 2.0 ** np.arange(6)}
    left_out = leave_out_largest(runs)
    assert [left["size"] for left in left_out] == sorted(runs)[:2:-1], "three sizes remain"
    errors = [left["predicted"] - left["measured"][0] for left in left_out]
    assert errors[0] == pytest.approx(0, abs=0.005)
    widths = [left["high"] - left["low"] for left in left_out]
    assert widths == sorted(widths), "more sizes, narrower intervals"
    assert min(widths) > 4 * 0.01 / 2, "without noise, the prior deviation remains"


def test_intervals_cover_the_larger_sizes_of_a_published_ladder():
    """Test losses on the Pile of Cerebras-GPT, at 20 tokens per parameter, from its model card."""
    sizes = [int(size) for size in (111e6, 256e6, 590e6, 1.3e9, 2.7e9, 6.7e9, 13e9)]
    losses = {size: [loss] for size, loss in zip(sizes, (2.566, 2.299, 2.184, 1.996, 1.834, 1.704, 1.575), strict=True)}
    left_out = leave_out_largest(losses)
    assert [left["size"] for left in left_out] == sizes[:2:-1]
    assert all(left["low"] <= left["measured"][0] <= left["high"] for left in left_out)


# The file


NEXT = 240_000_000


def write_ladder(folder: Path, sizes=(15e6, 30e6, 60e6, 120e6), seeds=(0, 1)) -> Path:
    """Write runs of two arms, on 20 tokens per parameter. The stack gains 0.05; both share the deviation of a seed."""
    for size, seed in product(map(int, sizes), seeds):
        for arm, memory, gain in (("transformer", "null", 0.0), ("stacktrans", "stacktrans", 0.05)):
            loss = LAWS["offset"](np.log(size / FIRST)) + 0.01 * (seed - 0.5) - gain
            run = write_run(
                folder / f"{arm}-{size // 10**6}m-seed={seed}-0123abcd", f"model.memory={memory}", seed=seed
            )
            more = size // 100 if gain else 0
            finish(run, loss, parameters=size + more, memory_parameters=more, tokens=20 * size)
    return folder


def set_start(run: Path, started: str) -> None:
    (run / "environment.json").write_text(json.dumps([{"started": started}]))


@pytest.fixture
def report(invoke):
    """`report(*arguments)` returns the output of `report scaling` without line breaks, or the error line."""
    return lambda *arguments, expect=0: " ".join(invoke("report scaling", *arguments, expect=expect).split())


@pytest.fixture
def written(tmp_path, report):
    """Return the folder of runs and the forecast of the next size."""
    runs, file = write_ladder(tmp_path / "runs"), tmp_path / "forecast.json"
    text = report(runs, "--forecast", file, "--size", "240e6")
    assert "no finished run of this size yet" in text
    assert "times apart" not in text, "one step of the ladder"
    return runs, file


def test_the_file_holds_the_runs_and_the_intervals(written):
    runs, file = written
    contents = read_json(file)
    assert (contents["format"], contents["version"], contents["size"]) == ("stackexp forecast", 1, NEXT)
    assert (contents["loss"], contents["fixed"], contents["value"]) == ("average", "ratio", 20)
    assert {Path(run["path"]) for run in contents["runs"]} == set(runs.iterdir())
    assert all(len(run["sha256"]) == 64 and run["loss"] > 0 for run in contents["runs"])
    names = [tuple(forecast["names"]) for forecast in contents["forecasts"]]
    assert sorted(names) == [("StackTrans",), ("StackTrans", "Transformer"), ("Transformer",)]
    forecasts = dict(zip(names, contents["forecasts"], strict=True))
    assert forecasts["Transformer",]["predicted"] == pytest.approx(LAWS["offset"](np.log(16)), abs=0.03)
    paired = forecasts["StackTrans", "Transformer"]
    assert paired["predicted"] == pytest.approx(-0.05, abs=1e-6)
    widths = {name: forecast["high"] - forecast["low"] for name, forecast in forecasts.items()}
    assert widths["StackTrans", "Transformer"] < widths["Transformer",], "the deviation of a seed cancels in a pair"
    assert [left["size"] for left in paired["left_out"]] == [120_000_000]


def test_runs_of_the_predicted_size_are_scored_and_the_file_is_not_changed(written, report):
    runs, file = written
    frozen = file.read_bytes()
    write_ladder(runs, sizes=[NEXT], seeds=[2, 3])
    later, early = "2100-01-01T00:00:00+0000", "2001-01-01T00:00:00+0000"
    for seed, start in ((2, later), (3, early)):
        for family in ("transformer", "stacktrans"):
            set_start(runs / f"{family}-240m-seed={seed}-0123abcd", start)
    for seed, start in ((8, later), (9, early)):
        worse = write_run(runs / f"transformer-241m-seed={seed}-0123abcd", "model.memory=null", seed=seed)
        finish(worse, 4.0, parameters=241_000_000, tokens=20 * 241_000_000)
        set_start(worse, start)
    command = [runs, "--forecast", file, "--size", "240e6", "--csv", file.with_suffix(".csv")]
    text = report(*command)
    assert "Forecast for 240M parameters: 3 of 4 inside" in text
    assert "8 4.000 outside*" in text
    assert "2 -0.050 inside" in text
    assert "3 runs started before the forecast was written, so not scored: " in text
    assert worse.name in text
    assert "of the forecast changed" not in text
    assert "of the forecast missing" not in text
    assert file.with_suffix(".csv").read_text().count("\n") == 5
    for start in ("yesterday", None):
        environment = runs / "stacktrans-240m-seed=2-0123abcd" / "environment.json"
        set_start(environment.parent, start) if start else environment.unlink()
        text = report(*command)
        assert "Forecast for 240M parameters: 1 of 2 inside" in text, "without the run, and without its difference"
        assert "1 run without a recorded start, so not scored: " in text
    assert file.read_bytes() == frozen


def test_a_forecast_of_more_than_one_step_has_a_warning(tmp_path, report):
    runs, file = write_ladder(tmp_path / "runs"), tmp_path / "forecast.json"
    text = report(runs, "--forecast", file, "--size", "480e6")
    assert "for 4.0 times the largest size, where the runs are at most 2.0 times apart: a bend of the law" in text


def test_runs_with_another_token_budget_are_not_scored(written, report):
    runs, file = written
    other = write_run(runs / "transformer-240m-seed=7-0123abcd", "model.memory=null", seed=7)
    finish(other, 3.0, parameters=NEXT, tokens=5 * NEXT)
    text = report(runs, "--forecast", file)
    assert f"1 run of this size without 20 tokens per parameter outside the memory, not scored: {other}" in text
    assert "no finished run of this size yet" in text


def test_changed_and_missing_runs_are_reported(written, report):
    runs, file = written
    changed, missing, moved = (runs / f"transformer-{size}m-seed=0-0123abcd" for size in (15, 30, 60))
    finish(changed, 3.0, parameters=15_000_000, tokens=300_000_000)
    shutil.rmtree(missing)
    moved.rename(runs / "elsewhere")
    text = report(runs, "--forecast", file)
    assert f"1 run of the forecast changed since it was written, which counts their earlier losses: {changed} -" in text
    assert f"1 run of the forecast missing: {missing}" in text
    assert str(moved) not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda contents: contents | {"format": "other"}, "not a forecast"),
        (lambda contents: contents | {"version": 2}, "a forecast of version 2, not 1; use the stackexp that wrote it"),
        (
            lambda contents: contents | {"sha256": "0" * 64},
            "not as it was written: its sha256 is wrong or missing; restore",
        ),
    ],
)
def test_another_file_is_refused_in_one_line(written, report, change, message):
    runs, file = written
    contents = change(read_hashed_json(file, ""))
    write_json(file, contents) if "sha256" in contents else write_hashed_json(file, contents)
    assert f"{file}: {message}" in report(runs, "--forecast", file, expect=1)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--size", "300e6"], 1, "a forecast of size 240000000, not 300000000"),
        (["--tokens", "240e6"], 1, "a forecast of quantity parameters, not tokens"),
        (["--loss", "training loss"], 1, "a forecast of loss average, not training loss"),
        (["--by", "optimizer.lr"], 1, "a forecast of by [], not ['optimizer.lr']"),
        (["--irreducible", "1.7"], 1, "--irreducible 1.7: a forecast estimates it; omit the option"),
        (["--figure", "scaling.png"], 2, "--figure: a forecast has no figure"),
    ],
)
def test_other_options_than_those_of_the_file_are_refused(written, report, arguments, code, message):
    runs, file = written
    assert message in report(runs, "--forecast", file, *arguments, expect=code)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 1, "no such file; to write a forecast, give --size or --tokens"),
        (["--size", "60e6"], 1, "has this size; a forecast is written before such runs are trained"),
        (["--size", "100e6"], 1, "--size 100000000: not above the largest size, 120000000"),
        (["--tokens", "1e9"], 1, "--tokens 1000000000: nothing to fit in tokens"),
        (["--size", "many"], 2, "argument --size: expected a number such as 700e6, found many"),
    ],
)
def test_a_forecast_that_cannot_be_written_is_refused(tmp_path, report, arguments, code, message):
    runs, file = write_ladder(tmp_path / "runs", seeds=[0]), tmp_path / "forecast.json"
    assert message in report(runs, "--forecast", file, *arguments, expect=code)
    assert not file.exists()


def test_two_recipes_of_one_family_are_not_pooled(tmp_path, report):
    runs, file = write_ladder(tmp_path / "runs"), tmp_path / "forecast.json"
    other = write_run(runs / "slow-15m-seed=0-0123abcd", "model.memory=null", "optimizer.lr=1e-4", seed=0)
    finish(other, 4.0, parameters=15_000_000, memory_parameters=0, tokens=300_000_000)
    command = (runs, "--forecast", file, "--size", "240e6")
    assert "two runs of Transformer with one size and seed; separate them with --by" in report(*command, expect=1)
    report(*command, "--by", "optimizer.lr")


def test_two_sizes_are_too_few(tmp_path, report):
    runs, file = write_ladder(tmp_path / "runs", sizes=(15e6, 30e6)), tmp_path / "forecast.json"
    error = report(runs, "--forecast", file, "--size", "60e6", expect=1)
    assert "no family has 3 sizes with 20 tokens per parameter outside the memory" in error
    assert "--size and --tokens require --forecast" in report(runs, "--size", "60e6", expect=2)
