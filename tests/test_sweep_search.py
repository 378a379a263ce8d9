"""Adaptive search: Optuna proposes the trials, and the run folders are the record."""

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from config_files import build_sweep, finish_trial
from processes import wait_until

from stackexp.config.compose import to_yaml
from stackexp.errors import ConfigError
from stackexp.files import write_hashed_json, write_json_lines
from stackexp.sweeps.search import Study, _read_values
from stackexp.sweeps.status import format_sweep_status
from stackexp.sweeps.sweep import Sweep, load_sweep
from stackexp.sweeps.trials import Trial, TrialState, get_state

PROGRAM = Path(__file__).with_name("sweep_program.py")
S, LR = "model.memory.num_slots", "optimizer.lr"
SPACE = {S: {"low": 1, "high": 64, "int": True}, LR: {"low": 1e-5, "high": 1e-1, "log": True}}
pytestmark = pytest.mark.usefixtures("empty_folder")


def build(name: str = "study", **search: object) -> Sweep:
    return build_sweep(overrides=["trainer.accelerator=cpu"], name=name, search=search)


def start(trial: Trial) -> None:
    trial.folder.path.mkdir(parents=True)
    trial.folder.config.write_text(to_yaml(trial.config))


def run_all(sweep: Sweep, compute_loss=None) -> list[Trial]:
    """Run the trials of a search one at a time and return them in their order; without losses, only start them."""
    study, order = Study(sweep), []
    while not study.is_complete() and (trial := study.draw()):
        order.append(trial)
        start(trial)
        if compute_loss:
            finish_trial(trial, compute_loss(trial.values))
    return order


def count_states(sweep: Sweep) -> Counter:
    return Counter(trial.state.name for trial in Study(sweep).build_study().trials)


@pytest.mark.parametrize(("kind", "stops"), [("tpe", (3, 11, 12)), ("random", (2, 4))])
def test_an_interrupted_search_draws_the_same_trials(kind, stops):
    """Every worker draws as if it had drawn all trials before. TPE draws its first ten trials at random."""
    compute_loss = lambda values: values[LR]  # noqa: E731
    once = [trial.values for trial in run_all(build(kind=kind, trials=stops[-1], space=SPACE), compute_loss)]
    assert len({json.dumps(values) for values in once}) == stops[-1]
    again = []
    for trials in stops:
        sweep = build("again", kind=kind, trials=trials, space=SPACE)
        again += [trial.values for trial in run_all(sweep, compute_loss)]
    assert again == once
    assert Study(build("other", kind=kind, seed=1, space=SPACE)).draw().values != once[0]


def test_study_is_rebuilt_from_the_run_folders():
    trials = run_all(build(trials=5, space=SPACE))
    for loss, trial in enumerate(trials[:3]):
        finish_trial(trial, loss)
    trials[3].pruned.write_text("{}")
    write_hashed_json(trials[4].folder.result, {"version": 1, "average": {}})  # without the objective
    again = build(trials=8, space=SPACE)
    assert {t.folder: t.values for t in again.trials} == {t.folder: t.values for t in trials}
    assert count_states(again) == {"COMPLETE": 3, "PRUNED": 1, "FAIL": 1}
    assert Study(again).build_study().best_value == 0
    assert len(run_all(again)) == 3
    assert count_states(again)["RUNNING"] == 3
    assert Study(again).is_complete()


def test_an_objective_that_no_result_has_ends_the_search():
    options = {"overrides": ["trainer.accelerator=cpu"], "search": {"trials": 4, "space": SPACE}}
    sweep = build_sweep(name="study", objective="average.los", **options)
    finish_trial(run_all(build(trials=2, space=SPACE))[0], math.inf)
    message = r"^runs/study: objective average\.los: result\.json has no 'los'; it has loss; correct it, then"
    with pytest.raises(ConfigError, match=message):
        Study(sweep).draw()
    assert Study(build(trials=4, space=SPACE)).draw() is not None, "the loss of the only finished trial is not finite"
    (finished,) = (trial for trial in build(trials=4, space=SPACE).trials if trial.folder.is_finished)
    write_json_lines(finished.folder.metrics, [{"step": 5, "val/loss/average": 1.0, "memory/push": 0.5}])
    with pytest.raises(
        ConfigError, match=r"prune\.metric average\.loss: not in metrics\.jsonl, which has val/loss/average;"
    ):
        Study(build(trials=4, space=SPACE, prune={"metric": "average.loss", "min_steps": 1})).draw()


