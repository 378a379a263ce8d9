"""The output of `sweep status|results|stop` and `sweep run --dry-run`, from run folders alone."""

import json
from pathlib import Path

import pytest
from config_files import build_sweep, finish_trial

from stackexp.frame import read_run
from stackexp.planning import cost
from stackexp.reports import grid
from stackexp.reports.grid import select_results, summarize_trials
from stackexp.sweeps import is_run_as_fit
from stackexp.sweeps.sweep import load_sweep
from stackexp.tables import ABSENT

RESULTS = "sweep results study.yaml --tables"
H, S = "model.memory.num_heads", "model.memory.num_slots"
pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def read_lines(invoke):
    """`read_lines(command)` returns the words of each line that it prints."""
    return lambda command: [line.split() for line in invoke(command).splitlines()]


def test_results_are_grouped_over_seeds_and_sorted(read_lines):
    sweep = build_sweep(grid={H: [1, 2, 4]}, seeds=[0, 1])
    for trial, loss in zip(sweep.trials, [3.0, 3.2, 2.0, 2.4, 2.9], strict=False):
        finish_trial(trial, loss)
    rows = read_lines(RESULTS)[2:]
    assert rows[0][:4] == ["trial", "average.loss", "±", "std"]
    assert rows[2][:5] == ["H=2", "2.2000", "±", "0.2828", "1.7000"]
    assert [row[0] for row in rows[2:]] == ["H=2", "H=4", "H=1"]
    assert rows[3][1:3] == ["2.9000", "2.4000"]  # one seed so far, and no deviation


def test_only_the_seed_is_removed_from_the_names(read_lines):
    sweep = build_sweep(list=[{"name": "tiny"}], grid={"seed": [0, 1], "data.shuffle_seed": [10, 2]})
    for trial in sweep.trials:
        finish_trial(trial, 3.0)
    assert [row[0] for row in read_lines(RESULTS)[4:]] == ["tiny-shuffle_seed=10", "tiny-shuffle_seed=2"]
    finish_trial(build_sweep(seeds=[3]).trials[0], 3.0)
    assert read_lines(RESULTS)[4][0] == "trial"


def test_bigram_counts_are_the_last_row(read_lines, monkeypatch):
    folders = []
    monkeypatch.setattr(grid, "read_run", lambda folder: folders.append(folder) or read_run(folder))
    sweep = build_sweep(grid={H: [1, 2]}, seeds=[0, 1])
    for trial, loss in zip(sweep.trials, [3.0, 3.2, 2.0], strict=False):
        bigrams = {"sets": {}, "average": {"loss": 4.0 + trial.values["seed"]}}
        finish_trial(trial, loss, bigrams=bigrams, tokens=1024)
    assert read_lines(RESULTS)[-1] == ["bigram", "counts", "4.5000", *[ABSENT] * 4]
    assert len(folders) == len(set(folders)), "each run is read once"
    assert ["bigram", "counts", "4.5000", *[ABSENT] * 4] in read_lines("report grid study.yaml")
    finish_trial(sweep.trials[-1], 2.0, bigrams=bigrams, tokens=2048)
    assert read_lines(RESULTS)[-1][:4] == ["bigram", "counts", "(data", "of"]


def test_objective_may_be_missing_or_maximized(read_lines, invoke):
    sweep = build_sweep(grid={H: [1, 2]}, objective="average.accuracy", direction="maximize")
    assert "no finished trials yet" in invoke("sweep results study.yaml", expect=1)
    finish_trial(sweep.trials[0], 2.0)
    error = invoke("sweep results study.yaml", expect=1)
    assert "objective average.accuracy: result.json has no 'accuracy'; it has loss" in error
    build_sweep(grid={H: [1, 2]}, objective="train_loss.last_20_steps", direction="maximize")
    finish_trial(sweep.trials[1], 3.0, average={})
    assert [row[0] for row in read_lines(RESULTS)[4:]] == ["H=2", "H=1"]


def test_a_trial_that_was_resumed_with_another_config_is_left_out(invoke):
    first, second = build_sweep(grid={H: [1]}, seeds=[0, 1]).trials
    finish_trial(first, 2.0)
    steps = second.config.trainer.max_steps
    for written, key in (({}, "trainer.max_steps"), ({"seed": 5}, "seed")):
        vars(second.config).update(written)
        finish_trial(second, 1.0, steps=steps + (not written))
        printed = invoke("sweep results study.yaml")
        assert ["H=1", "2.0000", "1.5000", "1"] in [line.split()[:4] for line in printed.splitlines()]
        reason = f"was resumed with another {key} than the sweep's; move the folder elsewhere"
        assert f"{second.name}: {reason}" in printed


def test_figures_fix_the_other_keys_at_the_center(tmp_path):
    sweep = build_sweep(grid={H: [1, 2, 4, 8], S: [8, 24]}, center={H: 2, S: 24})
    for trial in sweep.trials:
        finish_trial(trial, 2 + trial.values[H] / 10 + trial.values[S] / 100)
    rows = summarize_trials(sweep)
    through_center = select_results(rows, H, sweep.config.center)
    assert [(row["values"][H], row["values"][S]) for row in through_center] == [(1, 24), (2, 24), (4, 24), (8, 24)]
    through_best = select_results(rows, S, {})  # without a center: through the best trial
    assert [(row["values"][H], row["values"][S]) for row in through_best] == [(1, 8), (1, 24)]


