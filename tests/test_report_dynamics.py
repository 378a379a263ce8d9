"""`report dynamics`: smoothed losses, crossings of the baseline, and what is shown."""

import csv

import numpy as np
import pandas as pd
import pytest
from language_runs import finish, write_run

from stackexp.errors import RunError
from stackexp.files import write_json
from stackexp.reports.dynamics import Curve, build_dynamics, draw_dynamics, find_crossings
from stackexp.reports.report import smooth_losses
from stackexp.tables import ABSENT

STEPS = np.arange(1, 101)


def build_curve(name: str, losses, window: int = 5) -> Curve:
    return Curve(name, pd.DataFrame({0: losses}, index=STEPS[: len(losses)] * 1024, dtype=float), window)


def test_smoothing_is_a_centered_mean():
    assert smooth_losses([1.0, 2, 3, 4, 10], 3).tolist() == pytest.approx([1.5, 2, 3, 17 / 3, 7])
    assert smooth_losses([1.0, 2, 4], 2).tolist() == pytest.approx([1, 1.5, 3])


def test_a_crossing_lasts_for_a_window():
    base = build_curve("base", np.full(100, 3.0))
    crossing = find_crossings(build_curve("a", 3 + 0.01 * (40.5 - STEPS)), base)
    assert crossing.crossings == [41 * 1024]
    assert crossing.difference.iloc[-1] == pytest.approx(-0.585)
    blip = np.full(100, 3.1)
    blip[50:52] = 2.0  # smoothed: below for six steps
    assert find_crossings(build_curve("b", blip), base).crossings == [(49) * 1024, (55) * 1024]
    assert find_crossings(build_curve("b", blip, window=9), base).crossings == [47 * 1024, 57 * 1024]
    blip[50:52] = 3.0 - 0.051
    assert find_crossings(build_curve("b", blip), base).crossings == []
    assert find_crossings(build_curve("short", [1.0, 2.0]), base).crossings == []