def test_a_worker_stops_its_other_trial_if_the_result_has_no_objective():
    Path("runs").mkdir()
    Path("runs/behavior.json").write_text(json.dumps({"S=2-": {"seconds": 60}}))
    sweep = build_sweep(
        name="study",
        overrides=["trainer.accelerator=cpu"],
        objective="average.los",
        search={"trials": 3, "space": {S: {"values": [1, 2]}}},
    )
    command = [sys.executable, PROGRAM, "sweep", "run", "study.yaml", "--max-parallel", "2"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 2, process.stderr
    assert process.stderr.endswith("correct it, then repeat the command\n")
    states = {trial.values[S]: trial for trial in sweep.trials}
    assert get_state(states[1]) == TrialState.DONE
    wait_until(lambda: get_state(states[2]) == TrialState.STOPPED, seconds=30)


def test_trials_outside_a_narrowed_space_belong_to_another_search():
    run_all(build(trials=3, space={S: {"values": [1, 2, 3]}}), lambda values: 1.0)
    narrowed = build(trials=3, space={S: {"values": [1, 2]}})
    assert sorted(trial.values[S] for trial in narrowed.trials) == [1, 2]
    assert len(build(trials=3, space={S: {"low": 2, "high": 3, "int": True}}).trials) == 2
    assert build(trials=3, space={LR: SPACE[LR]}).trials == []


def test_exhausted_space_ends_the_search():
    sweep = build(trials=10, space={S: {"values": [1, 2, 3]}})
    assert sorted(trial.values[S] for trial in run_all(sweep, lambda values: 1.0)) == [1, 2, 3]
    study = Study(sweep)
    assert study.draw() is None
    assert study.is_complete()


def test_workers_draw_different_trials_and_prune_bad_ones():
    """Successive halving ends trials early. Two workers share the search."""
    Path("runs").mkdir()
    behavior = {f"S={slots}-": {"loss": slots, "seconds": 3} for slots in range(1, 10)}
    Path("runs/behavior.json").write_text(json.dumps(behavior))
    space, prune = {S: {"low": 1, "high": 9, "int": True}}, {"min_steps": 2, "reduction_factor": 2}
    sweep = build(trials=6, space=space, prune=prune)
    command = [sys.executable, PROGRAM, "sweep", "run", "study.yaml", "--max-parallel", "2"]
    workers = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in workers] == [0, 0]
    states = {trial.values[S]: get_state(trial) for trial in sweep.trials}
    assert len(states) == 6
    assert set(states.values()) == {TrialState.DONE, TrialState.PRUNED}
    assert states[min(states)] == TrialState.DONE
    for trial in sweep.trials:
        assert len((trial.folder.path / "attempts").read_text().splitlines()) == 1
        if get_state(trial) == TrialState.PRUNED:
            assert json.loads(trial.pruned.read_text())["val/loss/average"] == trial.values[S]
            assert not trial.folder.is_finished
            assert not trial.failure.exists()


def test_a_trial_is_pruned_even_if_later_values_arrive_at_once():
    prune = {"metric": "val/loss/average", "min_steps": 100, "reduction_factor": 2}
    sweep = build(trials=2, space={S: SPACE[S]}, prune=prune)
    good, bad = run_all(sweep)
    for trial, loss in ((good, 1.0), (bad, 9.0)):
        lines = ({"step": step, "val/loss/average": loss} for step in (50, 100, 150))
        write_json_lines(trial.folder.metrics, lines)
    assert Study(sweep).find_pruned([good, bad]) == [bad]
    assert json.loads(bad.pruned.read_text())["step"] == 100
    bad.pruned.unlink()  # the worker was killed before it wrote the file
    again = load_sweep("study.yaml")
    assert [trial.folder for trial in Study(again).find_pruned(again.trials)] == [bad.folder]


@pytest.mark.parametrize(("metric", "best"), [("val/loss/average", 1.0), ("val/accuracy/average", 9.0)])
def test_a_search_prunes_high_losses_and_low_accuracies(metric, best):
    prune = {"metric": metric, "min_steps": 5, "reduction_factor": 2}
    sweep = build(trials=2, space={S: SPACE[S]}, prune=prune)
    trials = run_all(sweep)
    for trial, value in zip(trials, (1.0, 9.0), strict=True):
        lines = ({"step": 4, metric: None}, {"step": 5, metric: value})  # null: not finite
        write_json_lines(trial.folder.metrics, lines)
    (pruned,) = Study(sweep).find_pruned(trials)
    assert json.loads(pruned.pruned.read_text())[metric] != best


def test_a_search_without_trials_has_a_status():
    sweep = build(space=SPACE)
    assert "no trials yet; no worker is running" in format_sweep_status(sweep, [])


def test_a_search_over_the_proportions_of_streams_resumes():
    key = "data.streams.web.proportion"
    streams = "data.streams={web: {path: web, proportion: 0.5}, code: {path: code, proportion: 0.5}}"
    space = {key: {"low": 0.1, "high": 0.9}}
    sweep = build_sweep(overrides=["data.kind=shards", streams], search={"space": space})
    start(sweep.build_trial({key: 0.25}, "web=0.25"))
    assert [found.values for found in sweep.trials] == [{key: 0.25}]


def test_a_finished_trial_whose_process_still_runs_is_not_pruned():
    sweep = build(trials=2, space={S: SPACE[S]}, prune={"metric": "val/loss/average", "min_steps": 1})
    trials = run_all(sweep, lambda values: 1.0)
    for loss, trial in enumerate(trials):
        write_json_lines(trial.folder.metrics, [{"step": 5, "val/loss/average": loss}])
    assert Study(sweep).find_pruned(trials) == []


def test_missing_optuna_is_a_config_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'stackexp\[optuna\]'"):
        Study(build(space=SPACE))


def test_training_losses_are_averaged_over_twenty_steps():
    lines = [{"step": step, "train/loss": float(step)} for step in range(15, 65)]
    assert _read_values(lines, "train/loss") == [(40, 30.5), (60, 50.5)]