def test_trials_without_an_objective_are_named(invoke):
    sweep = build_sweep(grid={H: [1, 2]})
    finish_trial(sweep.trials[0], 2.0)
    finish_trial(sweep.trials[1], 2.0, average={"loss": None})
    printed = " ".join(invoke("sweep results study.yaml").split())
    assert f"- left out: {sweep.trials[1].name}: objective average.loss: null in result.json" in printed


def test_status_shows_states_and_causes(read_lines):
    sweep = build_sweep(grid={H: [1, 2, 4, 8]})
    done, failed, stopped, _ = sweep.trials
    finish_trial(done, 2.5)
    for trial in (failed, stopped):
        trial.folder.path.mkdir()
        trial.folder.metrics.write_text('{"step": 7, "tokens": 1, "time": 0, "train/loss": 3.25}\n{"step": 8')
    failure = {"exit_code": 1, "cause": "no space left", "attempts": 2, "forgiven": 0, "time": "", "tried_again": False}
    failed.failure.write_text(json.dumps(failure))
    rows = read_lines("sweep status study.yaml")
    assert rows[2][1:] == ["done", "300/300", "2.5000", "1"]
    assert rows[3][1:] == ["failed", "7/300", "3.250", "2", "no", "space", "left"]
    assert rows[4][1:] == ["stopped", "7/300", "3.250", "1"]
    assert rows[5][1:] == ["waiting", "0/300"]
    assert " ".join(rows[-1]).endswith("4 trials: 1 waiting, 1 stopped, 1 failed, 1 done; no worker is running")


def test_status_uses_the_overrides_of_the_last_run(invoke):
    sweep = load_sweep(str(build_sweep(grid={H: [1]}).path), ["seed=3"])
    finish_trial(sweep.trials[0], 2.5)
    (sweep.folder / "sweep.yaml").write_text(sweep.to_yaml())
    assert "1 done" in invoke("sweep status study.yaml")


def test_dry_run_estimates_the_cost_and_writes_no_files(read_lines, monkeypatch):
    sweep = build_sweep(grid={H: [1, 2]})
    finish_trial(sweep.trials[0], 2.5)
    before = sorted(Path().rglob("*"))
    rows = read_lines("sweep run study.yaml --dry-run")
    assert rows[2][1:4] == ["done", "300", "1,228,800"]
    assert rows[3][1:4] == ["waiting", "300", "1,228,800"]
    assert rows[2][4:] == rows[3][4:] == ["\u2013", "\u2013"]
    assert " ".join(rows[-1]).endswith("below 100M parameters")
    assert sorted(Path().rglob("*")) == before

    monkeypatch.setattr(cost, "MIN_PARAMETERS", 0)
    rows = read_lines("sweep run study.yaml --dry-run trainer.accelerator=auto")
    assert float(rows[2][4]) > 0
    assert rows[3][5] == rows[3][4]
    build_sweep(search={"trials": 5, "space": {H: {"values": [1, 2]}}})
    assert read_lines("sweep run study.yaml --dry-run")[3][:4] == ["4", "more", "not", "chosen"]


def test_errors_of_the_command_line(invoke):
    build_sweep(grid={H: [1]})
    errors = {
        "sweep run seed=1": "unknown sweep 'seed=1'",
        "sweep run study.yaml --max-parallel 0": "--max-parallel: expected an integer >= 1, found 0",
        "sweep run study.yaml trainer.accelerator=cpu trainer.num_nodes=3": "data.global_batch_tokens",
        "sweep run study.yaml trainer.accelerator=cpu trainer.num_nodes=2": "--launcher slurm",
    }
    for line, expected in errors.items():
        assert expected in invoke(line, expect=2)
    assert not Path("runs").exists()


def test_only_a_config_with_a_sweep_of_its_name_runs_as_a_sweep():
    assert is_run_as_fit(["formal/quick"])
    assert not any(map(is_run_as_fit, (["quickstart"], ["ablation"], ["formal/quick", "mine.yaml"])))


def test_finished_sweep_prints_the_scores_of_both_models_once(invoke):
    stacktrans, transformer = load_sweep("formal/quick", ["seed=3"]).trials
    assert stacktrans.folder.path.parent.as_posix() == "runs/formal/quick"
    for trial, score in ((stacktrans, 1.0), (transformer, 0.5)):
        accuracy = {"40": 1.0, "41": score, "100": score, "500": score}
        finish_trial(trial, 1.0, model=trial.name.partition("-")[0], score_41_500=score, accuracy=accuracy)
    printed = invoke("fit --config formal/quick seed=3")
    rows = [line.split() for line in printed.splitlines() if line.startswith(("stacktrans ", "transformer "))]
    assert [row[:3] for row in rows] == [["stacktrans", "1.000", "1.000"], ["transformer", "0.500", "0.500"]]
    assert load_sweep("runs/formal/quick").trials == [stacktrans, transformer]