def test_the_figure_shows_a_shorter_run_above_the_baseline():
    curves = [build_curve("base", 4 - 0.01 * STEPS), build_curve("short", [8.0, 7.5, 7.0, 6.5])]
    low, high = draw_dynamics(curves, {}).axes[0].get_ylim()
    assert all(low < value < high for curve in curves for value in curve.smoothed.iloc[len(curve.raw) // 20 :])


def test_the_mean_over_seeds_is_compared(tmp_path, invoke):
    for seed in (0, 1):
        base = [3.0 + seed] * 100
        ours = [3.0 + seed + 0.01 * (40.5 - step) for step in STEPS]
        for name, memory, losses in (("transformer", "null", base), ("stacktrans", "stacktrans", ours)):
            folder = tmp_path / f"{name}-seed={seed}-0123abc{seed}"
            run = write_run(folder, f"model.memory={memory}", seed=seed, losses=losses)
            if seed == 0:
                finish(run, 3.0)
    files = ["--csv", str(tmp_path / "curves.csv"), "--figure", str(tmp_path / "dynamics.png"), "--smooth", "5"]
    printed = invoke("report dynamics", tmp_path, *files)
    rows = [line.split() for line in printed.splitlines()]
    assert rows[4] == ["transformer", "2", "102,400", "3.500", *[ABSENT] * 6]
    difference = ["-0.585", "(-0.585", "to", "-0.585)*"]  # the same for both seeds
    assert rows[5][:8] == ["stacktrans", "2", "102,400", "2.915", *difference]
    assert rows[5][8:] == ["102,400", "1", "41,984", "+0.0%", "+5.1%"]
    assert "unfinished, `python -m stackexp fit --run RUN` resumes one" in printed
    lines = [line for line in csv.DictReader((tmp_path / "curves.csv").open()) if line["run"] == "stacktrans"]
    assert (len(lines), float(lines[0]["loss"])) == (100, pytest.approx(3.895))
    assert (tmp_path / "dynamics.png").read_bytes().startswith(b"\x89PNG")


def test_differences_are_over_common_seeds_and_tokens(tmp_path):
    """The baseline is unfinished and has one seed more. The losses fall so steeply that another window differs."""
    falling = [9.0 - 0.05 * step for step in STEPS]
    for seed, losses in ((0, falling[:40]), (1, [1.0] * 40)):
        write_run(tmp_path / f"transformer-seed={seed}-0123abcd", "model.memory=null", seed=seed, losses=losses)
    ours = [loss - 0.01 for loss in falling]
    write_run(tmp_path / "stacktrans-seed=0-0123abcd", "model.memory=stacktrans", losses=ours)
    rows = {row[0]: row for row in build_dynamics([tmp_path]).tables[0].rows}
    assert rows["stacktrans"][4:6] == ["-0.010", "40,960"]


def test_the_baseline_and_the_stack_are_finished_runs_with_the_most_tokens(tmp_path):
    arms = (("a", "null", 1024), ("b", "null", 10240), ("c", "stacktrans", None), ("d", "stacktrans", 10240))
    for i, (name, memory, tokens) in enumerate(arms):
        run = write_run(tmp_path / f"{name}-0123abc{i}", f"model.memory={memory}", losses=[3.0, 2.0])
        if tokens:
            finish(run, 3.0, tokens=tokens)
    for i in range(4):
        write_run(tmp_path / f"other{i}-0123abcd", "model.memory=value_skip", losses=[3.0, 2.0])
    assert [row[0] for row in build_dynamics([tmp_path]).tables[0].rows] == ["b", "d"]


@pytest.mark.parametrize("is_finished", [True, False])
def test_other_data_and_budgets_are_not_compared(tmp_path, is_finished):
    write_run(tmp_path / "transformer-0123abcd", "model.memory=null", losses=[3.0])
    write_run(tmp_path / "stacktrans-0123abcd", "model.memory=stacktrans", losses=[3.0], data="ff")
    write_run(tmp_path / "long-0123abcd", "model.memory=queue", "trainer.max_steps=900", losses=[3.0])
    if is_finished:
        for name in ("transformer", "stacktrans", "long"):
            finish(tmp_path / f"{name}-0123abcd", 3.0)
    report = build_dynamics([tmp_path])
    assert [row[4] for row in report.tables[0].rows] == [ABSENT] * 3, "not subtracted"
    (note,) = [note for note in report.notes if "not compared" in note]
    assert note.startswith(
        "2 runs not compared with transformer: trained for 900 steps, the baseline for 720: long (seed 0); "
    )
    assert note.endswith("(they differ at step 10): stacktrans (seed 0)")


def test_mistakes_are_one_line(tmp_path):
    write_run(tmp_path / "transformer-0123abcd", "model.memory=null")
    with pytest.raises(RunError, match=r"no training losses in metrics.jsonl; give runs"):
        build_dynamics([tmp_path])
    with pytest.raises(RunError, match="no run named queue; choose among transformer"):
        build_dynamics([tmp_path], only=["queue"])


def test_a_seed_that_has_just_begun_does_not_cut_off_the_others(tmp_path):
    for memory in ("null", "stacktrans"):
        for seed, steps in ((0, 100), (1, 90), (2, 3)):
            folder = tmp_path / f"{memory}-seed={seed}-0123abcd"
            write_run(folder, f"model.memory={memory}", seed=seed, losses=[3.0] * steps)
    report = build_dynamics([tmp_path])
    assert [row[1:3] for row in report.tables[0].rows] == [["2", f"{90 * 1024:,}"]] * 2
    assert any("2 runs left out, with less than half" in note for note in report.notes)


def test_of_two_unfinished_runs_of_a_seed_the_later_one_counts(tmp_path):
    for name, start, loss in (("a", "2026-01-02", 2.0), ("b", "2026-01-01", 3.0)):
        run = write_run(tmp_path / name / "stacktrans-seed=0-01234567", seed=0, losses=[loss] * 100)
        write_json(run / "environment.json", [{"started": f"{start}T00:00:00+0000"}])
    assert build_dynamics([tmp_path]).tables[0].rows[0][3] == "2.000"
