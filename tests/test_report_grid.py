"""`report grid`: curves and heat maps of a sweep over H, d_s and S."""

import csv
from pathlib import Path

import pytest
from config_files import build_sweep, finish_trial

from stackexp.reports.grid import build_grid, draw_grid, summarize_trials
from stackexp.sweeps.sweep import Sweep

H, D, S = "model.memory.num_heads", "model.memory.head_dim", "model.memory.num_slots"
pytestmark = pytest.mark.usefixtures("empty_folder")


def build(unfinished: int = 0, **keys: object) -> Sweep:
    """Return a sweep whose trials, but for the last ones, have the loss 2 + H / 10 + d_s / 100 + S / 1000."""
    sweep = build_sweep(**keys)
    for trial in sweep.trials[: len(sweep.trials) - unfinished]:
        values = trial.values
        loss = 2 + values.get(H, 0) / 10 + values.get(D, 0) / 100 + values.get(S, 0) / 1000 + values.get("seed", 0) / 5
        finish_trial(trial, loss)
    (sweep.folder / "sweep.yaml").write_text(sweep.to_yaml())
    return sweep


def test_curves_and_heat_maps(invoke):
    sweep = build(unfinished=1, grid={H: [1, 2], D: [4, 8, 16], S: [8, 24]}, center={H: 1, D: 8, S: 8})
    files = ["--csv=grid.csv", "--figure=grid.png"]
    printed = invoke("report grid", sweep.folder, *files)
    first = printed.splitlines()[4].split()
    assert first == ["H=1-d_s=4-S=8", "2.1480", "1.6480", "1", "1,000", "10"]
    assert f"1 of 12 trials are not finished: `python -m stackexp sweep run {sweep.folder}`" in printed
    assert Path("grid.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(csv.DictReader(Path("grid.csv").read_text().splitlines()))) == 11

    figure = draw_grid(summarize_trials(sweep), sweep.config.center, [H, D, S])
    top, bottom = figure.subfigs
    xs, ys = top.axes[1].lines[1].get_data()
    assert list(xs) == [4, 8, 16]
    assert list(ys) == pytest.approx([2.148, 2.188, 2.268]), "H = 1 and S = 8, as in the center"
    maps = [axes.images[0].get_array() for axes in bottom.axes if axes.get_title()]
    assert [axes.get_title() for axes in bottom.axes if axes.get_title()] == ["$S$ = 8", "$S$ = 24"]
    assert maps[0].tolist() == [pytest.approx(row) for row in ([2.148, 2.248], [2.188, 2.288], [2.268, 2.368])]
    assert maps[1].mask.tolist() == [[False, False], [False, False], [False, True]]


def test_pruned_trials_are_not_waited_for():
    sweep = build(unfinished=2, grid={H: [1, 2, 4]})
    sweep.trials[1].pruned.parent.mkdir(parents=True)
    sweep.trials[1].pruned.write_text("{}")
    notes = build_grid("study.yaml").notes
    assert notes[0].startswith("1 of 3 trials are not finished: ")
    assert notes[1] == "1 of 3 trials were ended early by the search."


def test_seeds_are_averaged_and_one_key_has_no_map():
    sweep = build(grid={H: [1, 2]}, seeds=[0, 1])
    report = build_grid(str(sweep.folder))
    assert report.tables[0].header[1:3] == ["average.loss ± std", "training loss ± std"]
    assert report.tables[0].rows[0] == ["H=1", "2.2000 ± 0.1414", "1.7000 ± 0.1414", "2", "1,000", "10"]
    assert len(report.draw().axes) == 1


def test_a_transformer_among_the_trials_hides_no_curve_and_no_cell():
    cells = [{H: h, S: s, "optimizer.lr": lr} for h in (1, 2) for s in (8, 24) for lr in (1e-3, 2e-3)]
    for i, trial in enumerate(build(list=[{"model.memory": None}, *cells]).trials):
        finish_trial(trial, 2 + i / 10)
    figure = build_grid("study.yaml").draw()
    top, bottom = figure.subfigs
    assert [axes.get_xlabel() for axes in top.axes] == ["stack heads ($H$)", "stack slots ($S$)", "optimizer.lr"]
    assert bottom.get_suptitle() == "lr = 0.001"
    (first, *_) = (axes.images[0] for axes in bottom.axes if axes.images)
    assert first.get_clim() == pytest.approx((2.1, 2.7)), "the loss 2.0 of the Transformer is in no cell"


def test_the_best_trial_may_have_null():
    trials = [
        {"trainer.gradient_clip_val": clip, "optimizer.lr": lr} for clip, lr in ((None, 1e-3), (1, 2e-3), (2, 2e-3))
    ]
    for i, trial in enumerate(build(list=trials).trials):
        finish_trial(trial, 2 + i)
    clip, rate = build_grid("study.yaml").draw().axes
    assert list(clip.lines[0].get_xdata()) == [1, 2]
    assert list(rate.lines[0].get_xdata()) == [1e-3]


def test_a_sweep_over_other_numbers_has_curves():
    build(grid={"optimizer.lr": [1e-3, 2e-3]})
    (axes,) = build_grid("study.yaml").draw().axes
    assert axes.get_xlabel() == "optimizer.lr"
    build(grid={"model.memory.discipline": ["stack", "queue"]})
    assert build_grid("study.yaml").draw is None


def test_without_a_cell_there_are_curves_only():
    build(list=[{H: 1}, {H: 2}, {S: 8}, {S: 16}])
    labels = [axes.get_xlabel() for axes in build_grid("study.yaml").draw().axes]
    assert sorted(labels) == ["stack heads ($H$)", "stack slots ($S$)"]


def test_the_objective_is_in_the_csv():
    sweep = build(grid={H: [1, 2]}, seeds=[0, 1], objective="memory_parameters")
    (first, _) = build_grid(str(sweep.folder)).records
    found = summarize_trials(sweep)[0]["objective"]
    assert {key: first[f"memory_parameters {key}"] for key in found} == found == {"mean": 10, "std": 0}
